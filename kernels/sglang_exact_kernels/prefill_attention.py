# SPDX-License-Identifier: Apache-2.0
"""Attention for prefill rows (extend, chunked prefill) over a paged KV cache.

Row (r, i), new token i of request r, attends to the request's prefix and to the new
tokens 0 .. i. Keys are read from the cache alone, where the new ones already lie.
Query heads of one KV head are packed: a program owns BLOCK_M rows (token, head of the
group) and every K and V tile it loads serves all of them.

Reduction order: keys are walked from position 0 up in tiles of BLOCK_N keys at
multiples of BLOCK_N, with one running maximum, sum and accumulator per row; P is
rounded to the cache's dtype. A tile beyond a row's last key multiplies its accumulator
by exp2(0) = 1 and adds zeros, so it does not matter which rows share a program. Tiles
that every row of a program sees whole run without a mask, by the same arithmetic.
Invariant to: where a prompt is cut, bs, the other requests, the row's place in its
program, where keys lie in the cache, the grid. Tiles depend on the architecture alone.
Not covered: sliding windows, logit caps, sinks, custom masks, bidirectional layers,
page sizes above 1, quantised caches; non-finite values of a later token of the same
request reach the rows before it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_exact_kernels import arch, checks

__all__ = ["prefill_attention"]


class _Tile(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


_TILES = {
    90: _Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
    120: _Tile(block_m=64, block_n=32, num_warps=4, num_stages=2),
}

_MAX_BS = 65535  # grid dimension z
_LOG2_E = 1.4426950408889634


@triton.jit
def _walk(
    row_max,
    row_sum,
    acc,
    q_tile,
    limit,
    first,
    last,
    begin,
    prefix,
    keys,
    k_head,
    v_head,
    kv_indices,
    new_loc,
    stride_k_slot,
    stride_v_slot,
    qk_scale,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    IN_PREFIX: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys first .. last. IN_PREFIX: all of them precede the new tokens.

    MASKED: some row does not see some of them. Both only leave out loads and selects
    that would change nothing.
    """
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    for n in range(first, last, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)
        exists = offs_n < keys
        if IN_PREFIX:
            slot = tl.load(kv_indices + begin + offs_n)
        else:
            old = offs_n < prefix
            slot = tl.load(kv_indices + begin + offs_n, mask=old, other=0)
            slot += tl.load(
                new_loc + (offs_n - prefix), mask=exists & (offs_n >= prefix), other=0
            )
        slot = slot.to(tl.int64)
        p_k = k_head + slot[:, None] * stride_k_slot + offs_d[None, :]
        p_v = v_head + slot[:, None] * stride_v_slot + offs_dv[None, :]
        if MASKED:
            k = tl.load(p_k, mask=exists[:, None] & (offs_d < D)[None, :], other=0.0)
            v = tl.load(p_v, mask=exists[:, None] & (offs_dv < DV)[None, :], other=0.0)
        else:
            k = tl.load(p_k, mask=(offs_d < D)[None, :], other=0.0)
            v = tl.load(p_v, mask=(offs_dv < DV)[None, :], other=0.0)
        qk = tl.dot(q_tile, tl.trans(k))
        if MASKED:
            qk = tl.where(offs_n[None, :] < limit[:, None], qk, float("-inf"))
        # Every row sees key 0, so the maximum is finite from the first tile on.
        new_max = tl.maximum(row_max, tl.max(qk, 1))
        rescale = tl.exp2((row_max - new_max) * qk_scale)
        # Explicit fma: nothing left for the compiler to contract.
        shift = 0.0 - new_max * qk_scale
        p = tl.exp2(tl.fma(qk, qk_scale, shift[:, None]))
        row_sum = tl.fma(row_sum, rescale, tl.sum(p, 1))
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
        row_max = new_max
    return row_max, row_sum, acc


