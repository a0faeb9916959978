# SPDX-License-Identifier: Apache-2.0
"""Every program of scripts/ says what it does on a machine that has Python alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
PROGRAMS = sorted(
    path for path in SCRIPTS.iterdir() if path.is_file() and path.stat().st_mode & 0o111
)


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """A machine whose Python has no package: no site-packages, no variables."""
    for name in ("python", "python3", "python3.11"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
        program.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    return {"PATH": path, "HOME": str(tmp_path), "COLUMNS": "200"}


def asked(
    program: Path | str, bare: dict[str, str], *words: str
) -> subprocess.CompletedProcess[str]:
    """A program started by its first line, in that machine."""
    return subprocess.run(
        [str(program), *words],
        env=bare,
        cwd=bare["HOME"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_help_needs_python_alone(program: Path, bare: dict[str, str]) -> None:
    done = asked(program, bare, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert program.name in done.stdout or "usage:" in done.stdout
    text = program.read_text(encoding="utf-8")
    if "python" in text.partition("\n")[0]:
        assert re.search(r"^usage: ", done.stdout, re.M)
    made = set(os.listdir(bare["HOME"])) - {"python", "python3", "python3.11"}
    assert made == set(), "nothing is made or installed"


def test_the_machine_is_bare(bare: dict[str, str]) -> None:
    """Control: what a program may not need there is not there."""
    for name in ("numpy", "aiohttp", "packaging"):
        done = asked("python3", bare, "-c", f"import {name}")
        assert "ModuleNotFoundError" in done.stderr, name


def test_some_programs_are_asked() -> None:
    names = {path.name for path in PROGRAMS}
    assert names >= {"gpu_bench", "gpu_proof", "demo", "test", "evidence", "pin_host"}
