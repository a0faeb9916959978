# SPDX-License-Identifier: Apache-2.0
"""Start-up race stress of the linear layers on this very card.

DeepGEMM's sm120 kernel had a shared-memory race that shows in about one call of a
hundred and never under a debugger. Headers are checked before they are compiled
(`host.headers`); this checks the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sglang_exact.reasons import Reason
from sglang_exact.selftest.deep_gemm import Shape

if TYPE_CHECKING:
    import torch

ROWS = (8, 908)
"""M: a verify block, and an odd prefill size, the M at which the race was reported."""

NUM_SHAPES = 2


def pick(shapes: Iterable[Shape]) -> list[Shape]:
    """The (N, K) with most pipeline steps: the longest K, then the least N.

    A race needs a stage to be reused; each of K / BLOCK_K steps is one chance.
    """
    return sorted(dict.fromkeys(shapes), key=lambda s: (-s[1], s[0]))[:NUM_SHAPES]


def _calls(a: torch.Tensor, w: torch.Tensor, limit: int) -> dict[str, Any]:
    """What serving would run for these rows, by name; each writes its argument."""
    import deep_gemm

    from sglang_exact_kernels.small_m_gemm import small_m_gemm

    found: dict[str, Any] = {"DeepGEMM": lambda out: deep_gemm.bf16_gemm_nt(a, w, out)}
    if a.shape[0] <= limit:
        found["small-M tile"] = lambda out: small_m_gemm(a, w, out=out)
    return found


def run(
    shapes: Iterable[Shape], device: torch.device, *, limit: int, calls: int = 0
) -> list[Reason]:
    """Reasons if repeated calls differ; random inputs, seed 0, N(0, 1).

    `limit` is the largest M that takes tiles; `calls` is per kernel and shape, by
    default that of the short form. Takes about a second on an H200, and at most
    400 MiB beside one weight of each shape.
    """
    import deep_gemm
    import torch

    from sglang_exact_kernels.race_stress import CALLS_SHORT, race_stress

    gen = torch.Generator(device).manual_seed(0)
    reasons: list[Reason] = []
    before = deep_gemm.get_deterministic_algorithms()
    deep_gemm.use_deterministic_algorithms(True)
    try:
        for n, k in pick(shapes):
            w = torch.randn(n, k, device=device, dtype=torch.bfloat16, generator=gen)
            for m in ROWS:
                a = torch.randn(
                    m, k, device=device, dtype=torch.bfloat16, generator=gen
                )
                for name, call in _calls(a, w, limit).items():
                    result = race_stress(
                        call, (m, n), a.dtype, device, calls=calls or CALLS_SHORT
                    )
                    if result.differing_calls:
                        reasons.append(_reason(name, (m, n, k), result))
    finally:
        deep_gemm.use_deterministic_algorithms(before)
    return reasons


def _reason(name: str, mnk: tuple[int, int, int], result: Any) -> Reason:
    m, n, k = mnk
    return Reason(
        f"{name} at M = {m}, N = {n}, K = {k}: {result.differing_calls} of "
        f"{result.calls} equal calls gave other bits ({result.elements} elements, "
        f"first in call {result.first})",
        "equal bits from equal calls",
        "run python -m sglang_exact.host.headers --check; if the headers are fenced, "
        "this card or its driver has a race that is not known: report it",
    )
