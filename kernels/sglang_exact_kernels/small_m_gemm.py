# SPDX-License-Identifier: Apache-2.0
"""Small-M GEMM: C[M, N] = A[M, K] @ W[N, K]^T in bf16, read at the speed of memory.

    C[m, n] = bf16(sum over k of A[m, k] * W[n, k])

Reduction order: one fp32 accumulator per element that lives in registers from the
first k to the last; tensor-core steps of 16 consecutive k, ascending; one rounding to
bf16 at the end. That is the order of DeepGEMM's bf16 kernels, so a row has DeepGEMM's
bits: measured on sm90, and compared at start-up on every card.
Invariant to: M, the other rows and their padding, and the tile (BLOCK_N, BLOCK_K,
stages, warps and the operand order only decide who computes an element, not how).
Not covered: dtypes other than bf16, W that is not K-major, bias, split-K, M > MAX_M.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang_exact_kernels import arch
from sglang_exact_kernels.tiles import BLOCK_M, Tile, small_m_tile

__all__ = ["K_STEP", "MAX_M", "small_m_gemm", "unsupported_reasons"]

MAX_M = 64
"""Most rows of one call. Past it a kernel with a larger M tile reads W less often."""

K_STEP = 16
"""K of one bf16 MMA step; K must be a multiple, so no step is partly padding."""

_MIN_N = 16
_ALIGN_BYTES = 16


@triton.jit
def _prefetch_w(w_ptrs):
    """Fetch the 128-byte line of each pointer into L2; changes no register."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1];\n\tmov.b32 $0, 0;",
        "=r,l",
        [w_ptrs.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["M"])
