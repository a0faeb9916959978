# SPDX-License-Identifier: Apache-2.0
"""The sm90 kernel of `prefill_attention` on a copy of the keys: bf16, head_dim 256.

Warps are specialised: one keeps K and V tiles coming by TMA; two groups of 64 rows each
run QK of the next tile beside PV of this one. Order of sums as in the other kernels of
`prefill_attention`, which states the contract; row numbers of the copy stay below
2**31, byte offsets are 64 bits. Written in Gluon: import it only where it runs.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["LAUNCH", "SHARED", "descriptor", "kernel"]

SHARED = gl.NVMMASharedLayout(128, 16, 2)
"""Of tiles of K, V and q: rows of bf16, swizzled by 128 bytes."""

LAUNCH = {"BLOCK_M": 128, "BLOCK_N": 64, "STAGES": 2, "num_warps": 4}
"""BLOCK_N, keys per tile, decides bits, so it is `prefill_attention`'s. Two stages of
64 KiB and q's 64 KiB are what 227 KiB hold."""


@gluon.jit
def _load(k_desc, v_desc, base, tiles, ring):
    k_tiles, v_tiles, k_ready, v_ready, k_free, v_free = ring
    STAGES: gl.constexpr = k_tiles.shape[0]
    N: gl.constexpr = k_tiles.shape[1]
    for j in range(tiles):
        s = j % STAGES
        phase = (j // STAGES) & 1
        mbarrier.wait(k_free.index(s), phase ^ 1)
        mbarrier.expect(k_ready.index(s), k_desc.nbytes_per_cta)
        tma.async_load(k_desc, [base + j * N, 0], k_ready.index(s), k_tiles.index(s))
        mbarrier.wait(v_free.index(s), phase ^ 1)
        mbarrier.expect(v_ready.index(s), v_desc.nbytes_per_cta)
        tma.async_load(v_desc, [base + j * N, 0], v_ready.index(s), v_tiles.index(s))


@gluon.jit
def _softmax(qk, row_max, row_sum, limit, first, scale, MASKED: gl.constexpr):
    S: gl.constexpr = qk.type.layout
    if MASKED:
        keys = first + gl.arange(0, qk.shape[1], gl.SliceLayout(0, S))
        qk = gl.where(keys[None, :] < limit[:, None], qk, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(qk, 1))
    rescale = gl.exp2((row_max - new_max) * scale)
    shift = 0.0 - new_max * scale
    p = gl.exp2(
        gl.fma(qk, gl.full_like(qk, 1.0) * scale, gl.zeros_like(qk) + shift[:, None])
    )
    row_sum = gl.fma(row_sum, rescale, gl.sum(p, 1))
    return p, new_max, row_sum, rescale


@gluon.jit
def _tile(
    j,
    acc,
    p,
    row_max,
    row_sum,
    q,
    limit,
    ring,
    scale,
    S: gl.constexpr,
    A: gl.constexpr,
    P: gl.constexpr,
    MASKED: gl.constexpr,
):
    """QK of tile j beside PV of tile j - 1."""
    k_tiles, v_tiles, k_ready, v_ready, k_free, v_free = ring
    STAGES: gl.constexpr = k_tiles.shape[0]
    N: gl.constexpr = k_tiles.shape[1]
    s, phase = j % STAGES, (j // STAGES) & 1
    t, before = (j - 1) % STAGES, ((j - 1) // STAGES) & 1
    mbarrier.wait(k_ready.index(s), phase)
    zero = gl.zeros([q.shape[0], N], gl.float32, S)
    qk_token = warpgroup_mma(
        q, k_tiles.index(s).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    mbarrier.wait(v_ready.index(t), before)
    acc_token = warpgroup_mma(p, v_tiles.index(t), acc, is_async=True)
    qk = warpgroup_mma_wait(1, deps=[qk_token])
    mbarrier.arrive(k_free.index(s), count=1)
    weights, row_max, row_sum, rescale = _softmax(
        qk, row_max, row_sum, limit, j * N, scale, MASKED
    )
    acc = warpgroup_mma_wait(0, deps=[acc_token])
    mbarrier.arrive(v_free.index(t), count=1)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, A))[:, None]
    p = gl.convert_layout(weights.to(gl.bfloat16), P)
    return acc, p, row_max, row_sum


@gluon.jit
def _compute(first_row, span, q, ring, to, GROUP: gl.constexpr):
    """Rows first_row .. first_row + M - 1 of (token, head), over all their tiles."""
    k_tiles, v_tiles, k_ready, v_ready, k_free, v_free = ring
    prefix, tokens, q_begin, kv_head, tiles, whole = span
    out, stride_out, scale = to
    N: gl.constexpr = k_tiles.shape[1]
    D: gl.constexpr = k_tiles.shape[2]
    M: gl.constexpr = q.shape[0]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    STAGES: gl.constexpr = k_tiles.shape[0]
    offs = first_row + gl.arange(0, M, gl.SliceLayout(1, S))
    limit = prefix + gl.minimum(offs // GROUP, tokens - 1) + 1
    row_max = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    row_sum = gl.zeros([M], gl.float32, gl.SliceLayout(1, S))
    acc = gl.zeros([M, D], gl.float32, A)

    mbarrier.wait(k_ready.index(0), 0)
    zero = gl.zeros([M, N], gl.float32, S)
    token = warpgroup_mma(
        q, k_tiles.index(0).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    qk = warpgroup_mma_wait(0, deps=[token])
    mbarrier.arrive(k_free.index(0), count=1)
    weights, row_max, row_sum, rescale = _softmax(
        qk, row_max, row_sum, limit, 0, scale, True
    )
    p = gl.convert_layout(weights.to(gl.bfloat16), P)
    for j in range(1, whole):
        acc, p, row_max, row_sum = _tile(
            j, acc, p, row_max, row_sum, q, limit, ring, scale, S, A, P, False
        )
    for j in range(gl.maximum(whole, 1), tiles):
        acc, p, row_max, row_sum = _tile(
            j, acc, p, row_max, row_sum, q, limit, ring, scale, S, A, P, True
        )
    t, phase = (tiles - 1) % STAGES, ((tiles - 1) // STAGES) & 1
    mbarrier.wait(v_ready.index(t), phase)
    acc_token = warpgroup_mma(p, v_tiles.index(t), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc_token])
    value = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, A))[:, None]
    offs = first_row + gl.arange(0, M, gl.SliceLayout(1, A))
    row = (q_begin + gl.minimum(offs // GROUP, tokens - 1)).to(gl.int64)
    p_out = out + row * stride_out[0]
    p_out += (kv_head * GROUP + offs % GROUP) * stride_out[1]
    offs_d = gl.arange(0, D, gl.SliceLayout(0, A))
    valid = (offs < tokens * GROUP)[:, None]
    gl.store(
        p_out[:, None] + offs_d[None, :],
        value.to(gl.bfloat16),
        mask=valid & (offs_d < D)[None, :],
    )


@gluon.jit(
    do_not_specialize=["blocks", "rows"],
    do_not_specialize_on_alignment=["qo_indptr", "kv_indptr"],
)
def kernel(
    q,
    k_desc,
    v_desc,
    out,
    qo_indptr,
    kv_indptr,
    scale,
    blocks,
    rows,
    stride_q,
    stride_out,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    PAD_ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    block = blocks - 1 - gl.program_id(0)
    kv_head, r = gl.program_id(1), gl.program_id(2)
    q_begin, begin = gl.load(qo_indptr + r), gl.load(kv_indptr + r)
    tokens = gl.load(qo_indptr + r + 1) - q_begin
    first_row = block * BLOCK_M
    if first_row < tokens * GROUP:
        prefix = gl.load(kv_indptr + r + 1) - begin
        base = kv_head * rows + begin + q_begin + r * PAD_ROWS
        keys = prefix + gl.minimum((first_row + BLOCK_M - 1) // GROUP + 1, tokens)
        tiles = (keys + BLOCK_N - 1) // BLOCK_N
        whole = (prefix + first_row // GROUP + 1) // BLOCK_N

        M: gl.constexpr = BLOCK_M // 2
        SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        q_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, M, D], SHARED)
        k_tiles = gl.allocate_shared_memory(
            gl.bfloat16, [STAGES, BLOCK_N, D], k_desc.layout
        )
        v_tiles = gl.allocate_shared_memory(
            gl.bfloat16, [STAGES, BLOCK_N, D], v_desc.layout
        )
        L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        for half in gl.static_range(2):
            offs = first_row + half * M + gl.arange(0, M, gl.SliceLayout(1, L))
            row = (q_begin + gl.minimum(offs // GROUP, tokens - 1)).to(gl.int64)
            p_q = q + row * stride_q[0]
            p_q += (kv_head * GROUP + offs % GROUP) * stride_q[1]
            offs_d = gl.arange(0, D, gl.SliceLayout(0, L))
            q_tiles.index(half).store(gl.load(p_q[:, None] + offs_d[None, :]))
        fence_async_shared()

        BAR: gl.constexpr = mbarrier.MBarrierLayout()
        k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
        v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
        for s in gl.static_range(STAGES):
            mbarrier.init(k_ready.index(s), count=1)
            mbarrier.init(v_ready.index(s), count=1)
            mbarrier.init(k_free.index(s), count=2)
            mbarrier.init(v_free.index(s), count=2)
        fence_async_shared()

        ring = (k_tiles, v_tiles, k_ready, v_ready, k_free, v_free)
        span = (prefix, tokens, q_begin, kv_head, tiles, whole)
        to = (out, stride_out, scale)
        upper = (first_row, span, q_tiles.index(0), ring, to, GROUP)
        lower = (first_row + M, span, q_tiles.index(1), ring, to, GROUP)
        loads = (k_desc, v_desc, base, tiles, ring)
        gl.warp_specialize(
            [(_compute, upper), (_compute, lower), (_load, loads)],
            [4, 1],
            [240, 24],
        )


def descriptor(rows: torch.Tensor, box: list[int]) -> TensorDescriptor:
    """Of rows of bf16 [n, 256], loaded by `box`."""
    return TensorDescriptor.from_tensor(rows, box, SHARED)
