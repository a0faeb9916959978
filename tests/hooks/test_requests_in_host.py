# SPDX-License-Identifier: Apache-2.0
"""The request hooks on the host's own classes; see `request_checks`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.host

PROGRAM = Path(__file__).with_name("request_checks.py")
FILES = sorted(PROGRAM.parent.glob("request_checks_*.py"))
CHECK = re.compile(r"^def ((?:check|control)_\w+)", re.M)
NAMES = [name for file in FILES for name in CHECK.findall(file.read_text())]


@pytest.fixture(scope="module")
def outcome() -> dict[str, str]:
    """Every check run once, in a process that can import the host without a GPU."""
    from sglang_exact.rehearsal.environment import environment

    env = {**environment(), "TORCHDYNAMO_DISABLE": "1"}
    ran = subprocess.run(
        [sys.executable, str(PROGRAM)], env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, str] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_host(outcome: dict[str, str], name: str) -> None:
    assert outcome[name] == ""


def test_every_check_ran(outcome: dict[str, str]) -> None:
    assert sorted(outcome) == sorted(NAMES)
