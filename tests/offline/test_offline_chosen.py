# SPDX-License-Identifier: Apache-2.0
"""What a bundle leaves out of the installed host breaks nothing that it takes."""

from __future__ import annotations

import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from tools.offline import chosen

SITE = Path(sysconfig.get_path("purelib"))


def lost_plugins() -> list[str]:
    """Entry points of packages that are taken, whose module is left out."""
    taken = chosen.choose(SITE)
    paths = set(taken.paths)
    lost = []
    for item in metadata.distributions(path=[str(SITE)]):
        if chosen.normalised(item.metadata["Name"]) not in taken.packages:
            continue
        for point in item.entry_points:
            base = point.module.replace(".", "/")
            files = [f"{base}.py", f"{base}/__init__.py"]
            there = [name for name in files if (SITE / name).exists()]
            if there and not paths & set(there):
                lost.append(f"{point.group}: {point.module}")
    return lost


@pytest.mark.host
def test_no_entry_point_is_lost() -> None:
    assert lost_plugins() == []


@pytest.mark.host
def test_a_lost_entry_point_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """triton imports each of its backends, those of other vendors too."""
    monkeypatch.setitem(chosen.LEFT_OUT_PATHS, r"^triton/backends/amd/", "a vendor")
    assert lost_plugins() == ["triton.backends: triton.backends.amd"]
