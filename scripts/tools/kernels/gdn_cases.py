# SPDX-License-Identifier: Apache-2.0
"""Inputs for the gated delta rule tests, and the host's decode kernel as a launcher."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sglang_exact_kernels.gdn_commit import gdn_commit
from sglang_exact_kernels.gdn_verify import gdn_verify, record_width


class GdnShape(NamedTuple):
    bs: int
    T: int
    H: int
    HV: int
    K: int
    V: int


class GdnCase(NamedTuple):
    shape: GdnShape
    mixed_qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    ssm_states: torch.Tensor
    cache_indices: torch.Tensor
    scale: float

    def rows(self, requests: list[int]) -> GdnCase:
        """The same problem for some of the requests, in the given order."""
        T = self.shape.T
        tokens = [T * r + t for r in requests for t in range(T)]
        return self._replace(
            shape=self.shape._replace(bs=len(requests)),
            mixed_qkv=self.mixed_qkv[tokens],
            a=self.a[tokens],
            b=self.b[tokens],
            cache_indices=self.cache_indices[requests],
        )

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """NaN-filled per-step states and their row numbers."""
        s = self.shape
        inter = torch.full(
            (s.bs + 1, s.T, s.HV, s.V, s.K),
            float("nan"),
            device=self.mixed_qkv.device,
        )
        rows = torch.arange(s.bs, dtype=torch.int32, device=inter.device)
        return inter, rows

    def records(self) -> tuple[torch.Tensor, torch.Tensor]:
        """NaN-filled records of a block and their row numbers."""
        s = self.shape
        size = (s.bs + 1, s.T, record_width(s.H, s.HV, s.K, s.V))
        device = self.mixed_qkv.device
        rows = torch.arange(s.bs, dtype=torch.int32, device=device)
        return torch.full(size, float("nan"), device=device), rows

    def verify(self, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [bs, T, HV, V] and per-step states [bs, T, HV, V, K]."""
        records, rows = self.records()
        arguments = {
            "ssm_states": self.ssm_states,
            "cache_indices": self.cache_indices,
            "records": records,
            "record_rows": rows,
            "num_draft_tokens": self.shape.T,
            "num_k_heads": self.shape.H,
            "scale": self.scale,
            **changes,
        }
        out = gdn_verify(
            self.mixed_qkv, self.a, self.b, self.A_log, self.dt_bias, **arguments
        )
        s = self.shape
        states = self.committed(arguments["records"], arguments["record_rows"])
        return out.view(s.bs, s.T, s.HV, s.V), states

    def committed(self, records: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """States [bs, T, HV, V, K] after each step, by gdn_commit; NaN for padding."""
        s, slots = self.shape, self.cache_indices
        live = slots >= 0
        found = torch.full(
            (s.bs, s.T, s.HV, s.V, s.K), float("nan"), device=records.device
        )
        for t in range(s.T):
            pool = self.ssm_states.clone()
            gdn_commit(
                pool[None],
                records[None],
                cache_indices=slots,
                record_rows=rows,
                last_steps=torch.full_like(slots, t),
            )
            found[live, t] = pool[slots[live].long()]
        return found

    def by_steps(self, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The same through single launches of the host's decode kernel."""
        from sglang_exact_kernels.reference import gdn_verify_by_steps

        inter, rows = self.buffers()
        out = gdn_verify_by_steps(
            host_decode_step,
            self.mixed_qkv,
            self.a,
            self.b,
            self.A_log,
            self.dt_bias,
            ssm_states=self.ssm_states,
            cache_indices=self.cache_indices,
            intermediate_states=inter,
            intermediate_indices=rows,
            num_draft_tokens=self.shape.T,
            scale=self.scale if scale is None else scale,
        )
        s = self.shape
        return out.view(s.bs, s.T, s.HV, s.V), inter[: s.bs]


def make_case(
    shape: GdnShape,
    device: torch.device,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
) -> GdnCase:
    """Random inputs whose gates run from about 0 to far below -20.

    Logits a spread over -30 .. 30 and A_log over -4 .. 4, so decay exp(g) takes 1,
    everything between, and exact 0. States lie in a pool with unused slots of NaN.
    """
    bs, T, H, HV, K, V = shape
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g)

    slots = torch.randperm(bs + 3, generator=g)[:bs].to(torch.int32)
    states = torch.full((bs + 3, HV, V, K), float("nan"))
    states[slots.long()] = normal(bs, HV, V, K)
    case = GdnCase(
        shape=shape,
        mixed_qkv=normal(bs * T, 2 * H * K + HV * V).to(dtype),
        a=(normal(bs * T, HV) * 10).clamp(-30, 30).to(dtype),
        b=(normal(bs * T, HV) * 4).to(dtype),
        A_log=normal(HV).mul(2).clamp(-4, 4),
        dt_bias=normal(HV),
        ssm_states=states,
        cache_indices=slots,
        scale=K**-0.5,
    )
    moved = {
        name: value.to(device)
        for name, value in case._asdict().items()
        if isinstance(value, torch.Tensor)
    }
    return case._replace(**moved)


def host_decode_step(
    *,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    source: torch.Tensor,
    target: torch.Tensor,
    out: torch.Tensor,
    indices: torch.Tensor,
) -> None:
    """The host's packed decode kernel, launched as its wrapper launches it."""
    from sglang.kernels.ops.attention.fla import fused_recurrent

    kernel = fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode_kernel
    bs, HV = a.shape
    V, K = source.shape[-2:]
    block_v = min(V, 32)
    kernel[(-(-V // block_v), bs * HV)](
        mixed_qkv=mixed_qkv,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        o=out,
        h0=source,
        ht=target,
        ssm_state_indices=indices,
        scale=scale,
        stride_mixed_qkv_tok=mixed_qkv.stride(0),
        stride_a_tok=a.stride(0),
        stride_b_tok=b.stride(0),
        stride_init_state_token=source.stride(0),
        stride_final_state_token=target.stride(0),
        stride_indices_seq=indices.stride(0),
        H=(mixed_qkv.shape[1] - HV * V) // (2 * K),
        HV=HV,
        K=K,
        V=V,
        BK=K,
        BV=block_v,
        SOFTPLUS_THRESHOLD=20.0,
        USE_QK_L2NORM_IN_KERNEL=True,
        num_warps=1,
        num_stages=3,
    )
