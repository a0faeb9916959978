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

Two ways to load the same tiles, with the same bits: from where the keys lie, or, given
scratch, from a copy of the step's keys by TMA, which reads and writes each key once.
On sm90, bf16 with head_dim 256 has a kernel of its own for the copy
(`prefill_attention_sm90`): with it 8,192 new tokens take 0.68 to 0.71 of the time on an
H200. As the bits are the same, which kernel runs may depend on the step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from sglang_exact_kernels import arch, checks
from sglang_exact_kernels.prefill_attention_kernels import (
    PAD,
    dense_kernel,
    gather_kernel,
    paged_kernel,
)

__all__ = ["GATHER_KEYS", "copies", "dense_shape", "prefill_attention"]


class _Tile(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


_TILES = {
    90: _Tile(block_m=128, block_n=64, num_warps=8, num_stages=3),
    120: _Tile(block_m=64, block_n=32, num_warps=4, num_stages=2),
}

# The tile that loads from the copy. It sums in the other's order: same rows, same keys
# per tile; two stages, as the tiles of K and V are held apart. No row: no copy. Heads
# that `_specialises` names do not use it.
_DENSE_TILES = {
    90: _Tile(block_m=128, block_n=64, num_warps=8, num_stages=2),
}

GATHER_KEYS = 4096
"""Least keys of a step that is worth a copy: on an H200 2,048 are not, 8,192 are."""

_MAX_BS = 65535  # grid dimension z
_LOG2_E = 1.4426950408889634


def copies(device: torch.device, head_dim: int, v_head_dim: int) -> bool:
    """Whether this GPU and these heads have a kernel that works on a copy."""
    cap = arch.capability(device)
    has_tile = (90 if cap == arch.INTERPRETED else cap) in _DENSE_TILES
    return has_tile and head_dim == v_head_dim == triton.next_power_of_2(head_dim)


def _specialises(q: torch.Tensor, head_dim: int) -> bool:
    """By GPU, dtype and head_dim alone; False in the interpreter, which lacks Gluon."""
    served = q.dtype == torch.bfloat16 and head_dim == 256
    return served and arch.capability(q.device) == 90


def dense_shape(keys: int, bs: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Shape of the scratch `dense` for `keys` keys of `bs` requests in one step.

    keys counts prefixes and new tokens. A larger one serves as well.
    """
    return 2, kv_heads, keys + bs * PAD, head_dim


class _Call(NamedTuple):
    q: torch.Tensor
    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    out: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    out_cache_loc: torch.Tensor


_INDICES = {
    "qo_indptr": torch.int32,
    "kv_indptr": torch.int32,
    "kv_indices": torch.int64,
    "out_cache_loc": torch.int64,
}


def _shape_reasons(call: _Call, max_extend_len: int) -> list[str]:
    tokens, entries = len(call.q), call.qo_indptr.numel()
    bounds = (
        ("bs", entries - 1, 1, _MAX_BS),
        ("max_extend_len, to the rows of q", max_extend_len, 1, tokens),
        ("out_cache_loc slots", call.out_cache_loc.numel(), tokens, None),
    )
    shapes = checks.attention_shape_reasons(call._asdict()) + checks.outside(bounds)
    expected = [("kv_indptr entries", call.kv_indptr.numel(), entries)]
    return shapes + checks.mismatches(expected)


def _dense_reasons(call: _Call, dense: torch.Tensor) -> list[str]:
    kv_heads, dim = call.k_buffer.shape[1:]
    v_dim, bs = call.v_buffer.shape[2], call.qo_indptr.numel() - 1
    least = dense_shape(call.kv_indices.numel() + len(call.q), bs, kv_heads, dim)
    reasons = checks.mismatches(
        (
            ("dense dtype", dense.dtype, call.q.dtype),
            ("dense device", dense.device, call.q.device),
            ("dense contiguous", dense.is_contiguous(), True),
            ("dense dims", dense.ndim, 4),
        )
    )
    if not copies(call.q.device, dim, v_dim):
        reasons.append(
            f"dense: found head_dim {dim} and {v_dim}, expected one power of 2 and a "
            "GPU for which copies() is true; pass None"
        )
    if reasons:
        return reasons
    halves, heads, rows, width = dense.shape
    most = (2**31 - 1) // max(heads, 1)
    bounds = [("dense rows (size it with dense_shape)", rows, least[2], most)]
    shape = ("dense halves, heads, dim", (halves, heads, width), (2, kv_heads, dim))
    return checks.mismatches([shape]) + checks.outside(bounds)


def _check(
    call: _Call, max_extend_len: int, sm_scale: float, dense: torch.Tensor | None
) -> None:
    """Raise ValueError with every reason why this call is refused."""
    reasons = checks.attention_layout_reasons(call._asdict(), _INDICES, sm_scale)
    reasons = reasons or _shape_reasons(call, max_extend_len)
    if not reasons and dense is not None:
        reasons = _dense_reasons(call, dense)
    checks.refuse("prefill_attention", reasons)


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
    dense: torch.Tensor | None = None,
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
    dense       scratch for a copy of the step's keys, see `dense_shape` and `copies`;
                contents need not survive. None: keys are read where they lie

    Raises ValueError, before any launch, with every reason why the call is refused. No
    host synchronisation, no allocation.
    """
    call = _Call(
        q, k_buffer, v_buffer, out, qo_indptr, kv_indptr, kv_indices, out_cache_loc
    )
    _check(call, max_extend_len, sm_scale, dense)
    if dense is None:
        _launch_paged(call, max_extend_len, sm_scale)
    else:
        _launch_dense(call, max_extend_len, sm_scale, dense)


def _launch_of(tile: _Tile) -> dict[str, int]:
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    return dict(zip(names, tile, strict=True))


def _launch_paged(call: _Call, max_extend_len: int, sm_scale: float) -> None:
    launch = _launch_of(arch.pick(_TILES, call.q.device))
    kv_heads, dim = call.k_buffer.shape[1:]
    group, v_dim = call.q.shape[1] // kv_heads, call.v_buffer.shape[2]
    blocks = triton.cdiv(max_extend_len * group, launch["BLOCK_M"])
    paged_kernel[(blocks, kv_heads, call.qo_indptr.numel() - 1)](
        *call,
        sm_scale * _LOG2_E,
        blocks,
        call.q.stride()[:2],
        call.k_buffer.stride()[:2],
        call.v_buffer.stride()[:2],
        call.out.stride()[:2],
        GROUP=group,
        D=dim,
        DV=v_dim,
        BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_DV=triton.next_power_of_2(v_dim),
        **launch,
    )


def _gather(call: _Call, dense: torch.Tensor) -> None:
    """Copy the step's keys to `dense`."""
    bs = call.qo_indptr.numel() - 1
    keys = call.kv_indices.numel() + len(call.q)
    gather_kernel[(triton.cdiv(keys, PAD), dense.shape[1], bs)](
        call.k_buffer,
        call.v_buffer,
        *dense,
        *call[4:],
        dense.shape[2],
        call.k_buffer.stride()[:2],
        call.v_buffer.stride()[:2],
        D=dense.shape[3],
        BLOCK=PAD,
    )


def _launch_dense(
    call: _Call, max_extend_len: int, sm_scale: float, dense: torch.Tensor
) -> None:
    _gather(call, dense)
    kv_heads, rows, dim = dense.shape[1:]
    kernel, descriptor = dense_kernel, TensorDescriptor.from_tensor
    launch = _launch_of(arch.pick(_DENSE_TILES, call.q.device))
    if _specialises(call.q, dim):
        # Here: Gluon belongs to no other GPU, and not to the interpreter.
        from sglang_exact_kernels import prefill_attention_sm90 as sm90

        kernel, descriptor, launch = sm90.kernel, sm90.descriptor, sm90.LAUNCH
    group = call.q.shape[1] // kv_heads
    blocks = triton.cdiv(max_extend_len * group, launch["BLOCK_M"])
    box = [launch["BLOCK_N"], dim]
    kernel[(blocks, kv_heads, call.qo_indptr.numel() - 1)](
        call.q,
        *(descriptor(half.view(kv_heads * rows, dim), box) for half in dense),
        call.out,
        call.qo_indptr,
        call.kv_indptr,
        sm_scale * _LOG2_E,
        blocks,
        rows,
        call.q.stride()[:2],
        call.out.stride()[:2],
        GROUP=group,
        D=dim,
        PAD_ROWS=PAD,
        **launch,
    )
