# SPDX-License-Identifier: Apache-2.0
"""The host's version stands in `sglang_exact.host`; what repeats it is held to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang_exact.host import VERSION, compat

ROOT = Path(__file__).resolve().parents[2]
PLACE = "sglang_exact/host/__init__.py"
# Read by pip, Docker or a person, none of whom can ask Python.
REPEATS = (
    "README.md",
    "pyproject.toml",
    "docker/.env.example",
    "docker/Dockerfile",
    "docker/compose.yaml",
    "docs/docker.md",
)
FOLDERS = (
    "docker",
    "kernels",
    "patches",
    "requirements",
    "scripts",
    "sglang_exact",
    "tests",
)
NAMED = re.compile(r"sglang(?:==|:v|-exact-jit-|_version=| )(\d+\.\d+\.\d+)", re.I)


def others(text: str) -> set[str]:
    """Versions of the host that a text names and that are not the one place's."""
    return set(NAMED.findall(text)) - {VERSION}


@pytest.mark.parametrize("name", REPEATS)
def test_what_repeats_it_is_equal(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert VERSION in NAMED.findall(text)
    assert others(text) == set()
    assert others(text.replace(VERSION, "9.9.9")) == {"9.9.9"}


def test_it_stands_nowhere_else() -> None:
    holders = {
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and not {"__pycache__", "pins", "wheels"} & set(path.parts)
        and VERSION.encode() in path.read_bytes()
    }
    assert PLACE in holders
    assert holders - {PLACE, *REPEATS} == set()


def test_it_is_the_release_that_a_device_run_has_proven() -> None:
    pins = [compat.load(version) for version in compat.pinned_versions()]
    assert [p.version for p in pins if p and p.device_run] == [VERSION]
