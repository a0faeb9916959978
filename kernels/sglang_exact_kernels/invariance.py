# SPDX-License-Identifier: Apache-2.0
"""Comparison of tensors as integers, and row-subset invariance on top of it.

`torch.equal` is no bit comparison: it takes -0.0 for 0.0 and tells equal NaNs apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

__all__ = [
    "INTEGER",
    "assert_row_subset_invariance",
    "assert_same_bits",
    "bits",
    "different_elements",
    "first_difference",
]

INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: torch.Tensor) -> torch.Tensor:
    """`x` viewed as integers of the same width; same shape."""
    if not x.dtype.is_floating_point:
        return x
    return x.contiguous().view(INTEGER[x.element_size()])


def different_elements(x: torch.Tensor, y: torch.Tensor) -> int:
    """Number of elements whose bits differ; ValueError if shape or dtype differs."""
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(
            f"found {tuple(x.shape)} {x.dtype} and {tuple(y.shape)} {y.dtype}, "
            "expected equal shapes and dtypes"
        )
    return int((bits(x) != bits(y)).sum().item())


def first_difference(x: torch.Tensor, y: torch.Tensor) -> str:
    """Where the bits first differ, with both values as hexadecimal floats."""
    if different_elements(x, y) == 0:
        return "no difference"
    where = (bits(x) != bits(y)).nonzero()[0].tolist()
    left, right = (t[tuple(where)].double().item() for t in (x, y))
    return f"at {where}: {float(left).hex()} and {float(right).hex()}"


def assert_same_bits(x: torch.Tensor, y: torch.Tensor, what: str = "tensors") -> None:
    """Raise AssertionError unless `x` and `y` agree bit for bit."""
    count = different_elements(x, y)
    if count:
        raise AssertionError(
            f"{what}: {count} of {x.numel()} elements differ in bits, "
            f"first {first_difference(x, y)}"
        )


def assert_row_subset_invariance(
    run: Callable[[Sequence[int]], torch.Tensor],
    num_rows: int,
    subsets: Iterable[Sequence[int]],
) -> None:
    """Each row's bits must not depend on which rows run beside it, or in what order.

    `run(rows)` computes the given rows of one problem and returns [len(rows), ...].
    """
    whole = run(range(num_rows))
    for subset in subsets:
        rows = list(subset)
        assert_same_bits(run(rows), whole[rows], f"rows {rows}")
