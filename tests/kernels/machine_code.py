# SPDX-License-Identifier: Apache-2.0
"""What a *_machine_code.py script found, run where kernels compile, not interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# Shared memory one block may take: CUDA programming guide, compute capabilities.
LIMITS = {"90": 227 * 1024, "120": 99 * 1024}


def found_by(script: str, cache: Path) -> dict[str, Any]:
    """The JSON that `script` of this folder prints last, compiled anew in `cache`."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(cache)
    run = subprocess.run(
        [sys.executable, str(Path(__file__).parent / script)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found
