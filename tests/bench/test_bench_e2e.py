# SPDX-License-Identifier: Apache-2.0
"""Every bench command of this half against the real engine.

CPU, interpreted kernels, random weights, acceptance set by the oracle: this proves that
the commands read what the engine sends. The speeds mean nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_runs import PROMPTS, EnginePair, command, record

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOKENS = "8"


def measured(path: Path, pair: EnginePair, verb: str, *args: str) -> dict[str, Any]:
    """The record of a command that has to succeed."""
    done = command(
        *(verb, *pair.servers, "--max-new-tokens", TOKENS),
        *("--output-file", "run.json", "--note", "acceptance set by an oracle drafter"),
        *args,
        cwd=path,
    )
    assert done.returncode == 0, done.stderr
    run = record(path / "run.json")
    assert run["complete"] and run["notes"][0].startswith("acceptance set")
    plain, spec = run["provenance"]["servers"]
    assert (plain["name"], spec["name"]) == ("plain", "spec")
    assert spec["attestation"]["version"] == plain["attestation"]["version"]
    assert spec["speculative"]["speculative_algorithm"] == "DFLASH"
    assert "--speculative-algorithm DFLASH" in spec["launch_command"]
    return run


def test_accept(tmp_path: Path, engine_pair: EnginePair, ids_file: Path) -> None:
    run = measured(
        tmp_path,
        engine_pair,
        *("accept", "--dataset", "own", "--dataset-path", f"own={ids_file}"),
        *("--num-prompts", "2", "--concurrency", "1,2", "--ignore-eos", "--logprobs"),
    )
    assert len(run["rows"]) == 4
    for row in run["rows"]:
        found = row["exactness"]
        assert row["output_tokens"] == 2 * int(TOKENS) and row["tok_s"] > 0
        assert found["ids_equal"] == found["logprobs_equal"] == found["compared"]
    spec = run["rows"][1]
    assert spec["exactness"]["compared"] == 2 and spec["draft_tokens"] == 4
    assert spec["acceptance"]["micro"] > 1.2, "the oracle keeps most drafts"
    assert spec["speed_up"] is not None


def test_leaderboard(tmp_path: Path, engine_pair: EnginePair) -> None:
    (tmp_path / "prompt.json").write_text(json.dumps(PROMPTS[0]))
    run = measured(
        tmp_path,
        engine_pair,
        *("leaderboard", "--runs", "2", "--csv", "lb.csv", "--plot", "lb.png"),
        *("--prompt-file", "prompt.json"),
    )
    plain, spec = run["rows"]
    assert (plain["draft_length"], spec["draft_length"]) == (0, 3)
    assert spec["exactness"] == {"compared": 2, "ids_equal": 2}
    assert spec["accepted_per_verify"] > 0.2 and spec["decode_tok_s"]["n"] == 2
    assert (tmp_path / "lb.csv").read_bytes().count(b"\n") == 5
    assert (tmp_path / "lb.png").read_bytes().startswith(b"\x89PNG")


def test_decode_table(tmp_path: Path, engine_pair: EnginePair) -> None:
    (tmp_path / "prompt.json").write_text(json.dumps(PROMPTS[0]))
    run = measured(
        tmp_path,
        engine_pair,
        *("decode-table", "--prompt-lengths", f"{len(PROMPTS[0])},70"),
        *("--rounds", "2", "--prompt-file", "prompt.json", "--logprobs"),
    )
    found = [(r["prompt_tokens"], r["server"]) for r in run["rows"]]
    assert found == [(n, s) for n in (8, 70) for s in ("plain", "spec")]
    for row in run["rows"]:
        assert row["exact"] and row["decode_tok_s"]["n"] == 2
        assert row["ttft_s"]["low"] > 0
    spec = run["rows"][1]
    assert spec["exactness"]["logprobs_equal"] == spec["exactness"]["compared"] == 2
    assert spec["acceptance"]["micro"] > 1.2
