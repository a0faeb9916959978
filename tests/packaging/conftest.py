# SPDX-License-Identifier: Apache-2.0
"""One build of the release for all tests here."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

# A base image is an environment that sees the installed host: the same is needed here.
sys.path.append(str(Path(__file__).resolve().parents[1] / "docker"))

from release_build import Release  # noqa: E402

from tools import release as program  # noqa: E402


@pytest.fixture(scope="session")
def release_check() -> ModuleType:
    return program


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
