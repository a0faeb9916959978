# SPDX-License-Identifier: Apache-2.0
"""Self-test: rows of quantised linear layers at every served number of rows.

A layer quantises its activations and multiplies; both may choose their kernel by the
number of rows. So a layer is called as the model calls it, and its rows are compared as
integers with those of 64 rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sglang_exact.reasons import Reason
from sglang_exact.schemes import Scheme
from sglang_exact.selftest.deep_gemm import LARGEST_OUTPUT, REFERENCE_M, Shape

if TYPE_CHECKING:
    import torch

FEW = (1, 8, 63, 65, 128, 257)
"""M that are asked beside those of the server: one row, a block, around tiles."""
STRESSED = (8, 908)
"""M of the race stress, as for bfloat16 (`selftest.race`)."""


def layers(model: torch.nn.Module, scheme: Scheme) -> dict[Shape, Any]:
    """One quantised linear layer per (N, K) of its weight."""
    found: dict[Shape, Any] = {}
    for name, module in model.named_modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if method == scheme.method and "visual" not in name.split("."):
            found.setdefault(scheme.shape(module), module)
    return found


def run(
    found: dict[Shape, Any], served: Iterable[int], device: torch.device
) -> list[Reason]:
    """Compare each layer's rows at every M with those at M = 64; N(0, 1), seed 0.

    Synchronises; run it before capture.
    """
    import torch

    gen = torch.Generator(device).manual_seed(0)
    reasons = []
    for (n, k), layer in found.items():
        a = torch.randn(
            (REFERENCE_M, k), device=device, dtype=torch.bfloat16, generator=gen
        )
        want = _bits(layer, a)
        most = max(LARGEST_OUTPUT // n, 1)
        wrong = [
            f"M = {m}: {count} of {m * n}"
            for m in sorted({min(m, most) for m in (*FEW, *served)})
            if (count := _different(layer, a, m, want))
        ]
        wrong += _unsteady(layer, a, n)
        if wrong:
            reasons.append(
                Reason(
                    f"quantised layers of N = {n}, K = {k}: elements that are not "
                    f"those at M = {REFERENCE_M}: " + "; ".join(wrong),
                    "equal bits for a row at every number of rows and in every call",
                    "install the pinned release, or use the bfloat16 checkpoint",
                )
            )
    return reasons


def _bits(layer: Any, a: torch.Tensor) -> torch.Tensor:
    import torch

    out: torch.Tensor = layer.quant_method.apply(layer, a)
    return out.view(torch.int16)


def _repeated(a: torch.Tensor, m: int) -> torch.Tensor:
    return a.repeat(-(-m // REFERENCE_M), 1)[:m].contiguous()


def _different(layer: Any, a: torch.Tensor, m: int, want: torch.Tensor) -> int:
    """How many of the m x N elements differ, with the rows of `a` over and over."""
    parts = _bits(layer, _repeated(a, m)).split(REFERENCE_M)
    return sum(int((part != want[: part.shape[0]]).sum()) for part in parts)


def _unsteady(layer: Any, a: torch.Tensor, n: int) -> list[str]:
    """Calls, one behind the other, that give other bits than the first."""
    from sglang_exact_kernels.race_stress import race_stress

    found = []
    for m in STRESSED:
        rows = _repeated(a, m)

        def call(out: torch.Tensor, rows: torch.Tensor = rows) -> None:
            out.copy_(layer.quant_method.apply(layer, rows))

        result = race_stress(call, (m, n), a.dtype, a.device, calls=256)
        if result.differing_calls:
            found.append(f"{result.differing_calls} of {result.calls} calls at M = {m}")
    return found
