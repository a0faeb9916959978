# SPDX-License-Identifier: Apache-2.0
"""Race stress: the same call many times, back to back, must give the same bits.

A race in a kernel's pipeline shows once in some hundred calls, and a synchronisation
after each call hides it. So calls are launched without one, each into an output of its
own, and compared afterwards on the device, as integers, with the first call. The host
waits once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from sglang_exact_kernels.invariance import INTEGER

__all__ = ["CALLS", "CALLS_SHORT", "RaceResult", "race_stress"]

CALLS = 10_000
"""For a release, per shape; a known race of DeepGEMM showed in 10 of 1,000 calls."""

CALLS_SHORT = 1_024
"""At start-up: such a race stays unseen with a chance of 0.99 ** 1024 = 3e-5."""

_POISON = -1
"""All bits set, a NaN: an output that is not written differs from one that is."""


class RaceResult(NamedTuple):
    """`first` is the number of the first differing call (0 is the call compared with).

    `elements` counts differing elements over all calls.
    """

    calls: int
    differing_calls: int
    elements: int
    first: int | None


def race_stress(
    call: Callable[[torch.Tensor], object],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    calls: int = CALLS_SHORT,
    memory: int = 256 << 20,
) -> RaceResult:
    """Run `call(out)` `calls` times and compare every output with the first.

    `call` writes all of `out` (`shape`, `dtype`, contiguous) from inputs that do not
    change, and does not synchronise. Outputs live in groups that fill `memory` bytes
    (the comparison needs half as much again); between groups only device work is
    queued. Raises ValueError for fewer than 2
    calls or an output larger than half of `memory`.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    if calls < 2:
        raise ValueError(f"found {calls} calls, expected at least 2")
    if size == 0 or 2 * size > memory:
        raise ValueError(
            f"found an output of {size} bytes, expected 1 to {memory // 2}; "
            "fix: give more memory, or stress a smaller shape"
        )
    group = min(calls, memory // size - 1)
    outputs = torch.empty((group, *shape), dtype=dtype, device=device)
    bits = outputs.view(INTEGER[dtype.itemsize])
    differing = torch.zeros(calls, dtype=torch.int64, device=device)
    want: torch.Tensor | None = None
    for start in range(0, calls, group):
        count = min(group, calls - start)
        bits[:count].fill_(_POISON)
        for i in range(count):
            call(outputs[i])
        if want is None:
            want = bits[0].clone()
        wrong = (bits[:count] != want).flatten(1).sum(1)
        differing[start : start + count] = wrong
    found = differing.cpu()
    where = found.nonzero().flatten()
    return RaceResult(
        calls=calls,
        differing_calls=len(where),
        elements=int(found.sum()),
        first=int(where[0]) if len(where) else None,
    )
