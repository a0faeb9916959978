# SPDX-License-Identifier: Apache-2.0
"""A prefill variant for sm90 whose warps specialise: one loads, two groups compute.

Not served, and not for the interpreter. Keys are copied as prefill_attention does; a
warp keeps K and V tiles coming by TMA, two warp groups of 64 rows each run QK of the
next tile and PV of this one while they take the exponentials. Order of sums as in
`prefill_attention`.
"""

from __future__ import annotations

import torch
import triton
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

from sglang_exact_kernels import prefill_attention as prefill

BLOCK_M, BLOCK_N, DIM, STAGES = 128, 64, 256, 2
HALF = BLOCK_M // 2


@gluon.jit
def _load(
    k_desc, v_desc, base, tiles, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free
):
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
    k_tiles,
    v_tiles,
    k_ready,
    v_ready,
    k_free,
    v_free,
    scale,
    S: gl.constexpr,
    A: gl.constexpr,
    P: gl.constexpr,
    MASKED: gl.constexpr,
):
    """QK of tile j beside PV of tile j - 1."""
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
def _compute(
    first_row,
    prefix,
    tokens,
    q_begin,
    kv_head,
    tiles,
    whole,
    q,
    k_tiles,
    v_tiles,
    k_ready,
    v_ready,
    k_free,
    v_free,
    out,
    stride_out_row,
    stride_out_head,
    scale,
    GROUP: gl.constexpr,
):
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
            j,
            acc,
            p,
            row_max,
            row_sum,
            q,
            limit,
            k_tiles,
            v_tiles,
            k_ready,
            v_ready,
            k_free,
            v_free,
            scale,
            S,
            A,
            P,
            False,
        )
    for j in range(gl.maximum(whole, 1), tiles):
        acc, p, row_max, row_sum = _tile(
            j,
            acc,
            p,
            row_max,
            row_sum,
            q,
            limit,
            k_tiles,
            v_tiles,
            k_ready,
            v_ready,
            k_free,
            v_free,
            scale,
            S,
            A,
            P,
            True,
        )
    t, phase = (tiles - 1) % STAGES, ((tiles - 1) // STAGES) & 1
    mbarrier.wait(v_ready.index(t), phase)
    acc_token = warpgroup_mma(p, v_tiles.index(t), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc_token])
    value = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, A))[:, None]
    offs = first_row + gl.arange(0, M, gl.SliceLayout(1, A))
    row = (q_begin + gl.minimum(offs // GROUP, tokens - 1)).to(gl.int64)
    to = out + row * stride_out_row + (kv_head * GROUP + offs % GROUP) * stride_out_head
    offs_d = gl.arange(0, D, gl.SliceLayout(0, A))
    valid = (offs < tokens * GROUP)[:, None]
    gl.store(
        to[:, None] + offs_d[None, :],
        value.to(gl.bfloat16),
        mask=valid & (offs_d < D)[None, :],
    )


@gluon.jit(do_not_specialize=["blocks"])
def specialised_kernel(
    q,
    k_desc,
    v_desc,
    out,
    qo_indptr,
    kv_indptr,
    scale,
    blocks,
    rows,
    stride_q_row,
    stride_q_head,
    stride_out_row,
    stride_out_head,
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
            p_q = (
                q
                + row * stride_q_row
                + (kv_head * GROUP + offs % GROUP) * stride_q_head
            )
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

        upper = (
            first_row,
            prefix,
            tokens,
            q_begin,
            kv_head,
            tiles,
            whole,
            q_tiles.index(0),
            k_tiles,
            v_tiles,
            k_ready,
            v_ready,
            k_free,
            v_free,
            out,
            stride_out_row,
            stride_out_head,
            scale,
            GROUP,
        )
        lower = (
            first_row + M,
            prefix,
            tokens,
            q_begin,
            kv_head,
            tiles,
            whole,
            q_tiles.index(1),
            k_tiles,
            v_tiles,
            k_ready,
            v_ready,
            k_free,
            v_free,
            out,
            stride_out_row,
            stride_out_head,
            scale,
            GROUP,
        )
        loads = (
            k_desc,
            v_desc,
            base,
            tiles,
            k_tiles,
            v_tiles,
            k_ready,
            v_ready,
            k_free,
            v_free,
        )
        gl.warp_specialize(
            [(_compute, upper), (_compute, lower), (_load, loads)],
            [4, 1],
            [240, 24],
        )


def layout():
    return gl.NVMMASharedLayout(128, 16, 2)


def specialised_attention(
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
    """As `prefill_attention`, for bf16 and head_dim 256; copies the keys first."""
    bs = qo_indptr.numel() - 1
    kv_heads, dim = k_buffer.shape[1:]
    group = q.shape[1] // kv_heads
    keys = kv_indices.numel() + len(q)
    dense = q.new_empty(prefill.dense_shape(keys, bs, kv_heads, dim))
    call = prefill._Call(
        q, k_buffer, v_buffer, out, qo_indptr, kv_indptr, kv_indices, out_cache_loc
    )
    prefill._gather(call, dense)
    rows = dense.shape[2]
    flat = dense.view(2, kv_heads * rows, dim)
    blocks = triton.cdiv(max_extend_len * group, BLOCK_M)
    box = [BLOCK_N, dim]
    specialised_kernel[(blocks, kv_heads, bs)](
        q,
        TensorDescriptor.from_tensor(flat[0], box, layout()),
        TensorDescriptor.from_tensor(flat[1], box, layout()),
        out,
        qo_indptr,
        kv_indptr,
        sm_scale * 1.4426950408889634,
        blocks,
        rows,
        *q.stride()[:2],
        *out.stride()[:2],
        GROUP=group,
        D=dim,
        PAD_ROWS=prefill.PAD,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        STAGES=STAGES,
        num_warps=4,
    )
