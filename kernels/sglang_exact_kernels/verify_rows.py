# SPDX-License-Identifier: Apache-2.0
"""Decode-row metadata for verify: each draft position becomes a row of its own length.

Row (r, i) of request r and draft position i has the keys

    prefix of r, then out_cache_loc[T * r .. T * r + i];  len = prefix_len + i + 1

so a decode attention kernel that takes CSR rows serves verify unchanged.

Reduction order: none; integers are copied. Offsets are closed-form in kv_indptr (row
(r, i) starts at T * kv_indptr[r] + r * T * (T + 1) / 2 + i * len_r + i * (i + 1) / 2),
so no scan and no host synchronisation is needed.
Invariant to: everything; outputs are a function of the inputs of the same request and
of the prefix lengths before it.
Not covered: tree drafts (the block must be a chain), page sizes above 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_exact_kernels import arch

__all__ = ["fill_verify_rows"]

# Programs per request; each walks its share of the prefix. 128k keys are two turns.
_NUM_CHUNKS = 64
_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["T"])
def _fill_verify_rows_kernel(
    kv_indptr,  # [bs + 1] int32
    kv_indices,  # [>= kv_indptr[bs]] int64
    out_cache_loc,  # [bs * T] int64
    row_indptr,  # [>= bs * T + 1] int32
    row_splits,  # [>= bs * T] int32
    row_indices,  # [>= bs * T * max_context_len] int64
    T,
    SPLIT_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    r = tl.program_id(0)
    chunk = tl.program_id(1)
    num_chunks = tl.num_programs(1)
    base = tl.load(kv_indptr)
    begin = tl.load(kv_indptr + r)
    length = tl.load(kv_indptr + r + 1) - begin
    start = T * (begin - base) + r * (T * (T + 1) // 2)

    if chunk == 0:
        i = tl.arange(0, BLOCK_T)
        row_start = start + i * length + i * (i + 1) // 2
        tl.store(row_indptr + r * T + i, row_start, mask=i < T)
        splits = (length + i + 1 + SPLIT_TILE - 1) // SPLIT_TILE
        tl.store(row_splits + r * T + i, splits, mask=i < T)
        # The end of the last row; the next request writes the same value otherwise.
        tl.store(row_indptr + (r + 1) * T, start + T * length + T * (T + 1) // 2)
        loc = tl.load(out_cache_loc + r * T + i, mask=i < T, other=0)
        for j in range(T):
            tail = start + j * length + j * (j + 1) // 2 + length
            tl.store(row_indices + tail.to(tl.int64) + i, loc, mask=i <= j)

    for first in range(chunk * BLOCK, length, num_chunks * BLOCK):
        offs = first + tl.arange(0, BLOCK)
        mask = offs < length
        slots = tl.load(kv_indices + begin.to(tl.int64) + offs, mask=mask, other=0)
        for j in range(T):
            head = start + j * length + j * (j + 1) // 2
            tl.store(row_indices + head.to(tl.int64) + offs, slots, mask=mask)


def _check(
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    out_cache_loc: torch.Tensor,
    num_draft_tokens: int,
    split_tile_size: int,
    max_context_len: int,
    row_indptr: torch.Tensor,
    row_splits: torch.Tensor,
    row_indices: torch.Tensor,
) -> None:
    """Raise ValueError with every reason why this call is refused."""
    reasons = list(arch.unsupported_reasons(kv_indptr.device))
    bs, T = kv_indptr.numel() - 1, num_draft_tokens
    if bs < 1 or T < 1 or split_tile_size < 1:
        reasons.append(
            f"found bs {bs}, num_draft_tokens {T}, split_tile_size {split_tile_size}, "
            "expected all >= 1"
        )
    dtypes = (
        ("kv_indptr", kv_indptr, torch.int32, bs + 1),
        ("kv_indices", kv_indices, torch.int64, 0),
        ("out_cache_loc", out_cache_loc, torch.int64, bs * T),
        ("row_indptr", row_indptr, torch.int32, bs * T + 1),
        ("row_splits", row_splits, torch.int32, bs * T),
        ("row_indices", row_indices, torch.int64, bs * T * max_context_len),
    )
    for name, t, dtype, size in dtypes:
        if t.dtype != dtype or t.ndim != 1 or not t.is_contiguous():
            reasons.append(
                f"{name}: found {t.dtype} {tuple(t.shape)}, strides {t.stride()}, "
                f"expected a contiguous 1-D {dtype}"
            )
        elif t.numel() < size:
            reasons.append(
                f"{name}: found {t.numel()} elements, expected at least {size}"
            )
    if row_indices.numel() >= 2**31:
        reasons.append(
            f"row_indices: found {row_indices.numel()} elements, expected fewer than "
            "2**31 (row_indptr is int32); lower the batch size or the context length"
        )
    if len({str(t.device) for _, t, _, _ in dtypes}) != 1:
        reasons.append("found tensors on several devices, expected one")
    if reasons:
        raise ValueError("fill_verify_rows refused:\n- " + "\n- ".join(reasons))


def fill_verify_rows(
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    out_cache_loc: torch.Tensor,
    num_draft_tokens: int,
    *,
    split_tile_size: int,
    max_context_len: int,
    row_indptr: torch.Tensor,
    row_splits: torch.Tensor,
    row_indices: torch.Tensor,
) -> None:
    """Fill the static row buffers for one verify forward.

    kv_indptr      [bs + 1] int32, prefix lengths as CSR (the block not included)
    kv_indices     [>= kv_indptr[bs]] int64, slots of the prefixes
    out_cache_loc  [bs * T] int64, slots of the block's tokens
    row_indptr     [>= bs * T + 1] int32, out
    row_splits     [>= bs * T] int32, out: ceil(len / split_tile_size)
    row_indices    [>= bs * T * max_context_len] int64, out
    max_context_len bounds prefix_len + T; it sizes the check, not the launch. A padding
    request with prefix length 0 or 1 gives T short rows. Raises ValueError, before any
    launch, with every reason. No host synchronisation, no allocation.
    """
    _check(
        kv_indptr,
        kv_indices,
        out_cache_loc,
        num_draft_tokens,
        split_tile_size,
        max_context_len,
        row_indptr,
        row_splits,
        row_indices,
    )
    T = num_draft_tokens
    _fill_verify_rows_kernel[(kv_indptr.numel() - 1, _NUM_CHUNKS)](
        kv_indptr,
        kv_indices,
        out_cache_loc,
        row_indptr,
        row_splits,
        row_indices,
        T,
        SPLIT_TILE=split_tile_size,
        BLOCK=_BLOCK,
        BLOCK_T=triton.next_power_of_2(T),
        num_warps=_NUM_WARPS,
    )
