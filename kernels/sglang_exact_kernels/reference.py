# SPDX-License-Identifier: Apache-2.0
"""References: fp64 for accuracy, single steps of a given decode kernel for bits.

A promise "bits of the decode kernel" has one honest reference: that kernel. The
functions named *_by_steps take its launcher as an argument, because this package does
not import the host. The *_fp64 and *_exact ones state the mathematics.
"""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_exact_kernels.small_m_gemm import K_STEP

__all__ = [
    "DecodeStep",
    "attention_fp64",
    "gdn_verify_by_steps",
    "gdn_verify_fp64",
    "small_m_gemm_exact",
    "small_m_gemm_reference",
    "verify_rows_reference",
]


class DecodeStep(Protocol):
    """One decode step of the gated delta rule, from `source` states to `target` ones.

    mixed_qkv [bs, D], a and b [bs, HV] (row strides of their own), source and target
    [rows, HV, V, K] views, out [bs, 1, HV, V] contiguous, indices [bs] row of each
    request in source and target, negative for padding.
    """

    def __call__(
        self,
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
    ) -> None: ...


def gdn_verify_by_steps(
    decode_step: DecodeStep,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    intermediate_states: torch.Tensor,
    intermediate_indices: torch.Tensor,
    num_draft_tokens: int,
    scale: float,
) -> torch.Tensor:
    """`gdn_verify` as num_draft_tokens launches of `decode_step`; same arguments.

    The last step's rows of `intermediate_states` hold the initial state until the last
    launch overwrites them, so no buffer is needed beside the output. Allocates small
    index tensors: for self-tests, not for a captured graph.
    """
    bs, T = cache_indices.numel(), num_draft_tokens
    HV, V = ssm_states.shape[1:3]
    live = (cache_indices >= 0) & (intermediate_indices >= 0)
    rows = torch.where(live, intermediate_indices, -1).to(torch.int32)
    last = intermediate_states[:, T - 1]
    last[intermediate_indices[live].long()] = ssm_states[cache_indices[live].long()]
    out = mixed_qkv.new_empty(bs, T, HV, V)
    step_out = mixed_qkv.new_empty(bs, 1, HV, V)
    for t in range(T):
        source = last if t == 0 else intermediate_states[:, t - 1]
        decode_step(
            mixed_qkv=mixed_qkv[t::T],
            a=a[t::T],
            b=b[t::T],
            A_log=A_log,
            dt_bias=dt_bias,
            scale=scale,
            source=source,
            target=intermediate_states[:, t],
            out=step_out,
            indices=rows,
        )
        out[:, t] = step_out[:, 0]
    return out.view(1, bs * T, HV, V)


def gdn_verify_fp64(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    states: torch.Tensor,
    num_draft_tokens: int,
    num_k_heads: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 gated delta rule: out [bs, T, HV, V] and states [bs, T, HV, V, K].

    `states` [bs, HV, V, K] are the initial ones; other arguments as `gdn_verify`. Beta
    is rounded to b's dtype, which is part of the definition, nothing else is.
    """
    bs, HV, V, K = states.shape
    T, H = num_draft_tokens, num_k_heads
    wide = mixed_qkv.double().view(bs, T, -1)
    q, k, v = wide.split([H * K, H * K, HV * V], dim=-1)
    q = q.reshape(bs, T, H, K).repeat_interleave(HV // H, dim=2)
    k = k.reshape(bs, T, H, K).repeat_interleave(HV // H, dim=2)
    v = v.reshape(bs, T, HV, V)
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * scale
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    x = a.double().view(bs, T, HV) + dt_bias.double()
    softplus = torch.where(x <= 20.0, torch.log1p(torch.exp(x)), x)
    decay = torch.exp(-torch.exp(A_log.double()) * softplus)
    beta = torch.sigmoid(b.double()).to(b.dtype).double().view(bs, T, HV)

    h = states.double()
    outs, kept = [], []
    for t in range(T):
        h = h * decay[:, t, :, None, None]
        u = (v[:, t] - (h * k[:, t, :, None, :]).sum(-1)) * beta[:, t, :, None]
        h = h + u[..., None] * k[:, t, :, None, :]
        outs.append((h * q[:, t, :, None, :]).sum(-1))
        kept.append(h)
    return torch.stack(outs, 1), torch.stack(kept, 1)


def verify_rows_reference(
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    out_cache_loc: torch.Tensor,
    num_draft_tokens: int,
    split_tile_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draft positions as host decode rows: (row_indptr, row_splits, row_indices).

    Row (request, position i) has the request's prefix and the block up to i as keys.
    """
    T = num_draft_tokens
    starts = kv_indptr.tolist()
    rows = []
    for r in range(len(starts) - 1):
        prefix = kv_indices[starts[r] : starts[r + 1]]
        for i in range(T):
            rows.append(torch.cat([prefix, out_cache_loc[T * r : T * r + i + 1]]))
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    indptr = torch.zeros(len(rows) + 1, dtype=torch.int32)
    indptr[1:] = lengths.cumsum(0)
    splits = (lengths + split_tile_size - 1) // split_tile_size
    return indptr, splits.to(torch.int32), torch.cat(rows)


def attention_fp64(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    row_slots: list[torch.Tensor],
    sm_scale: float,
) -> torch.Tensor:
    """fp64 attention of single query rows over gathered keys: [rows, q_heads, v_dim].

    q [rows, q_heads, head_dim]; k_buffer, v_buffer [slots, kv_heads, dim]; row_slots[i]
    holds the slots of row i's keys in order.
    """
    group = q.shape[1] // k_buffer.shape[1]
    outs = []
    for i, slots in enumerate(row_slots):
        k = k_buffer[slots].double().repeat_interleave(group, dim=1)
        v = v_buffer[slots].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,nhd->hn", q[i].double(), k) * sm_scale
        outs.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v))
    return torch.stack(outs)


def small_m_gemm_reference(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A[M, K] @ W[N, K]^T in the kernel's order: K steps of 16, ascending, fp32.

    Inside a step the 16 products are summed exactly and the sum is added to the
    accumulator with one rounding to nearest. The tensor core's rounding inside a step
    is its own, so on a device this is a reference of order and not of bits; there
    DeepGEMM is the reference of bits.
    """
    acc = torch.zeros(a.shape[0], w.shape[0], dtype=torch.float32, device=a.device)
    for k in range(0, a.shape[1], K_STEP):
        step = a[:, k : k + K_STEP].double() @ w[:, k : k + K_STEP].double().t()
        acc = (acc.double() + step).float()
    return acc.to(torch.bfloat16)


def small_m_gemm_exact(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A[M, K] @ W[N, K]^T in fp64: bf16 products are exact, the sum nearly so."""
    return a.double() @ w.double().t()
