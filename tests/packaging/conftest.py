# SPDX-License-Identifier: Apache-2.0
"""One build of the release for all tests here."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A base image is an environment that sees the installed host: the same is needed here.
sys.path.append(str(ROOT / "tests" / "docker"))


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


@pytest.fixture(scope="session")
def release_check() -> ModuleType:
    return load("release_check")


@pytest.fixture(scope="session")
def release(
    release_check: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Release:
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("release")
    (folder / "work" / "tree").mkdir(parents=True)
    reasons = release_check.build_reasons(folder / "dist", folder / "work")
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return Release(wheel, sdist, reasons)
