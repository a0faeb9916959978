# SPDX-License-Identifier: Apache-2.0
"""README's demo, as `scripts/demo` runs it in an environment that is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import docs_reader
import pytest

from sglang_exact.rehearsal.environment import environment

pytestmark = [pytest.mark.host, pytest.mark.e2e, pytest.mark.slow]


def test_demo(tmp_path: Path) -> None:
    script = (docs_reader.ROOT / "scripts" / "demo").read_text()
    assert "-m tools.proof " in script
    result = tmp_path / "demo.json"
    command = ["-W", "ignore", "-m", "tools.proof", "--json", result]
    env = environment()
    env["PYTHONPATH"] += f":{docs_reader.ROOT / 'scripts'}"
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={
            **env,
            "PYTHONPATH": f"{docs_reader.ROOT / 'scripts'}:{env['PYTHONPATH']}",
        },
        cwd=docs_reader.ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(result.read_text())
