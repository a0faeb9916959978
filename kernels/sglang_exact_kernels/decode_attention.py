# SPDX-License-Identifier: Apache-2.0
"""Attention for decode and verify rows over a paged KV cache (page size 1).

Row (r, i), draft position i of request r, attends to the request's prefix and to the
block's tokens 0 .. i. Plain decode is the same launch with one position and no block.
All positions of a request share every K and V tile that is loaded.

Reduction order: keys are cut at fixed absolute positions (`_TIERS`: a function of the
position alone), a split is walked in tiles of BLOCK_N keys, in order, with one running
maximum, sum and accumulator per row. Partials of a row are combined in blocks of
COMBINE_BLOCK consecutive splits (a fixed tree inside a block, unused places count 0),
blocks in ascending order, over the row's own number of splits. A key that is masked for
a row has weight 0: the accumulator is multiplied by exp2(0) = 1 (by 0 before the row's
first key of a split, when it is 0) and 0 times the V loaded there is added; past the
block's last key that is the last key's V again.
Invariant to: bs, the other requests, T, the row's position in its block, where keys lie
in the cache, the longest context in the batch, the number of programs. One binary
serves every T.
Not covered: sliding windows, logit caps, sinks, page sizes above 1, quantised caches,
tree drafts; non-finite V: that of a later draft position reaches the rows before it,
and an infinite V of a row's own token may give NaN in decode where verify keeps
infinity.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from sglang_exact_kernels import arch, checks
from sglang_exact_kernels.decode_attention_kernels import attend_kernel, combine_kernel

__all__ = ["decode_attention", "max_splits", "scratch_shapes"]


class _Tile(NamedTuple):
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


# head_dim 256 decides (1 KiB of K and V a key). Half of num_stages is spent on the slot
# numbers, so 5 gives three K and V buffers and 7 gives four: loads stay in flight while
# a tile is computed. sm90, on an H200 (results/kernels/attention_tune.json): 4 warps of
# 64 keys are fastest at 131,072 keys and with one request of up to 8192; 8 warps, or
# two programs of 16 keys, are up to a fifth faster with 8 or 32 requests of 2048 to
# 32,768. It spills outside its loop over keys. sm120 has 99 KiB of shared memory and 4
# bytes per clock and multiprocessor of bandwidth, so small tiles do there; its row and
# the splits below rest on compiled code there (no spills, 82 KiB), not on
# measurements.
_TILES = {
    90: _Tile(block_n=64, num_warps=4, num_stages=5, programs_per_sm=1),
    120: _Tile(block_n=16, num_warps=8, num_stages=7, programs_per_sm=1),
}

# Rows (draft positions x heads of a group) per program: one warp group's wgmma.
_BLOCK_M = 64
_MAX_GROUP = 64
_COMBINE_BLOCK = 32
_COMBINE_BLOCK_D = 64
_MAX_BS = 256
_LOG2_E = 1.4426950408889634


class Tiers(NamedTuple):
    """Keys per split: keys_0 up to position end_0, keys_1 up to end_1, then keys_2."""

    end_0: int
    keys_0: int
    end_1: int
    keys_1: int
    keys_2: int


# Splits by absolute position: short ones early, so that short contexts fill the card;
# long ones late, for each split waits for its first and its last tile. 1024 keys early
# were faster from 8 requests of 2048 keys on and slower there at one; 256 up to 2048
# were 7 us faster at one request and slower at 32.
_TIERS = Tiers(512, 256, 8192, 512, 2048)


def max_splits(length: int) -> int:
    """Number of splits of a row with `length` keys."""
    tiers = _TIERS
    if length <= tiers.end_0:
        return -(-length // tiers.keys_0)
    first = tiers.end_0 // tiers.keys_0
    if length <= tiers.end_1:
        return first - (tiers.end_0 - length) // tiers.keys_1
    second = first + (tiers.end_1 - tiers.end_0) // tiers.keys_1
    return second - (tiers.end_1 - length) // tiers.keys_2


def scratch_shapes(
    max_rows: int, num_q_heads: int, v_head_dim: int, max_context_len: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the fp32 scratch tensors (part_acc, part_stat) of `decode_attention`.

    max_rows is bs * num_draft_tokens at most; max_context_len counts the block too.
    """
    rows = (max_rows, num_q_heads, max_splits(max_context_len))
    return (*rows, v_head_dim), (*rows, 2)


class _Call(NamedTuple):
    q: torch.Tensor
    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    out: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    out_cache_loc: torch.Tensor | None
    part_acc: torch.Tensor
    part_stat: torch.Tensor


_INDICES = {
    "kv_indptr": torch.int32,
    "kv_indices": torch.int64,
    "out_cache_loc": torch.int64,
}


