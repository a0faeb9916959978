# SPDX-License-Identifier: Apache-2.0
"""GDN verify with the decode kernel's arithmetic.

Why: the host verifies a block with another recurrence kernel than it decodes with
    (sglang/kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py:143
    against fla/fused_recurrent.py:187): other tile and reduction axis, the q/k norm
    with two roundings, beta not rounded to bf16. The states part at the first token.
What: one launch per layer that applies the decode kernel's operations, in its
    order, once per draft position; the state stays in registers, and what each step
    did to it is recorded for the commit (`gdn_commit`).
Scope: target_verify of linear chains, float32 state. Trees and other state dtypes
    are refused.
Retire when: the host verifies GDN with decode arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_exact.hooks.base import Unsupported, hook, refuse_unknown

if TYPE_CHECKING:
    import torch

DECODE_KERNEL = (
    "sglang.kernels.ops.attention.fla.fused_recurrent."
    "fused_recurrent_gated_delta_rule_packed_decode_kernel"
)
DECODE_LAUNCHER = (
    "sglang.kernels.ops.attention.fla.fused_recurrent."
    "fused_recurrent_gated_delta_rule_packed_decode"
)


def packed_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The packed convolution output that q, k and v are views of.

    q, k: [1, num_tokens, H, K]; v: [1, num_tokens, HV, V]; all bf16 views of one
    row-major tensor, q | k | v along its last dimension. Returns
    [num_tokens, 2*H*K + HV*V] without a copy. Raises Unsupported otherwise.
    """
    num_tokens, size = q.shape[1], q.element_size()
    widths = [t.shape[2] * t.shape[3] for t in (q, k, v)]
    starts = [t.data_ptr() - q.data_ptr() for t in (q, k, v)]
    rows = {t.stride(1) for t in (q, k, v)}
    packed = (
        starts == [0, widths[0] * size, (widths[0] + widths[1]) * size]
        and len(rows) == 1
        and all(t.stride(2) == t.shape[3] and t.stride(3) == 1 for t in (q, k, v))
        and len({t.untyped_storage().data_ptr() for t in (q, k, v)}) == 1
    )
    if not packed:
        raise Unsupported(
            f"target_verify: found q, k, v at byte offsets {starts} with row strides "
            f"{sorted(rows)}; expected views of one packed [num_tokens, "
            f"{sum(widths)}] tensor; fix: install the pinned host release"
        )
    return q.as_strided((num_tokens, sum(widths)), (q.stride(1), 1))


def _check(
    q: torch.Tensor,
    ssm_states: torch.Tensor,
    records: torch.Tensor,
    cache_steps: int,
    retrieve_parent_token: torch.Tensor | None,
) -> None:
    import torch

    found = []
    if retrieve_parent_token is not None:
        found.append("a draft tree (retrieve_parent_token is set), expected a chain")
    for name, tensor in (("state", ssm_states), ("records", records)):
        if tensor.dtype != torch.float32:
            found.append(f"{name} of {tensor.dtype}, expected torch.float32")
    if records.ndim != 3:
        found.append(
            f"a buffer of states {tuple(records.shape)}, expected records of "
            "[requests, draft_tokens, width]"
        )
    if q.shape[0] != 1 or cache_steps <= 0 or q.shape[1] % cache_steps:
        found.append(
            f"q of shape {tuple(q.shape)} with {cache_steps} draft tokens, expected "
            "[1, bs * draft_tokens, H, K]"
        )
    elif records.shape[1] < cache_steps:
        found.append(
            f"room for {records.shape[1]} steps, expected at least {cache_steps}"
        )
    if found:
        raise Unsupported(
            "target_verify cannot have decode's bits: " + "; ".join(found)
        )


@hook(
    "sglang.srt.layers.attention.linear.kernels.gdn_triton.TritonGDNKernel.target_verify",
    "REPLACE",
    name="gdn_verify",
    relies_on=(
        DECODE_KERNEL,
        DECODE_LAUNCHER,
        "sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend.forward_extend",
        "sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend.forward_decode",
        "sglang.srt.layers.attention.linear.gdn_backend.GDNKernelDispatcher",
        "sglang.kernels.ops.mamba.causal_conv1d_triton.causal_conv1d_update",
        "sglang.kernels.ops.attention.triton_gdn_fused_proj."
        "fused_qkvzba_causal_conv1d_update_contiguous",
    ),
)
def target_verify(
    self: Any,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    intermediate_states_buffer: torch.Tensor,
    intermediate_state_indices: torch.Tensor,
    cache_steps: int,
    retrieve_parent_token: torch.Tensor | None,
    stable_rows: bool = False,
    **unknown: object,
) -> torch.Tensor:
    """Verify `cache_steps` draft positions of each request; returns [1, T, HV, V].

    Replaces TritonGDNKernel.target_verify; shapes as there. Row i of a request is
    what decode would return for that token, bit for bit.
    """
    refuse_unknown("TritonGDNKernel.target_verify", unknown)
    if stable_rows:
        raise Unsupported(
            "target_verify: found stable_rows (pipeline-parallel speculation); "
            "expected SGLANG_ENABLE_PP_SPEC unset"
        )
    _check(
        q, ssm_states, intermediate_states_buffer, cache_steps, retrieve_parent_token
    )
    from sglang_exact_kernels.gdn_verify import gdn_verify

    bs = q.shape[1] // cache_steps
    num_v_heads = v.shape[2]
    return gdn_verify(
        packed_qkv(q, k, v),
        a.reshape(-1, num_v_heads),
        b.reshape(-1, num_v_heads),
        A_log,
        dt_bias,
        ssm_states=ssm_states,
        cache_indices=cache_indices[:bs],
        records=intermediate_states_buffer,
        record_rows=intermediate_state_indices[:bs],
        num_draft_tokens=cache_steps,
        num_k_heads=q.shape[2],
        scale=q.shape[3] ** -0.5,
    )
