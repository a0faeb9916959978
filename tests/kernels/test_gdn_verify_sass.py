# SPDX-License-Identifier: Apache-2.0
"""gdn_verify does the decode kernel's float operations, in machine code.

Both kernels are compiled ahead of time with the ptxas that Triton ships; no GPU is
needed. Equal source does not give equal contractions (fma) in a loop, so this compares
what came out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.host


@pytest.fixture(scope="module", params=[90, 120])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    here = Path(__file__).parent
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    run = subprocess.run(
        [sys.executable, str(here / "gdn_machine_code.py"), str(request.param)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])[str(request.param)]


def test_same_operations_per_step(found) -> None:
    for name, case in found["cases"].items():
        assert case["stored"] > 30, name
        assert case["outputs"] > 4, name
        # Loop body entered from above and from below: both are one decode step. sm120
        # keeps bf16 v packed in uniform registers, which sass.py does not follow; its
        # operations are counted, and followed where activations are fp32.
        if (found["capability"], name) != (120, "K128 bf16"):
            assert case["equal"] == [True, True], name
        assert case["ops_equal"], name
        assert case["ops"] > 100, name


def test_same_row_operations_in_the_wide_tile(found) -> None:
    """The decode kernel launches 32 rows a program, gdn_verify fewer: equal rows."""
    wide, narrow, equal = found["row_expressions"]
    assert wide == narrow == 4  # one expression per column that a lane holds
    assert equal


def test_commit_multiplies_and_adds_in_one(found) -> None:
    """As decode does once u, k and the decay are known, and nothing else."""
    assert found["commit_ops"] == ["FFMA", "FMUL"]


def test_comparison_can_fail(found) -> None:
    assert found["control_equal"] is False
