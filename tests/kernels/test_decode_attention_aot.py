# SPDX-License-Identifier: Apache-2.0
"""decode_attention compiles for every architecture in its table and fits the chip."""

from __future__ import annotations

from pathlib import Path

from machine_code import LIMITS, found_by


def test_decode_attention_fits_shared_memory(tmp_path: Path) -> None:
    found = found_by("attention_machine_code.py", tmp_path)
    assert len(found) == 6
    for name, shared in found.items():
        assert 0 < shared <= LIMITS[name.split(" sm")[1]], (name, shared)
