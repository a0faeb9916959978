# SPDX-License-Identifier: Apache-2.0
"""Gated delta rule: the state after the accepted tokens of a block, from its records.

For every layer, request and value head, over the tokens t = 0 .. last (h is [V, K]):

    h = h * decay_t;  h = h + u_t k_t^T

with u, k and decay as `gdn_verify` recorded them, all fp32.

Reduction order: none; each element takes one multiplication and one fma a token, in
order, which is what the decode kernel does to it once u, k and decay are known.
Invariant to: bs, the other requests, layers, last, BLOCK_V, where a state lies.
Not covered: states that are not fp32, blocks of several sequences a request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_exact_kernels import checks
from sglang_exact_kernels.gdn_verify import record_width

__all__ = ["gdn_commit"]

# 16 KiB of state in flight a program; there are layers * bs * HV * 4 of them.
_BLOCK_V = 32
_NUM_WARPS = 4


@triton.jit
def _gdn_commit_kernel(
    states,  # [layers, slots, HV, V, K] fp32
    records,  # [layers, rows, steps, HV * V + H * K + HV] fp32
    cache_indices,  # [bs]
    record_rows,  # [bs]
    last_steps,  # [bs]
    stride_state_layer,
    stride_state_slot,
    stride_record_layer,
    stride_record_row,
    stride_record_step,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    i_n = tl.program_id(1) // HV
    i_hv = tl.program_id(1) % HV
    i_h = i_hv // (HV // H)
    layer = tl.program_id(2).to(tl.int64)
    slot = tl.load(cache_indices + i_n).to(tl.int64)
    row = tl.load(record_rows + i_n).to(tl.int64)
    last = tl.load(last_steps + i_n).to(tl.int32)
    if (slot < 0) | (row < 0) | (last < 0):
        return

    offs_k = tl.arange(0, K)
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    mask_h = mask_v[:, None] & (offs_k < K)[None, :]
    offs_h = i_hv * V * K + offs_v[:, None] * K + offs_k[None, :]
    p_h = states + layer * stride_state_layer + slot * stride_state_slot + offs_h
    p_record = records + layer * stride_record_layer + row * stride_record_row
    h = tl.load(p_h, mask=mask_h, other=0)
    for _ in range(last + 1):
        u = tl.load(p_record + i_hv * V + offs_v, mask=mask_v, other=0)
        k = tl.load(p_record + (HV * V + i_h * K + offs_k))
        decay = tl.load(p_record + (HV * V + H * K + i_hv))
        # An explicit fma: nothing left for the compiler to contract in another way.
        h = tl.fma(u[:, None], k[None, :], h * decay)
        p_record += stride_record_step
    tl.store(p_h, h, mask=mask_h)


def _key_heads(states: torch.Tensor, records: torch.Tensor) -> int:
    """Number of key heads, by the width of the records."""
    HV, V, K = states.shape[2:]
    return int((records.shape[3] - HV * V - HV) // K)


def _check(
    states: torch.Tensor, records: torch.Tensor, indices: dict[str, torch.Tensor]
) -> None:
    """Raise ValueError with every reason why the call is refused."""
    reasons = checks.device_reasons({"states": states, "records": records, **indices})
    expected = [
        ("states dims", states.ndim, 5),
        ("records dims", records.ndim, 4),
        *(
            (f"{name} dtype", tensor.dtype, torch.float32)
            for name, tensor in (("states", states), ("records", records))
        ),
    ]
    bs = indices["cache_indices"].numel()
    for name, tensor in indices.items():
        expected.append((f"{name} shape", tuple(tensor.shape), (bs,)))
        expected.append((f"{name} contiguous", tensor.is_contiguous(), True))
    if states.ndim == 5 and records.ndim == 4:
        HV, V, K = states.shape[2:]
        width, H = records.shape[3], _key_heads(states, records)
        expected += [
            ("layers of records", records.shape[0], states.shape[0]),
            ("states inner strides", states.stride()[2:], (V * K, K, 1)),
            ("records last stride", records.stride(3), 1),
            ("records width", width, record_width(max(H, 1), HV, K, V)),
            ("K is a power of two", K & (K - 1), 0),
        ]
    checks.refuse("gdn_commit", reasons + checks.mismatches(expected))


def gdn_commit(
    states: torch.Tensor,
    records: torch.Tensor,
    *,
    cache_indices: torch.Tensor,
    record_rows: torch.Tensor,
    last_steps: torch.Tensor,
) -> None:
    """Advance the states of all layers by the accepted tokens of a block, in place.

    states         [layers, slots, HV, V, K] fp32
    records        [layers, rows, steps, record_width] fp32, of `gdn_verify`
    cache_indices  [bs] slot of each request; negative marks a padding row
    record_rows    [bs] row of its records
    last_steps     [bs] its last accepted step, 0 to steps - 1; negative: none
    Padding rows and requests without an accepted token store nothing. Raises
    ValueError, before any launch, with every reason why the call is refused. No host
    synchronisation; allocates nothing.
    """
    indices = {
        "cache_indices": cache_indices,
        "record_rows": record_rows,
        "last_steps": last_steps,
    }
    _check(states, records, indices)
    layers, _, HV, V, K = states.shape
    block_v = min(triton.next_power_of_2(V), _BLOCK_V)
    grid = (triton.cdiv(V, block_v), cache_indices.numel() * HV, layers)
    _gdn_commit_kernel[grid](
        states,
        records,
        cache_indices,
        record_rows,
        last_steps,
        states.stride(0),
        states.stride(1),
        records.stride(0),
        records.stride(1),
        records.stride(2),
        H=_key_heads(states, records),
        HV=HV,
        K=K,
        V=V,
        BLOCK_V=block_v,
        num_warps=_NUM_WARPS,
    )
