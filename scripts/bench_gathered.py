# SPDX-License-Identifier: Apache-2.0
"""A prefill variant that copies the keys first and then loads tiles by TMA.

Not served. The arithmetic is `prefill_attention`'s, so its bits must be the same; it
asks whether the copy (2 KiB per key and KV head) pays for cheaper loads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

PAD = 64


class Tile(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@triton.jit
def _gather_kernel(
    k_buffer,
    v_buffer,
    k_dense,
    v_dense,
    qo_indptr,
    kv_indptr,
    kv_indices,
    out_cache_loc,
    rows,
    stride_k_slot,
    stride_k_head,
    stride_v_slot,
    stride_v_head,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """k_dense, v_dense [kv_heads * rows, D]: the keys of each request, then zeros."""
    r, head = tl.program_id(2), tl.program_id(1)
    q_begin, begin = tl.load(qo_indptr + r), tl.load(kv_indptr + r)
    prefix = tl.load(kv_indptr + r + 1) - begin
    keys = prefix + tl.load(qo_indptr + r + 1) - q_begin
    first = tl.program_id(0) * BLOCK
    if first >= keys:
        return
    offs = first + tl.arange(0, BLOCK)
    slot = tl.load(kv_indices + begin + offs, mask=offs < prefix, other=0)
    new = (offs >= prefix) & (offs < keys)
    slot += tl.load(out_cache_loc + q_begin + offs - prefix, mask=new, other=0)
    offs_d = tl.arange(0, D)
    real = (offs < keys)[:, None]
    row = head.to(tl.int64) * rows + begin + q_begin + r * BLOCK + offs
    to = row[:, None] * D + offs_d[None, :]
    k = k_buffer + slot[:, None] * stride_k_slot + head * stride_k_head
    v = v_buffer + slot[:, None] * stride_v_slot + head * stride_v_head
    tl.store(k_dense + to, tl.load(k + offs_d[None, :], mask=real, other=0.0))
    tl.store(v_dense + to, tl.load(v + offs_d[None, :], mask=real, other=0.0))


@triton.jit
def _walk(
    row_max,
    row_sum,
    acc,
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
    for n in range(first, last, BLOCK_N):
        k = k_desc.load([base + n, 0])
        qk = tl.dot(q_tile, tl.trans(k))
        if MASKED:
            offs_n = n + tl.arange(0, BLOCK_N)
            qk = tl.where(offs_n[None, :] < limit[:, None], qk, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(qk, 1))
        rescale = tl.exp2((row_max - new_max) * qk_scale)
        shift = 0.0 - new_max * qk_scale
        p = tl.exp2(tl.fma(qk, qk_scale, shift[:, None]))
        row_sum = tl.fma(row_sum, rescale, tl.sum(p, 1))
        v = v_desc.load([base + n, 0])
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
        row_max = new_max
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=["blocks"])
def _dense_kernel(
    q,
    k_desc,
    v_desc,
    out,
    qo_indptr,
    kv_indptr,
    qk_scale,
    blocks,
    rows,
    stride_q_row,
    stride_q_head,
    stride_out_row,
    stride_out_head,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAD_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    block = blocks - 1 - tl.program_id(0)
    kv_head, r = tl.program_id(1), tl.program_id(2)
    q_begin, begin = tl.load(qo_indptr + r), tl.load(kv_indptr + r)
    tokens = tl.load(qo_indptr + r + 1) - q_begin
    if block * BLOCK_M >= tokens * GROUP:
        return
    prefix = tl.load(kv_indptr + r + 1) - begin
    base = kv_head * rows + begin + q_begin + r * PAD_ROWS
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.minimum(offs_m // GROUP, tokens - 1)
    head = kv_head * GROUP + offs_m % GROUP
    limit = prefix + token + 1
    lowest = prefix + (block * BLOCK_M) // GROUP + 1
    keys = prefix + tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP + 1, tokens)
    whole = lowest // BLOCK_N * BLOCK_N
    row = (q_begin + token).to(tl.int64)
    offs_d = tl.arange(0, D)
    p_q = q + row[:, None] * stride_q_row + head[:, None] * stride_q_head
    q_tile = tl.load(p_q + offs_d[None, :])
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, D], dtype=tl.float32)
    for part in tl.static_range(2):
        row_max, row_sum, acc = _walk(
            row_max,
            row_sum,
            acc,
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
    p_out = out + row[:, None] * stride_out_row + head[:, None] * stride_out_head
    valid = (offs_m < tokens * GROUP)[:, None]
    tl.store(p_out + offs_d[None, :], value.to(out.dtype.element_ty), mask=valid)


def gathered_attention(
    tile: Tile,
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
    dense: dict[str, Any],
) -> None:
    """As `prefill_attention`; `dense` keeps the copies between calls."""
    bs = qo_indptr.numel() - 1
    kv_heads, dim = k_buffer.shape[1:]
    group = q.shape[1] // kv_heads
    keys = kv_indices.numel() + len(q)
    rows = keys + bs * PAD
    size = (2, kv_heads * rows, dim)
    if "kv" not in dense or dense["kv"].shape != size:
        dense["kv"] = torch.empty(size, dtype=q.dtype, device=q.device)
    k_dense, v_dense = dense["kv"]
    _gather_kernel[(triton.cdiv(keys, PAD), kv_heads, bs)](
        k_buffer,
        v_buffer,
        k_dense,
        v_dense,
        qo_indptr,
        kv_indptr,
        kv_indices,
        out_cache_loc,
        rows,
        *k_buffer.stride()[:2],
        *v_buffer.stride()[:2],
        D=dim,
        BLOCK=PAD,
    )
    blocks = triton.cdiv(max_extend_len * group, tile.block_m)
    box = [tile.block_n, dim]
    _dense_kernel[(blocks, kv_heads, bs)](
        q,
        TensorDescriptor.from_tensor(k_dense, box),
        TensorDescriptor.from_tensor(v_dense, box),
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
        PAD_ROWS=PAD,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