# Not specialised: one binary whatever the batch and however the slots are sliced.
@triton.jit(
    do_not_specialize=["blocks"],
    do_not_specialize_on_alignment=[
        "qo_indptr",
        "kv_indptr",
        "kv_indices",
        "out_cache_loc",
    ],
)
def _prefill_kernel(
    q,  # [tokens, HKV * GROUP, D]
    k_buffer,  # [slots, HKV, D]
    v_buffer,  # [slots, HKV, DV]
    out,  # [tokens, HKV * GROUP, DV]
    qo_indptr,  # [bs + 1] int32
    kv_indptr,  # [bs + 1] int32
    kv_indices,  # [kv_indptr[bs]]
    out_cache_loc,  # [tokens]
    qk_scale,
    blocks,
    stride_q_row,
    stride_q_head,
    stride_k_slot,
    stride_k_head,
    stride_v_slot,
    stride_v_head,
    stride_out_row,
    stride_out_head,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    # Neighbouring programs walk the same keys; the last block, which has the most of
    # them, comes first.
    block = blocks - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    r = tl.program_id(2)
    q_begin = tl.load(qo_indptr + r)
    tokens = tl.load(qo_indptr + r + 1) - q_begin
    if block * BLOCK_M >= tokens * GROUP:
        return
    begin = tl.load(kv_indptr + r)
    prefix = tl.load(kv_indptr + r + 1) - begin

    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = offs_m < tokens * GROUP
    # A row beyond the last one repeats the last token; it is not stored.
    token = tl.minimum(offs_m // GROUP, tokens - 1)
    head = kv_head * GROUP + offs_m % GROUP
    limit = prefix + token + 1
    lowest = prefix + (block * BLOCK_M) // GROUP + 1
    keys = prefix + tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP + 1, tokens)
    in_prefix = prefix // BLOCK_N * BLOCK_N
    whole = tl.maximum(lowest // BLOCK_N * BLOCK_N, in_prefix)

    row = (q_begin + token).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    q_tile = tl.load(
        q
        + row[:, None] * stride_q_row
        + head[:, None] * stride_q_head
        + offs_d[None, :],
        mask=(offs_d < D)[None, :],
        other=0.0,
    )
    k_head = k_buffer + kv_head.to(tl.int64) * stride_k_head
    v_head = v_buffer + kv_head.to(tl.int64) * stride_v_head
    new_loc = out_cache_loc + q_begin.to(tl.int64)
    begin = begin.to(tl.int64)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    for part in tl.static_range(3):
        row_max, row_sum, acc = _walk(
            row_max,
            row_sum,
            acc,
            q_tile,
            limit,
            0 if part == 0 else (in_prefix if part == 1 else whole),
            in_prefix if part == 0 else (whole if part == 1 else keys),
            begin,
            prefix,
            keys,
            k_head,
            v_head,
            kv_indices,
            new_loc,
            stride_k_slot,
            stride_v_slot,
            qk_scale,
            D,
            DV,
            BLOCK_N,
            BLOCK_D,
            BLOCK_DV,
            part == 0,
            part == 2,
        )
    offs_dv = tl.arange(0, BLOCK_DV)
    value = acc / row_sum[:, None]
    tl.store(
        out
        + row[:, None] * stride_out_row
        + head[:, None] * stride_out_head
        + offs_dv[None, :],
        value.to(out.dtype.element_ty),
        mask=valid[:, None] & (offs_dv < DV)[None, :],
    )


class _Call(NamedTuple):
    q: torch.Tensor
    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    out: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    out_cache_loc: torch.Tensor


_INDICES = ("qo_indptr", "kv_indptr", "kv_indices", "out_cache_loc")


def _layout_reasons(call: _Call) -> list[str]:
    reasons = checks.attention_layout_reasons(call._asdict(), _INDICES)
    return reasons + checks.mismatches(
        (
            ("qo_indptr dtype", call.qo_indptr.dtype, torch.int32),
            ("kv_indptr dtype", call.kv_indptr.dtype, torch.int32),
            ("kv_indices dtype", call.kv_indices.dtype, torch.int64),
            ("out_cache_loc dtype", call.out_cache_loc.dtype, torch.int64),
        )
    )


def _shape_reasons(call: _Call, max_extend_len: int) -> list[str]:
    tokens, q_heads, dim = call.q.shape
    slots, kv_heads, k_dim = call.k_buffer.shape
    v_dim = call.v_buffer.shape[2]
    reasons = checks.mismatches(
        (
            ("k_buffer head_dim", k_dim, dim),
            ("v_buffer slots, heads", call.v_buffer.shape[:2], (slots, kv_heads)),
            ("out shape", tuple(call.out.shape), (tokens, q_heads, v_dim)),
            ("q_heads % kv_heads", q_heads % kv_heads, 0),
            ("kv_indptr entries", call.kv_indptr.numel(), call.qo_indptr.numel()),
        )
    )
    bs = call.qo_indptr.numel() - 1
    if not 1 <= bs <= _MAX_BS or not 1 <= max_extend_len <= tokens:
        reasons.append(
            f"found bs {bs}, max_extend_len {max_extend_len}, expected 1 to {_MAX_BS} "
            f"and 1 to {tokens} (the rows of q)"
        )
    if call.out_cache_loc.numel() < tokens:
        reasons.append(
            f"out_cache_loc: found {call.out_cache_loc.numel()} slots, expected at "
            f"least {tokens}"
        )
    if not (16 <= dim <= 256 and 16 <= v_dim <= 256):
        reasons.append(f"head_dim: found {dim} and {v_dim}, expected 16 to 256")
    return reasons


def _check(call: _Call, max_extend_len: int, sm_scale: float) -> None:
    """Raise ValueError with every reason why this call is refused."""
    reasons = arch.unsupported_reasons(call.q.device) + _layout_reasons(call)
    if sm_scale <= 0.0:
        reasons.append(f"sm_scale: found {sm_scale}, expected a positive number")
    if not reasons:
        reasons = _shape_reasons(call, max_extend_len)
    if reasons:
        raise ValueError("prefill_attention refused:\n- " + "\n- ".join(reasons))


def prefill_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    out: torch.Tensor,
    *,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    out_cache_loc: torch.Tensor,
    max_extend_len: int,
    sm_scale: float,
) -> None:
    """Causal attention of new tokens to their request's keys, written to `out`.

    q           [tokens, q_heads, head_dim] bf16 or fp16, requests one after another
    k_buffer    [slots, kv_heads, head_dim]; v_buffer [slots, kv_heads, v_head_dim];
                the new tokens' keys and values are in them already
    out         [tokens, q_heads, v_head_dim]
    qo_indptr   [bs + 1] int32, rows of each request in q
    kv_indptr   [bs + 1] int32, kv_indices int64: slots of each prefix as CSR
    out_cache_loc  [tokens] int64, slots of the new tokens
    max_extend_len  most new tokens of a request (a host number); it sizes the grid

    Raises ValueError, before any launch, with every reason why the call is refused. No
    host synchronisation, no allocation.
    """
    call = _Call(
        q, k_buffer, v_buffer, out, qo_indptr, kv_indptr, kv_indices, out_cache_loc
    )
    _check(call, max_extend_len, sm_scale)
    tile = arch.pick(_TILES, q.device)
    kv_heads, dim = k_buffer.shape[1:]
    group, v_dim = q.shape[1] // kv_heads, v_buffer.shape[2]
    blocks = triton.cdiv(max_extend_len * group, tile.block_m)
    _prefill_kernel[(blocks, kv_heads, qo_indptr.numel() - 1)](
        *call,
        sm_scale * _LOG2_E,
        blocks,
        *q.stride()[:2],
        *k_buffer.stride()[:2],
        *v_buffer.stride()[:2],
        *out.stride()[:2],
        GROUP=group,
        D=dim,
        DV=v_dim,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_DV=triton.next_power_of_2(v_dim),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