def _small_m_gemm_kernel(
    a_ptr,  # [M, K] bf16
    w_ptr,  # [N, K] bf16
    c_ptr,  # [M, N] bf16
    M,
    N,
    K,
    stride_am,
    stride_wn,
    stride_cm,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # M tiles of one W tile are neighbours, so the second reads W from L2.
    num_m_tiles = tl.cdiv(M, BLOCK_M)
    pid = tl.program_id(0)
    rm = (pid % num_m_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = (pid // num_m_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    m_mask = rm[:, None] < M
    w_rows = w_ptr + rn.to(tl.int64)[:, None] * stride_wn

    if PDL:
        # L2 is where all SMs meet, so a prefetch cannot see a stale line. Every real
        # load comes after the wait.
        lines = tl.arange(0, PREFETCH_LINES)
        in_n = tl.minimum(rn, N - 1).to(tl.int64)
        _prefetch_w(w_ptr + in_n[:, None] * stride_wn + lines[None, :] * 64)
        gdc_launch_dependents()
        gdc_wait()

    a_ptrs = a_ptr + rm.to(tl.int64)[:, None] * stride_am + rk[None, :]
    w_ptrs = w_rows + rk[None, :]
    if SWAP_AB:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a_mask = m_mask
        w_mask = rn[:, None] < N
        if not EVEN_K:
            a_mask = a_mask & (rk[None, :] + k < K)
            w_mask = w_mask & (rk[None, :] + k < K)
        a = tl.load(a_ptrs, mask=a_mask, other=0.0, eviction_policy="evict_last")
        if EVEN_N and EVEN_K:
            w = tl.load(w_ptrs, eviction_policy="evict_first")
        else:
            w = tl.load(w_ptrs, mask=w_mask, other=0.0, eviction_policy="evict_first")
        if UPCAST:
            a = a.to(tl.float32)
            w = w.to(tl.float32)
        if SWAP_AB:
            acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K

    c = tl.trans(acc) if SWAP_AB else acc
    c_ptrs = c_ptr + rm.to(tl.int64)[:, None] * stride_cm + rn[None, :]
    tl.store(c_ptrs, c.to(tl.bfloat16), mask=m_mask & (rn[None, :] < N))


def unsupported_reasons(a: torch.Tensor, w: torch.Tensor) -> list[str]:
    """Why A[M, K] and W[N, K] cannot go through this kernel; empty if they can."""
    if a.ndim != 2 or w.ndim != 2 or a.shape[1] != w.shape[1]:
        return [
            f"found A {tuple(a.shape)} and W {tuple(w.shape)}, expected [M, K] and "
            "[N, K]: pass W, not its transpose"
        ]
    reasons = []
    (m, k), n = a.shape, w.shape[0]
    if not 1 <= m <= MAX_M:
        reasons.append(f"found M = {m}, expected 1 to {MAX_M}: use another kernel")
    if n < _MIN_N or n % 8:
        reasons.append(f"found N = {n}, expected a multiple of 8 from {_MIN_N} on")
    if k == 0 or k % K_STEP:
        reasons.append(f"found K = {k}, expected a multiple of {K_STEP}")
    for name, x in (("A", a), ("W", w)):
        if x.dtype is not torch.bfloat16:
            reasons.append(f"found {name} in {x.dtype}, expected torch.bfloat16")
        if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % _ALIGN_BYTES:
            reasons.append(
                f"found {name} with strides {x.stride()} at address offset "
                f"{x.data_ptr() % _ALIGN_BYTES}, expected K contiguous and rows on "
                f"{_ALIGN_BYTES} bytes: call contiguous() on it once, at load"
            )
    if a.device != w.device:
        reasons.append(f"found A on {a.device}, W on {w.device}, expected one device")
    return reasons


def _check(a: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None) -> None:
    reasons = unsupported_reasons(a, w)
    if out is not None:
        shape = (a.shape[0], w.shape[0])
        if tuple(out.shape) != shape or out.dtype is not torch.bfloat16:
            reasons.append(
                f"found out {tuple(out.shape)} {out.dtype}, expected {shape} bfloat16"
            )
        elif out.stride(1) != 1:
            reasons.append(f"found out with strides {out.stride()}, expected (*, 1)")
    if reasons:
        raise ValueError("small_m_gemm: " + "; ".join(reasons))


def _prefetch_lines(k: int, tile: Tile) -> int:
    """128-byte lines per row of W to prefetch: the pipeline's depth, a power of two."""
    lines = min(k, tile.block_k * (tile.num_stages - 1)) // 64
    return max(1, triton.next_power_of_2(lines + 1) // 2)


def _launch(a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, tile: Tile) -> None:
    (m, k), n = a.shape, w.shape[0]
    interpreted = arch.is_interpreted()
    grid = (triton.cdiv(n, tile.block_n) * triton.cdiv(m, BLOCK_M),)
    options = {} if interpreted or not tile.pdl else {"launch_pdl": True}
    _small_m_gemm_kernel[grid](
        a,
        w,
        out,
        m,
        n,
        k,
        a.stride(0),
        w.stride(0),
        out.stride(0),
        BLOCK_M=BLOCK_M,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        EVEN_N=n % tile.block_n == 0,
        EVEN_K=k % tile.block_k == 0,
        SWAP_AB=tile.swap_ab,
        PDL=tile.pdl and not interpreted,
        PREFETCH_LINES=_prefetch_lines(k, tile),
        UPCAST=interpreted,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **options,
    )


def small_m_gemm(
    a: torch.Tensor,
    w: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """A[M, K] @ W[N, K]^T -> [M, N], all bf16, M from 1 to MAX_M.

    `tile` replaces the table's row: for sweeps and tests; the bits stay the same.
    Raises ValueError for any other shape, dtype, layout or GPU; nothing is launched.
    """
    _check(a, w, out)
    if tile is None:
        tile = small_m_tile(w.shape[0], w.shape[1], a.device)
    if out is None:
        out = torch.empty((a.shape[0], w.shape[0]), device=a.device, dtype=a.dtype)
    _launch(a, w, out, tile)
    return out
