# SPDX-License-Identifier: Apache-2.0
"""Self-test of the small-M tiles: DeepGEMM's bits at every (N, K) of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sglang_exact.reasons import Reason
from sglang_exact.selftest import deep_gemm
from sglang_exact.selftest.deep_gemm import Shape

if TYPE_CHECKING:
    import torch

TILE_M = (1, 2, 3, 8, 16)
"""M of the tiles in the self-test: one row, odd, a verify block, a full tile."""

DEEP_GEMM_M = (17, 64)
"""M of DeepGEMM's rows: the first above the default limit, and a larger tile."""


def linear_weights(model: torch.nn.Module) -> dict[Shape, torch.Tensor]:
    """One weight per (N, K) among the model's matrices that tiles take, and gladly.

    Shapes where a sweep found DeepGEMM faster are left to it: the bits are the same.
    Embeddings are included: a tied one is the head, and a spare shape costs nothing.
    """
    from sglang_exact_kernels.small_m_gemm import unsupported_reasons
    from sglang_exact_kernels.tiles import prefers_deep_gemm

    found: dict[Shape, torch.Tensor] = {}
    for parameter in model.parameters():
        w = parameter.detach()
        if w.ndim != 2 or not w.is_cuda:
            continue
        n, k = w.shape
        if not prefers_deep_gemm(n, k, w.device) and not unsupported_reasons(w[:1], w):
            found.setdefault((n, k), w)
    return found


def _shape_reasons(w: torch.Tensor, a: torch.Tensor, limit: int) -> list[Reason]:
    """Compare the tile of w[N, K] with DeepGEMM's rows on a[64, K], as integers."""
    import torch

    from sglang_exact_kernels.small_m_gemm import small_m_gemm

    most = max(DEEP_GEMM_M)
    want = deep_gemm.rows(a[:most].contiguous(), w).view(torch.int16)
    runs = [(f"DeepGEMM, M = {m}", m, deep_gemm.rows) for m in DEEP_GEMM_M[:-1]]
    tiles = sorted({m for m in TILE_M if m < limit} | {limit})
    runs += [(f"tile, M = {m}", m, small_m_gemm) for m in tiles]
    parts = []
    for name, m, gemm in runs:
        got = gemm(a[:m].contiguous(), w).view(torch.int16)
        count = int((got != want[:m]).sum())
        if count:
            parts.append(f"{name}: {count} of {got.numel()}")
    if not parts:
        return []
    return [
        Reason(
            f"N = {w.shape[0]}, K = {w.shape[1]}: elements that are not those of "
            f"DeepGEMM at M = {most}: " + "; ".join(parts),
            "equal bits on this GPU",
            "set SGLANG_BATCH_INVARIANT_OPS_SMALL_M_TRITON=0 to leave tiles off; if "
            "DeepGEMM itself differs, install the pinned sgl-deep-gemm",
        )
    ]


def run(
    weights: Mapping[Shape, torch.Tensor], device: torch.device, *, limit: int
) -> list[Reason]:
    """Why tiles may not be used on this GPU; empty if their bits are DeepGEMM's.

    Every weight is multiplied at M = 1, 2, 3, 8, 16 (as far as `limit` goes, from 1)
    and compared with DeepGEMM's rows at M = 17 and 64. Activations are random,
    N(0, 1), seed 0. Synchronises; run it before capture.
    """
    import torch

    gen = torch.Generator(device).manual_seed(0)
    rows = max(*DEEP_GEMM_M, limit)
    reasons: list[Reason] = []
    for (_, k), w in weights.items():
        a = torch.randn((rows, k), device=device, dtype=torch.bfloat16, generator=gen)
        reasons += _shape_reasons(w, a, limit)
    return reasons
