# SPDX-License-Identifier: Apache-2.0
"""Why two ranks keep the promise: the sum of two bf16 numbers has one right answer.

Whatever an all-reduce does with its message, at two ranks every element is a + b or
b + a, computed in bf16 or in float32 and rounded to bf16. All of these are compared
with the exact sum, rounded once, over every pair of significands, signs and exponent
distances that can matter. With three or four addends the order shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

Array = npt.NDArray[np.float64]

BIAS, BITS = 127, 8
"""Of bf16's exponent; significant bits, the hidden one included."""
SMALLEST_EXPONENT = 1 - BIAS
LARGEST = (2.0 - 2.0**-7) * 2.0**127
FAR = 27
"""float32 drops a bf16 addend that is smaller by more than 24 + 1 binary orders."""
EXPONENTS = (0, 1, 2, 127, 253, 254)
"""Biased: subnormal, the smallest ones, an ordinary one, and both sides of overflow.
Between them the sum scales by a power of two, which changes no significand."""


def values(exponent: int) -> Array:
    """All 128 positive bf16 numbers of a biased exponent, 0 being the subnormals."""
    fraction = np.arange(128, dtype=np.float64) / 128
    if exponent == 0:
        return fraction * 2.0**SMALLEST_EXPONENT
    return (1.0 + fraction) * 2.0 ** (exponent - BIAS)


def rounded(x: Array) -> npt.NDArray[np.uint32]:
    """float64 to the nearest bf16, ties to even, once; bits of the float32 it is."""
    _, exponent = np.frexp(x)
    quantum = np.exp2(np.maximum(exponent, SMALLEST_EXPONENT + 1) - BITS)
    nearest = np.rint(x / quantum) * quantum
    nearest = np.where(np.abs(nearest) > LARGEST, np.copysign(np.inf, x), nearest)
    return nearest.astype(np.float32).view(np.uint32)


def pairs() -> Iterator[tuple[Array, Array]]:
    """(a, b), each [128, 128]: all significands, both signs of b, all distances."""
    for first in EXPONENTS:
        for second in range(max(0, first - FAR), min(254, first + FAR) + 1):
            for sign in (1.0, -1.0):
                a, b = np.meshgrid(values(first), sign * values(second))
                yield a, b


def in_float32(a: Array, b: Array) -> Array:
    """One-shot kernels: widened, added in float32, the caller rounds."""
    with np.errstate(over="ignore"):
        return (a.astype(np.float32) + b.astype(np.float32)).astype(np.float64)


def in_float32_flushing(a: Array, b: Array) -> Array:
    """The same, compiled so that subnormal float32 numbers count as zero."""

    def flush(x: Array) -> Array:
        return np.where(np.abs(x) < 2.0**SMALLEST_EXPONENT, np.copysign(0.0, x), x)

    return flush(in_float32(flush(a), flush(b)))


def differing(add: Callable[[Array, Array], Array]) -> list[tuple[float, float]]:
    """Pairs whose sum, rounded to bf16, is not the exact sum rounded once."""
    found = []
    for a, b in pairs():
        # Exact in float64: 8 bits each, at most 27 binary orders apart.
        where = rounded(add(a, b)) != rounded(a + b)
        found += list(zip(a[where], b[where], strict=True))
    return found


def test_float32_then_bf16_rounds_like_bf16() -> None:
    """24 bits are more than the 2 * 8 + 2 that make the first rounding harmless."""
    assert differing(in_float32) == []


def test_order_of_two_is_no_order() -> None:
    assert differing(lambda a, b: in_float32(b, a)) == []


def test_this_comparison_can_fail() -> None:
    """A kernel that flushes subnormals differs there, and nowhere else.

    So kernels chosen by message size are not taken on trust: one kind is served.
    """
    found = differing(in_float32_flushing)
    assert found
    tiny = 2.0**SMALLEST_EXPONENT
    assert all(min(abs(a), abs(b), abs(a + b) or tiny) < tiny for a, b in found)


def _bf16_add(a: Array, b: Array) -> Array:
    return rounded(a + b).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("ranks", [3, 4])
def test_more_addends_have_an_order(ranks: int) -> None:
    """A ring adds one rank after another; a tree, or another start, adds otherwise."""
    rng = np.random.default_rng(1)
    draws = rng.standard_normal((ranks, 4096))
    x = [rounded(row).view(np.float32).astype(np.float64) for row in draws]
    ring = x[0]
    for addend in x[1:]:
        ring = _bf16_add(ring, addend)
    tail = _bf16_add(x[-2], x[-1])
    other = _bf16_add(x[0], tail) if ranks == 3 else _bf16_add(_bf16_add(*x[:2]), tail)
    assert (rounded(ring) != rounded(other)).mean() > 0.05
