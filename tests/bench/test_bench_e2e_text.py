# SPDX-License-Identifier: Apache-2.0
"""The commands that need text, and what is made of their records, on the real engine.

CPU, interpreted kernels, random weights, a drafter of random weights: this proves that
the commands read what the engine sends. The speeds mean nothing.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_runs import command, record

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STAND_IN = Path(__file__).with_name("stand_in_aiperf.py")
LENGTH = "6"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the records of all tests of this module lie."""
    return tmp_path_factory.mktemp("bench-text")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[tuple[str, ...]]:
    """Options of a plain and a speculative server that both have a tokenizer."""
    pytest.importorskip("tokenizers")
    from sglang_exact.rehearsal import models, tokenizer
    from sglang_exact.rehearsal.server import Server, draft_flags

    class TextServer(Server):
        def command(self) -> list[str]:
            return [x for x in super().command() if x != "--skip-tokenizer-init"]

    target = tokenizer.make_tokenizer(models.make_target(folder / "target"))
    draft = models.make_draft(folder / "dflash", "dflash")
    flags = ["--enable-metrics"]
    drafted = [*draft_flags("dflash", draft), *flags]
    with (
        TextServer(target, flags=flags, start_timeout_s=300) as plain,
        TextServer(target, flags=drafted, start_timeout_s=300) as spec,
    ):
        yield ("--server", f"plain={plain.url}", "--server", f"spec={spec.url}")


def measured(folder: Path, verb: str, *args: str) -> dict[str, Any]:
    done = command(verb, *args, "--output-file", f"{verb}.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    run = record(folder / f"{verb}.json")
    assert run["complete"]
    return run


def aiperf(folder: Path) -> str:
    """The environment that AIPERF_VENV names, else the stand-in."""
    ready = os.environ.get("AIPERF_VENV")
    if ready:
        return ready
    path = folder / "aiperf"
    path.write_text(f"#!{sys.executable}\n{STAND_IN.read_text()}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_sweep(folder: Path, servers: tuple[str, ...]) -> None:
    run = measured(
        folder,
        *("sweep", *servers, "--aiperf", aiperf(folder), "--lengths", LENGTH),
        *("--requests", "2", "--warmups", "1"),
    )
    base, spec = run["rows"]
    assert (base["server"], base["osl"], base["requests"]) == ("plain", 6.0, 2)
    assert spec["exactness"]["compared"] == spec["exactness"]["ids_equal"] == 2
    assert spec["exactness"]["what"] == "ids"
    assert spec["decode_tok_s"]["n"] == 2 and spec["acceptance"] >= 1
    assert base["acceptance"] is None


def test_quality(folder: Path, servers: tuple[str, ...]) -> None:
    pytest.importorskip("math_verify")
    rows = [{"text": text, "answer": "5"} for text in ("abcdefgh", "qrstuvwx")]
    data = folder / "set.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = measured(
        folder,
        *("quality", *servers, "--dataset-path", str(data)),
        *("--max-new-tokens", LENGTH),
    )
    assert len(run["rows"]) == 4 and all(row["tail"] for row in run["rows"])
    assert {row["state"] for row in run["rows"]} <= {"correct", "wrong"}
    assert run["exactness"]["ids_equal"] == run["exactness"]["compared"] == 2


def test_memory(folder: Path, servers: tuple[str, ...]) -> None:
    run = measured(folder, "memory", *servers)
    plain, spec = run["rows"]
    assert plain["plain"] and plain["weight_gib"] is not None
    assert plain["kv_tokens"] == spec["kv_tokens"] == 8192
    assert spec["draft_tokens"] == 4


def test_cost_model_and_report(folder: Path, servers: tuple[str, ...]) -> None:
    data = folder / "own.jsonl"
    data.write_text(json.dumps({"input_ids": [5, 6, 7, 8]}) + "\n")
    measured(
        folder,
        *("accept", *servers, "--dataset", "own", "--dataset-path", f"own={data}"),
        *("--num-prompts", "1", "--concurrency", "1", "--ignore-eos"),
        *("--max-new-tokens", LENGTH),
    )
    done = command(
        *("cost-model", "accept.json", "--bandwidth", "10", "--weight-gib", "0.001"),
        *("--output-file", "cost-model.json"),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    steps = [
        r for r in record(folder / "cost-model.json")["rows"] if r["table"] == "step"
    ]
    assert [step["width"] for step in steps] == [1, 4]
    names = [
        f"{verb}.json"
        for verb in ("accept", "cost-model", "sweep", "quality", "memory")
        if (folder / f"{verb}.json").exists()
    ]
    done = command("report", *names, cwd=folder)
    assert done.returncode == 0, done.stderr
    page = (folder / "sglang-exact-bench.html").read_text()
    assert "ids equal" in page and "set-up 1" in page
