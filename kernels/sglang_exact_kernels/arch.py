# SPDX-License-Identifier: Apache-2.0
"""Compute capability: the only module that reads it.

Kernels ask this module which row of a static table they use. Off the GPU (Triton's
interpreter) the capability is ``INTERPRETED`` and tables answer with their sm90 row,
so that logic tests walk the same tiles as the device.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import TypeVar

import torch

__all__ = [
    "INTERPRETED",
    "SUPPORTED",
    "capability",
    "is_interpreted",
    "multiprocessors",
    "pick",
    "unsupported_reasons",
]

T = TypeVar("T")

INTERPRETED = 0
"""Stands for "no GPU: kernels run in Triton's interpreter"."""

# The interpreter runs programs one after another; a few prove the striding.
_INTERPRETED_PROGRAMS = 3

SUPPORTED = (90, 120)
"""Capabilities (major * 10 + minor) that have rows in the tables."""


def is_interpreted() -> bool:
    """True if kernels of this process run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def _device_capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


def capability(device: torch.device) -> int:
    """Capability of `device` as major * 10 + minor, e.g. 90 or 120.

    A CPU device is INTERPRETED when kernels are interpreted. Raises ValueError for
    any other device that is not CUDA.
    """
    if device.type == "cuda":
        index = device.index
        return _device_capability(
            torch.cuda.current_device() if index is None else index
        )
    if device.type == "cpu" and is_interpreted():
        return INTERPRETED
    raise ValueError(
        f"found tensors on {device}, expected a CUDA device; "
        "move them there, or set TRITON_INTERPRET=1 before importing triton"
    )


@functools.cache
def _device_multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors; for launch sizes only, never for an order of sums."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return _device_multiprocessors(
        torch.cuda.current_device() if device.index is None else device.index
    )


def unsupported_reasons(device: torch.device) -> list[str]:
    """Why kernels of this package cannot run on `device`; empty if they can."""
    cap = capability(device)
    if cap == INTERPRETED or cap in SUPPORTED:
        return []
    names = ", ".join(f"sm_{c}" for c in SUPPORTED)
    return [f"found a GPU of sm_{cap}, expected one of {names}: use one of those"]


def pick(table: Mapping[int, T], device: torch.device) -> T:
    """Row of `table` (keyed by capability) for `device`.

    Raises ValueError if the table has no row for this GPU: a tile that nobody has
    checked is refused, not guessed.
    """
    cap = capability(device)
    key = 90 if cap == INTERPRETED else cap
    if key not in table:
        names = ", ".join(f"sm_{c}" for c in sorted(table))
        raise ValueError(
            f"found a GPU of sm_{cap}, expected one of {names}: use one of those"
        )
    return table[key]
