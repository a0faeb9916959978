# SPDX-License-Identifier: Apache-2.0
"""What launches check: bounds are inclusive, alignment is of base and rows."""

from __future__ import annotations

import pytest
import torch

from sglang_exact_kernels import checks


@pytest.mark.parametrize(
    ("found", "least", "most", "count"),
    [
        (1, 1, 4, 0),
        (4, 1, 4, 0),
        (0, 1, 4, 1),
        (5, 1, 4, 1),
        (9, 9, None, 0),
        (8, 9, None, 1),
    ],
)
def test_bounds(found: int, least: int, most: int | None, count: int) -> None:
    reasons = checks.outside([("T", found, least, most)])
    assert len(reasons) == count
    assert all(f"T: found {found}, expected at least {least}" in x for x in reasons)


def test_alignment_is_of_base_and_rows_not_of_elements() -> None:
    flat = torch.zeros(64, dtype=torch.bfloat16)
    rows = flat.view(4, 16)
    assert checks.misaligned({"flat": flat, "rows": rows, "cut": rows[:, :5]}) == []
    assert (
        len(checks.misaligned({"base": flat[1:], "rows": flat[:60].view(4, 15)})) == 2
    )


def test_one_device_and_no_more() -> None:
    here, there = torch.zeros(1), torch.zeros(1, device="meta")
    (reason,) = checks.device_reasons({"a": here, "b": there, "c": None})
    assert reason == "found tensors on cpu, meta, expected one device"


def test_a_refusal_has_every_reason_and_none_is_no_refusal() -> None:
    checks.refuse("kernel", [])
    with pytest.raises(ValueError, match="kernel refused this call:\n- one\n- two"):
        checks.refuse("kernel", ["one", "two"])
