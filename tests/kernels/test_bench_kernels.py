# SPDX-License-Identifier: Apache-2.0
"""The kernel bench runs every part, writes what it has, and stops when told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
# The bench as a program, with the interpreter mended as in the kernel tests and a
# model small enough for it.
PROGRAM = """
import sys
import triton
from sglang_exact.rehearsal.interpreter import mend
mend(triton)
sys.path.insert(0, sys.argv[1])
from tools.kernels import model, options, run as bench, tune as bench_tune
model.DEVICE = "cpu"
model.Q_HEADS, model.KV_HEADS, model.DIM = 4, 2, 32
model.GDN_HEADS, model.GDN_V_HEADS, model.GDN_DIM = 2, 4, 32
model.HOST_CONTEXT = 512
model.T = 2
small = bench_tune.Tiers(32, 16, 64, 32, 64)
bench_tune.CANDIDATES[90] = [
    bench_tune.Candidate(bench_tune._tile(keys, 4, 2, 2), small)
    for keys in (16, 32)
]
sys.argv = ["bench_kernels.py", *sys.argv[2:]]
bench.main(options.bench())
"""
SMALL = ["--lengths", "64,80", "--batch-sizes", "1", "--steps", "0:40,70:30"]


def run(tmp_path: Path, *options: str) -> dict[str, Any]:
    out = tmp_path / "bench.json"
    env = os.environ | {
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(
            [str(SCRIPTS.parent), str(SCRIPTS.parent / "kernels")]
        ),
    }
    command = [sys.executable, "-c", PROGRAM, str(SCRIPTS), "--out", str(out)]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.host
def test_every_part_runs(tmp_path: Path) -> None:
    found = run(tmp_path, *SMALL, "--tune")
    assert found["left_out"] == []
    tiles = [entry["tile"] for entry in found["sweep"]]
    assert [entry["product"] for entry in found["sweep"]] == [True] + [False] * 3
    assert len({tuple(t) for t in tiles}) == len(tiles) == 4
    for entry in found["sweep"]:
        assert "error" not in entry
        assert entry["mean_error"] < 2.0**-10
    assert len(found["gathered"]) == 2
    assert not any("error" in entry for entry in found["gathered"])
    assert found["gathered"][0]["differing_from_ours"] == 0
    assert [e["prefix"] for e in found["prefill"]] == [0, 70]
    for entry in found["prefill"]:
        assert entry["ours_us"] > 0 and entry["host_us"] > 0
        assert entry["default_us"] is None
    assert [e["length"] for e in found["attention"]] == [64, 80]
    assert all(e["host_rows_us"] > 0 for e in found["attention"])
    assert found["gdn"][0]["host_gdn_decode_us"] > 0
    *cells, summary = found["tune"]
    assert [c["length"] for c in cells] == [64, 80]
    assert len(summary["candidates"]) == 3
    # numpy's products depend on a row's place in the tile; a GPU's do not.
    assert not any("error" in v for c in cells for v in c.values() if type(v) is dict)


def test_budget_leaves_out_the_rest_by_name(tmp_path: Path) -> None:
    found = run(tmp_path, *SMALL, "--seconds", "0")
    assert found["sweep"] == found["prefill"] == found["gdn"] == []
    assert len(found["left_out"]) == 4 + 2 + 2 + 2 + 1
    assert found["left_out"][6] == "prefill of 40 after 0"


def test_unknown_parts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="found parts"):
        run(tmp_path, "--parts", "sweep,nothing")
