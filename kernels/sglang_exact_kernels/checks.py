# SPDX-License-Identifier: Apache-2.0
"""What every attention launch of this package checks about its tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

__all__ = ["attention_layout_reasons", "mismatches"]


def mismatches(expected: Iterable[tuple[str, Any, Any]]) -> list[str]:
    """One reason for each (name, found, expected) whose values differ."""
    return [f"{n}: found {f}, expected {e}" for n, f, e in expected if f != e]


def attention_layout_reasons(
    tensors: Mapping[str, torch.Tensor | None], indices: Collection[str]
) -> list[str]:
    """Strides, alignment, dtypes and devices of an attention call; no shapes.

    `tensors` has q, k_buffer, v_buffer and out, three-dimensional and of one dtype
    (bf16 or fp16), among others. The names in `indices` need no alignment.
    """
    present = {name: t for name, t in tensors.items() if t is not None}
    reasons = [
        f"{name}: found last stride {t.stride(-1)} and base {t.data_ptr():#x}, "
        "expected unit stride and 16-byte alignment"
        for name, t in present.items()
        if t.stride(-1) != 1 or (t.data_ptr() % 16 and name not in indices)
    ]
    values = {name: present[name] for name in ("q", "k_buffer", "v_buffer", "out")}
    dtypes = {str(t.dtype) for t in values.values()}
    if len(dtypes) != 1 or values["q"].dtype not in (torch.bfloat16, torch.float16):
        reasons.append(
            f"q, k_buffer, v_buffer, out: found {sorted(dtypes)}, expected all "
            "torch.bfloat16 or all torch.float16 (quantised caches are not covered)"
        )
    reasons += mismatches((f"{name} dims", t.ndim, 3) for name, t in values.items())
    devices = {str(t.device) for t in present.values()}
    if len(devices) != 1:
        reasons.append(f"found tensors on {sorted(devices)}, expected one device")
    return reasons
