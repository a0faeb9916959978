# SPDX-License-Identifier: Apache-2.0
"""What launches of this package check before they launch, and how they refuse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from sglang_exact_kernels import arch

__all__ = [
    "attention_layout_reasons",
    "attention_shape_reasons",
    "device_reasons",
    "misaligned",
    "mismatches",
    "outside",
    "refuse",
]

Tensors = Mapping[str, torch.Tensor | None]


def mismatches(expected: Iterable[tuple[str, Any, Any]]) -> list[str]:
    """One reason for each (name, found, expected) whose values differ."""
    return [f"{n}: found {f}, expected {e}" for n, f, e in expected if f != e]


def outside(bounds: Iterable[tuple[str, int, int, int | None]]) -> list[str]:
    """One reason for each (name, found, least, most) out of bounds; None: no most."""
    reasons = []
    for name, found, least, most in bounds:
        if found < least or (most is not None and found > most):
            most_text = "" if most is None else f" and at most {most}"
            reasons.append(
                f"{name}: found {found}, expected at least {least}{most_text}"
            )
    return reasons


def misaligned(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """One reason for each whose base, or any stride but the last, is off 16 bytes."""
    return [
        f"{name}: found base {t.data_ptr():#x}, strides {t.stride()}, expected "
        "multiples of 16 bytes"
        for name, t in tensors.items()
        if t.data_ptr() % 16 or any(n * t.element_size() % 16 for n in t.stride()[:-1])
    ]


def device_reasons(tensors: Tensors) -> list[str]:
    """Several devices, or one that has no row in the tables."""
    devices = dict.fromkeys(t.device for t in tensors.values() if t is not None)
    if len(devices) != 1:
        return [f"found tensors on {', '.join(map(str, devices))}, expected one device"]
    return arch.unsupported_reasons(*devices)


def refuse(kernel: str, reasons: Iterable[str]) -> None:
    """Raise ValueError with every reason; return if there is none."""
    if lines := "\n- ".join(reasons):
        raise ValueError(f"{kernel} refused this call:\n- {lines}")


def attention_layout_reasons(
    tensors: Tensors, indices: Mapping[str, torch.dtype], sm_scale: float
) -> list[str]:
    """Strides, alignment, dtypes and devices of an attention call; no shapes.

    `tensors` has q, k_buffer, v_buffer and out, three-dimensional and of one dtype
    (bf16 or fp16), among others. `indices` need their dtype and no alignment.
    """
    present = {name: t for name, t in tensors.items() if t is not None}
    reasons = device_reasons(tensors)
    reasons += [
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
    if sm_scale <= 0.0:
        reasons.append(f"sm_scale: found {sm_scale}, expected a positive number")
    return reasons + mismatches(
        [
            *((f"{name} dims", t.ndim, 3) for name, t in values.items()),
            *(
                (f"{n} dtype", present[n].dtype, d)
                for n, d in indices.items()
                if n in present
            ),
        ]
    )


def attention_shape_reasons(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Shapes of q, k_buffer, v_buffer and out, whose layout is as it should be."""
    q, k, v, out = (tensors[n] for n in ("q", "k_buffer", "v_buffer", "out"))
    (rows, q_heads, dim), (slots, kv_heads, _), v_dim = q.shape, k.shape, v.shape[2]
    expected = (
        ("k_buffer head_dim", k.shape[2], dim),
        ("v_buffer slots, heads", tuple(v.shape[:2]), (slots, kv_heads)),
        ("out shape", tuple(out.shape), (rows, q_heads, v_dim)),
        ("q_heads % kv_heads", q_heads % kv_heads, 0),
    )
    dims = (("head_dim", dim, 16, 256), ("v_head_dim", v_dim, 16, 256))
    return mismatches(expected) + outside(dims)