def _shape_reasons(call: _Call, T: int, max_context_len: int) -> list[str]:
    bs, loc = call.kv_indptr.numel() - 1, call.out_cache_loc
    rows, q_heads, _ = call.q.shape
    acc, splits = call.part_acc.shape, max_splits(max_context_len)
    expected = (
        ("q rows", rows, bs * T),
        ("part_acc heads, dim", acc[1::2], (q_heads, call.v_buffer.shape[2])),
        ("part_stat shape", call.part_stat.shape, (*acc[:3], 2)),
    )
    bounds = (
        ("bs", bs, 1, _MAX_BS),
        ("T", T, 1, None),
        ("T without out_cache_loc (decode)", T if loc is None else 1, 1, 1),
        ("heads per KV head", q_heads // call.k_buffer.shape[1], 1, _MAX_GROUP),
        ("out_cache_loc slots", bs * T if loc is None else loc.numel(), bs * T, None),
        ("part_acc rows (size it with scratch_shapes)", acc[0], rows, None),
        ("part_acc splits (size it with scratch_shapes)", acc[2], splits, None),
    )
    shapes = checks.attention_shape_reasons(call._asdict())
    return shapes + checks.mismatches(expected) + checks.outside(bounds)


def _check(call: _Call, T: int, sm_scale: float, max_context_len: int) -> None:
    """Raise ValueError with every reason why this call is refused."""
    reasons = checks.attention_layout_reasons(call._asdict(), _INDICES, sm_scale)
    reasons += checks.mismatches(
        (
            f"{name} dims, contiguous, dtype",
            (t.ndim, t.is_contiguous(), t.dtype),
            wanted,
        )
        for name, t in (("part_acc", call.part_acc), ("part_stat", call.part_stat))
        for wanted in ((4, True, torch.float32),)
    )
    reasons = reasons or _shape_reasons(call, T, max_context_len)
    checks.refuse("decode_attention", reasons)


def decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    out: torch.Tensor,
    *,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    part_acc: torch.Tensor,
    part_stat: torch.Tensor,
    sm_scale: float,
    max_context_len: int,
    num_draft_tokens: int = 1,
    out_cache_loc: torch.Tensor | None = None,
) -> None:
    """Attention of bs * T query rows, written to `out`; decode and verify alike.

    q           [bs * T, q_heads, head_dim] bf16 or fp16, row r * T + i
    k_buffer    [slots, kv_heads, head_dim]; v_buffer [slots, kv_heads, v_head_dim]
    out         [bs * T, q_heads, v_head_dim]
    kv_indptr   [bs + 1] int32, kv_indices int64: slots of each request as CSR. Decode
                (out_cache_loc None, T = 1): all keys, the current token included.
                Verify: the prefix only
    out_cache_loc  [bs * T] int64, slots of the block's tokens (verify)
    part_acc, part_stat  fp32 scratch, see `scratch_shapes`; contents need not survive
    max_context_len  bound on prefix + T; it only sizes the check of the scratch

    Raises ValueError, before any launch, with every reason why the call is refused. No
    host synchronisation, no allocation.
    """
    call = _Call(
        q,
        k_buffer,
        v_buffer,
        out,
        kv_indptr,
        kv_indices,
        out_cache_loc,
        part_acc,
        part_stat,
    )
    _check(call, num_draft_tokens, sm_scale, max_context_len)
    _launch_attend(call, num_draft_tokens, sm_scale)
    _launch_combine(call, num_draft_tokens, sm_scale)


def _launch_attend(call: _Call, T: int, sm_scale: float) -> None:
    tile = arch.pick(_TILES, call.q.device)
    loc = call.kv_indices if call.out_cache_loc is None else call.out_cache_loc
    kv_heads, dim = call.k_buffer.shape[1:]
    v_dim = call.v_buffer.shape[2]
    programs = arch.multiprocessors(call.q.device) * tile.programs_per_sm
    attend_kernel[(programs,)](
        call.q,
        call.k_buffer,
        call.v_buffer,
        call.kv_indptr,
        call.kv_indices,
        loc,
        call.part_acc,
        call.part_stat,
        sm_scale * _LOG2_E,
        call.kv_indptr.numel() - 1,
        T,
        0 if call.out_cache_loc is None else T,
        call.q.stride()[:2],
        call.k_buffer.stride()[:2],
        call.v_buffer.stride()[:2],
        call.part_acc.stride()[:2],
        *call.part_stat.stride()[:2],
        HKV=kv_heads,
        GROUP=call.q.shape[1] // kv_heads,
        D=dim,
        DV=v_dim,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=tile.block_n,
        BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_DV=triton.next_power_of_2(v_dim),
        MAX_BS=_MAX_BS,
        TIERS=_TIERS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _launch_combine(call: _Call, T: int, sm_scale: float) -> None:
    rows, q_heads, v_dim = call.out.shape
    block_dv = min(_COMBINE_BLOCK_D, triton.next_power_of_2(v_dim))
    combine_kernel[(rows, q_heads, triton.cdiv(v_dim, block_dv))](
        call.part_acc,
        call.part_stat,
        call.kv_indptr,
        call.out,
        sm_scale * _LOG2_E,
        T,
        0 if call.out_cache_loc is None else T,
        call.part_acc.stride()[:2],
        *call.part_stat.stride()[:2],
        call.out.stride()[:2],
        DV=v_dim,
        BLOCK_S=_COMBINE_BLOCK,
        BLOCK_DV=block_dv,
        TIERS=_TIERS,
        num_warps=4,
    )
