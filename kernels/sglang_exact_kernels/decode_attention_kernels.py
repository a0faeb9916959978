# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of `decode_attention`, which states their contract."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attend_kernel", "combine_kernel"]


@triton.jit
def _splits_of(length, TIERS: tl.constexpr):
    """`decode_attention.max_splits` on the device; any shape of int32."""
    END_0, KEYS_0, END_1, KEYS_1, KEYS_2 = TIERS
    N_0: tl.constexpr = END_0 // KEYS_0
    N_1: tl.constexpr = N_0 + (END_1 - END_0) // KEYS_1
    n = (length + (KEYS_0 - 1)) // KEYS_0
    n = tl.where(length > END_0, N_0 + (length - END_0 + (KEYS_1 - 1)) // KEYS_1, n)
    return tl.where(length > END_1, N_1 + (length - END_1 + (KEYS_2 - 1)) // KEYS_2, n)


@triton.jit
def _split_start(s, TIERS: tl.constexpr):
    """First key of split `s`."""
    END_0, KEYS_0, END_1, KEYS_1, KEYS_2 = TIERS
    N_0: tl.constexpr = END_0 // KEYS_0
    N_1: tl.constexpr = N_0 + (END_1 - END_0) // KEYS_1
    first = tl.where(s > N_0, END_0 + (s - N_0) * KEYS_1, s * KEYS_0)
    return tl.where(s > N_1, END_1 + (s - N_1) * KEYS_2, first)


@triton.jit
def _attend_split(
    q_tile,
    limit,
    first,
    last,
    span,
    cache,
    qk_scale,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Running maximum (of raw scores), sum and accumulator over keys first .. last."""
    begin, prefix, block_limit = span
    k_head, v_head, kv_indices, block_loc, stride_k_slot, stride_v_slot = cache
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    for n in range(first, last, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)
        # Beyond the last key it is loaded again, with weight 0: rows then need no mask.
        at = tl.minimum(offs_n, block_limit - 1)
        slot = tl.load(
            tl.where(at < prefix, kv_indices + begin + at, block_loc + (at - prefix))
        )
        p_k = k_head + slot[:, None] * stride_k_slot + offs_d[None, :]
        p_v = v_head + slot[:, None] * stride_v_slot + offs_dv[None, :]
        if D == BLOCK_D:
            k = tl.load(p_k)
        else:
            k = tl.load(p_k, mask=(offs_d < D)[None, :], other=0.0)
        if DV == BLOCK_DV:
            v = tl.load(p_v)
        else:
            v = tl.load(p_v, mask=(offs_dv < DV)[None, :], other=0.0)
        qk = tl.dot(q_tile, tl.trans(k))
        qk = tl.where(offs_n[None, :] < limit[:, None], qk, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(qk, 1))
        # A row without a key so far has maximum -inf; 0 keeps it free of NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2((row_max - base) * qk_scale)
        # Explicit fma: nothing left for the compiler to contract.
        shift = 0.0 - base * qk_scale
        p = tl.exp2(tl.fma(qk, qk_scale, shift[:, None]))
        row_sum = tl.fma(row_sum, rescale, tl.sum(p, 1))
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
        row_max = new_max
    return row_max, row_sum, acc


# Not specialised: what differs between plain and speculative servers (or between eager
# and captured steps: slots may come as a slice), so that all of them run one binary.
# Triton specialises numbers inside a tuple all the same: these strides stand alone.
@triton.jit(
    do_not_specialize=["bs", "T", "tail", "stride_stat_row", "stride_stat_head"],
    do_not_specialize_on_alignment=["kv_indptr", "kv_indices", "out_cache_loc"],
)
def attend_kernel(
    q,  # [bs * T, HKV * GROUP, D]
    k_buffer,  # [slots, HKV, D]
    v_buffer,  # [slots, HKV, DV]
    kv_indptr,  # [bs + 1] int32
    kv_indices,  # [kv_indptr[bs]]
    out_cache_loc,  # [bs * T], read if tail
    part_acc,  # [rows, heads, splits, DV] fp32
    part_stat,  # [rows, heads, splits, 2] fp32: maximum, sum
    qk_scale,
    bs,
    T,
    tail,
    stride_q,  # row, head; of k and v: slot, head
    stride_k,
    stride_v,
    stride_acc,
    stride_stat_row,
    stride_stat_head,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MAX_BS: tl.constexpr,
    TIERS: tl.constexpr,
):
    offs_r = tl.arange(0, MAX_BS)
    live = offs_r < bs
    begins = tl.load(kv_indptr + offs_r, mask=live, other=0)
    lengths = tl.load(kv_indptr + offs_r + 1, mask=live, other=0) - begins
    lengths += tl.where(live, tail, 0)
    counts = _splits_of(lengths, TIERS)
    ends = tl.cumsum(counts, 0)
    chunks = tl.cdiv(T * GROUP, BLOCK_M)
    lanes = HKV * chunks
    total = tl.sum(counts, 0)

    for item in range(tl.program_id(0), total * lanes, tl.num_programs(0)):
        # Last splits first: they are the long ones.
        work = total - 1 - item // lanes
        r = tl.sum((ends <= work).to(tl.int32), 0)
        s = work - tl.sum(tl.where(offs_r < r, counts, 0), 0)
        kv_head = (item % lanes) // chunks
        chunk = item % chunks

        begin = tl.load(kv_indptr + r)
        prefix = tl.load(kv_indptr + r + 1) - begin
        offs_m = chunk * BLOCK_M + tl.arange(0, BLOCK_M)
        position = offs_m // GROUP
        valid = position < T
        head = kv_head * GROUP + offs_m % GROUP
        limit = tl.where(valid, prefix + tl.minimum(position + 1, tail), 0)
        last_position = tl.minimum(T, (chunk * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
        block_limit = prefix + tl.minimum(last_position, tail)
        first = _split_start(s, TIERS)
        last = _split_start(s + 1, TIERS)

        row = (r * T + position).to(tl.int64)
        offs_d = tl.arange(0, BLOCK_D)
        p_q = q + row[:, None] * stride_q[0] + head[:, None] * stride_q[1]
        loaded = valid[:, None] & (offs_d < D)[None, :]
        q_tile = tl.load(p_q + offs_d[None, :], mask=loaded, other=0.0)
        span = (begin.to(tl.int64), prefix, block_limit)
        cache = (
            k_buffer + kv_head.to(tl.int64) * stride_k[1],
            v_buffer + kv_head.to(tl.int64) * stride_v[1],
            kv_indices,
            out_cache_loc + r.to(tl.int64) * T,
            stride_k[0],
            stride_v[0],
        )
        row_max, row_sum, acc = _attend_split(
            q_tile,
            limit,
            first,
            tl.minimum(last, block_limit),
            span,
            cache,
            qk_scale,
            D,
            DV,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            BLOCK_DV,
        )
        used = valid & (limit > first)
        offs_dv = tl.arange(0, BLOCK_DV)
        p_acc = part_acc + row * stride_acc[0] + head * stride_acc[1] + s * DV
        tl.store(
            p_acc[:, None] + offs_dv[None, :],
            acc,
            mask=used[:, None] & (offs_dv < DV)[None, :],
        )
        p_stat = part_stat + row * stride_stat_row + head * stride_stat_head + s * 2
        tl.store(p_stat, row_max, mask=used)
        tl.store(p_stat + 1, row_sum, mask=used)


@triton.jit(
    do_not_specialize=["T", "tail", "stride_stat_row", "stride_stat_head"],
    do_not_specialize_on_alignment=["kv_indptr"],
)
def combine_kernel(
    part_acc,  # [rows, heads, splits, DV] fp32
    part_stat,  # [rows, heads, splits, 2] fp32
    kv_indptr,  # [bs + 1] int32
    out,  # [rows, heads, DV]
    qk_scale,
    T,
    tail,
    stride_acc,  # row, head
    stride_stat_row,
    stride_stat_head,
    stride_out,
    DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TIERS: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    r = row // T
    length = tl.load(kv_indptr + r + 1) - tl.load(kv_indptr + r)
    length += tl.minimum(row % T + 1, tail)
    count = _splits_of(length, TIERS)

    p_stat = part_stat + row.to(tl.int64) * stride_stat_row + head * stride_stat_head
    p_acc = part_acc + row.to(tl.int64) * stride_acc[0] + head * stride_acc[1]
    offs_s = tl.arange(0, BLOCK_S)
    offs_dv = tl.program_id(2) * BLOCK_DV + tl.arange(0, BLOCK_DV)

    top = tl.full([BLOCK_S], float("-inf"), dtype=tl.float32)
    for s in range(0, count, BLOCK_S):
        splits = s + offs_s
        top = tl.maximum(
            top, tl.load(p_stat + splits * 2, mask=splits < count, other=float("-inf"))
        )
    row_max = tl.max(top, 0)

    total = 0.0
    acc = tl.zeros([BLOCK_DV], dtype=tl.float32)
    for s in range(0, count, BLOCK_S):
        splits = s + offs_s
        real = splits < count
        maxima = tl.load(p_stat + splits * 2, mask=real, other=float("-inf"))
        sums = tl.load(p_stat + splits * 2 + 1, mask=real, other=0.0)
        part = tl.load(
            p_acc + splits[:, None] * DV + offs_dv[None, :],
            mask=real[:, None] & (offs_dv < DV)[None, :],
            other=0.0,
        )
        weight = tl.exp2((maxima - row_max) * qk_scale)
        total += tl.sum(weight * sums, 0)
        acc += tl.sum(weight[:, None] * part, 0)
    # A row without keys (padding) gives zeros.
    value = acc / tl.where(count > 0, total, 1.0)
    p_out = out + row.to(tl.int64) * stride_out[0] + head * stride_out[1]
    tl.store(p_out + offs_dv, value.to(out.dtype.element_ty), mask=offs_dv < DV)
