# SPDX-License-Identifier: Apache-2.0
"""prefill_attention compiles for every architecture in its table and fits the chip."""

from __future__ import annotations

from pathlib import Path

from machine_code import LIMITS, found_by

SPILLS = {"90": 0, "120": 4}
"""Reloads of spilled registers that each of the loops may have."""
# Specialised: two in each group, and the way back of a wait laid out at the end.
LOOPS = {"sm90": 3, "sm120": 3, "copied": 2, "specialised": 5}


def test_prefill_attention_fits_the_chip(tmp_path: Path) -> None:
    found = found_by("prefill_machine_code.py", tmp_path)
    assert len(found) == 6 + 3 + 1
    specialised = found["27b specialised sm90"]
    assert specialised["same_keys"]
    assert specialised["unguarded"] == 0 < specialised["unguarded_control"]
    for name, taken in found.items():
        chip = name.split(" sm")[1]
        assert 0 < taken["shared"] <= LIMITS[chip], (name, taken)
        assert len(taken["spills"]) == LOOPS[name.split()[1]], (name, taken)
        assert max(taken["spills"]) <= SPILLS[chip], (name, taken)
