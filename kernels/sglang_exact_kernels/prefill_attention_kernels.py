# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of `prefill_attention`, which states their contract."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["PAD", "dense_kernel", "gather_kernel", "paged_kernel"]

PAD = 64
"""Keys that the copy of a request is filled up to; a multiple of every BLOCK_N."""


@triton.jit
def _fold(row_max, row_sum, acc, qk, qk_scale):
    """One tile of scores: weights, and the running values made ready for its values.

    The only place that decides a row's sums, for both ways to load a tile.
    """
    # Every row sees key 0, so the maximum is finite from the first tile on.
    new_max = tl.maximum(row_max, tl.max(qk, 1))
    rescale = tl.exp2((row_max - new_max) * qk_scale)
    # Explicit fma: nothing left for the compiler to contract.
    shift = 0.0 - new_max * qk_scale
    p = tl.exp2(tl.fma(qk, qk_scale, shift[:, None]))
    row_sum = tl.fma(row_sum, rescale, tl.sum(p, 1))
    return p, new_max, row_sum, acc * rescale[:, None]


@triton.jit
def _rows(block, kv_head, tokens, prefix, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """A program's rows: number, token, head; keys that each, all, any of them see."""
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    # A row beyond the last one repeats the last token; it is not stored.
    token = tl.minimum(offs_m // GROUP, tokens - 1)
    head = kv_head * GROUP + offs_m % GROUP
    limit = prefix + token + 1
    lowest = prefix + (block * BLOCK_M) // GROUP + 1
    keys = prefix + tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP + 1, tokens)
    return offs_m, token, head, limit, lowest, keys


@triton.jit
def _walk_paged(
    state,
    q_tile,
    limit,
    first,
    last,
    span,
    cache,
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
    row_max, row_sum, acc = state
    begin, prefix, keys = span
    k_head, v_head, kv_indices, new_loc, stride_k_slot, stride_v_slot = cache
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
        p, row_max, row_sum, acc = _fold(row_max, row_sum, acc, qk, qk_scale)
        acc = tl.dot(p.to(v.dtype), v, acc)
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
def paged_kernel(
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
    stride_q,  # row, head; of k and v: slot, head
    stride_k,
    stride_v,
    stride_out,
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

    offs_m, token, head, limit, lowest, keys = _rows(
        block, kv_head, tokens, prefix, GROUP, BLOCK_M
    )
    valid = offs_m < tokens * GROUP
    in_prefix = prefix // BLOCK_N * BLOCK_N
    whole = tl.maximum(lowest // BLOCK_N * BLOCK_N, in_prefix)

    row = (q_begin + token).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    p_q = q + row[:, None] * stride_q[0] + head[:, None] * stride_q[1]
    q_tile = tl.load(p_q + offs_d[None, :], mask=(offs_d < D)[None, :], other=0.0)
    cache = (
        k_buffer + kv_head.to(tl.int64) * stride_k[1],
        v_buffer + kv_head.to(tl.int64) * stride_v[1],
        kv_indices,
        out_cache_loc + q_begin.to(tl.int64),
        stride_k[0],
        stride_v[0],
    )
    span = (begin.to(tl.int64), prefix, keys)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    for part in tl.static_range(3):
        row_max, row_sum, acc = _walk_paged(
            (row_max, row_sum, acc),
            q_tile,
            limit,
            0 if part == 0 else (in_prefix if part == 1 else whole),
            in_prefix if part == 0 else (whole if part == 1 else keys),
            span,
            cache,
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
    value = (acc / row_sum[:, None]).to(out.dtype.element_ty)
    p_out = out + row[:, None] * stride_out[0] + head[:, None] * stride_out[1]
    stored = valid[:, None] & (offs_dv < DV)[None, :]
    tl.store(p_out + offs_dv[None, :], value, mask=stored)


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=[
        "qo_indptr",
        "kv_indptr",
        "kv_indices",
        "out_cache_loc",
    ],
)
def gather_kernel(
    k_buffer,
    v_buffer,
    k_dense,  # [HKV * rows, D]
    v_dense,  # [HKV * rows, D]
    qo_indptr,
    kv_indptr,
    kv_indices,
    out_cache_loc,
    rows,
    stride_k,
    stride_v,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy each request's keys together, its last BLOCK filled up with zeros."""
    r = tl.program_id(2)
    head = tl.program_id(1).to(tl.int64)
    q_begin = tl.load(qo_indptr + r).to(tl.int64)
    begin = tl.load(kv_indptr + r).to(tl.int64)
    prefix = tl.load(kv_indptr + r + 1) - begin
    keys = prefix + tl.load(qo_indptr + r + 1) - q_begin
    first = tl.program_id(0) * BLOCK
    if first >= keys:
        return
    offs = first + tl.arange(0, BLOCK)
    slot = tl.load(kv_indices + begin + offs, mask=offs < prefix, other=0)
    new = (offs >= prefix) & (offs < keys)
    slot += tl.load(out_cache_loc + (q_begin + offs - prefix), mask=new, other=0)
    offs_d = tl.arange(0, D)
    real = (offs < keys)[:, None]
    to = (head * rows + begin + q_begin + r * BLOCK + offs) * D
    k = k_buffer + slot[:, None] * stride_k[0] + head * stride_k[1]
    v = v_buffer + slot[:, None] * stride_v[0] + head * stride_v[1]
    tl.store(
        k_dense + to[:, None] + offs_d[None, :],
        tl.load(k + offs_d[None, :], mask=real, other=0.0),
    )
    tl.store(
        v_dense + to[:, None] + offs_d[None, :],
        tl.load(v + offs_d[None, :], mask=real, other=0.0),
    )


@triton.jit
def _walk_dense(
    state,
    q_tile,
    limit,
    first,
    last,
    base,
    k_desc,
    v_desc,
    qk_scale,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    row_max, row_sum, acc = state
    for n in range(first, last, BLOCK_N):
        k = k_desc.load([base + n, 0])
        qk = tl.dot(q_tile, tl.trans(k))
        if MASKED:
            offs_n = n + tl.arange(0, BLOCK_N)
            qk = tl.where(offs_n[None, :] < limit[:, None], qk, float("-inf"))
        p, row_max, row_sum, acc = _fold(row_max, row_sum, acc, qk, qk_scale)
        v = v_desc.load([base + n, 0])
        acc = tl.dot(p.to(v.dtype), v, acc)
    return row_max, row_sum, acc


@triton.jit(
    do_not_specialize=["blocks", "rows"],
    do_not_specialize_on_alignment=["qo_indptr", "kv_indptr"],
)
def dense_kernel(
    q,  # [tokens, HKV * GROUP, D]
    k_desc,  # [HKV * rows, D], as gather_kernel leaves it
    v_desc,
    out,  # [tokens, HKV * GROUP, D]
    qo_indptr,  # [bs + 1] int32
    kv_indptr,  # [bs + 1] int32
    qk_scale,
    blocks,
    rows,
    stride_q,
    stride_out,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAD_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """As `paged_kernel`, over keys that lie together."""
    block = blocks - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    r = tl.program_id(2)
    q_begin = tl.load(qo_indptr + r)
    tokens = tl.load(qo_indptr + r + 1) - q_begin
    if block * BLOCK_M >= tokens * GROUP:
        return
    begin = tl.load(kv_indptr + r)
    prefix = tl.load(kv_indptr + r + 1) - begin
    base = kv_head * rows + begin + q_begin + r * PAD_ROWS

    offs_m, token, head, limit, lowest, keys = _rows(
        block, kv_head, tokens, prefix, GROUP, BLOCK_M
    )
    whole = lowest // BLOCK_N * BLOCK_N

    row = (q_begin + token).to(tl.int64)
    offs_d = tl.arange(0, D)
    p_q = q + row[:, None] * stride_q[0] + head[:, None] * stride_q[1]
    q_tile = tl.load(p_q + offs_d[None, :])
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, D], dtype=tl.float32)
    for part in tl.static_range(2):
        row_max, row_sum, acc = _walk_dense(
            (row_max, row_sum, acc),
            q_tile,
            limit,
            0 if part == 0 else whole,
            whole if part == 0 else keys,
            base,
            k_desc,
            v_desc,
            qk_scale,
            BLOCK_N,
            part == 1,
        )
    value = acc / row_sum[:, None]
    p_out = out + row[:, None] * stride_out[0] + head[:, None] * stride_out[1]
    valid = (offs_m < tokens * GROUP)[:, None]
    tl.store(p_out + offs_d[None, :], value.to(out.dtype.element_ty), mask=valid)
