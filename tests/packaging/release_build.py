# SPDX-License-Identifier: Apache-2.0
"""Programs of scripts/ as modules, and what a build of the release is."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    """A program of scripts/ as a module."""
    path = str(ROOT / "scripts" / name)
    loader = importlib.machinery.SourceFileLoader(name, path)
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class Release(NamedTuple):
    """What was built, and what the check found wrong with it."""

    wheel: Path
    sdist: Path
    reasons: list[str]
