# SPDX-License-Identifier: Apache-2.0
"""Nothing measured is ever lost: not to a new run, a resumed one, or Ctrl-C."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from bench_runs import against, record, write_ids
from bench_server import BenchServer
from fake_server import Lies
from typer.testing import CliRunner

from sglang_exact.bench.leaderboard.run_log import Line
from sglang_exact.bench.run import BenchRun, Output, RunError, load, save
from sglang_exact.bench.verbs import VERBS
from sglang_exact.cli.bench import bench
from sglang_exact.verify import record as verify_record
from sglang_exact.verify.command import report
from sglang_exact.view.output import WouldBeLost, check_pages, write_atomic

NOBODY = ("--server", "plain=http://127.0.0.1:9")
MEASURING = [verb.name for verb in VERBS if verb.name != "leaderboard"]


def command(*args: str) -> tuple[int, str]:
    """A bench command in this process: its status and what it says."""
    done = CliRunner().invoke(bench, list(args))
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, done.output


def finished(path: Path, verb: str, rows: list[dict[str, Any]]) -> bytes:
    """A finished record, as its file's bytes."""
    save(BenchRun(verb, rows=rows, complete=True), path)
    return path.read_bytes()


@pytest.mark.parametrize("verb", MEASURING)
def test_a_finished_record_is_not_overwritten(verb: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    before = finished(path, verb, [{"server": "plain"}] * 4)
    asked = (str(path),) if verb == "cost-model" else NOBODY
    code, said = command(verb, *asked, "--output-file", str(path))
    assert code == 2 and path.read_bytes() == before
    assert f"found {path}, expected no measurements there" in said
    assert "fix: name another --output-file" in said
    # This run measured nothing, so it claims nothing.
    assert "what was measured" not in said
    assert ("or go on with it by --resume" in said) == (
        verb in ("accept", "memory", "sweep")
    )


def test_what_may_be_replaced(tmp_path: Path) -> None:
    path, beside = tmp_path / "run.json", tmp_path / "run.plain.jsonl"
    assert Output(path).earlier() is None
    finished(path, "accept", [])
    assert Output(path, [beside]).earlier() is None, "a record without a row"
    beside.write_text("{}\n")
    with pytest.raises(WouldBeLost, match=r"run\.plain\.jsonl"):
        Output(path, [beside]).earlier()
    path.unlink()
    for resume in (False, True, None):
        with pytest.raises(WouldBeLost) as told:
            Output(path, [beside], resume).earlier()
        assert "--resume" not in str(told.value), "there is nothing to go on with"
    beside.unlink()
    path.write_text("my thesis")
    with pytest.raises(WouldBeLost):
        Output(path).earlier()
    with pytest.raises(RunError, match="found no JSON"):
        Output(path, resume=True).earlier()
    assert path.read_text() == "my thesis"


def test_a_record_is_claimed_once_there_is_a_row(tmp_path: Path) -> None:
    output = Output(tmp_path / "run.json")
    assert output.held() is None
    recorder = output.record(BenchRun("accept"))
    assert output.held() is None
    recorder.add({"server": "a", "n": 1})
    assert output.held() == tmp_path / "run.json"
    recorder.add({"server": "b", "n": 2}, "server")
    recorder.add({"server": "a", "n": 3}, "server")
    assert [row["n"] for row in load(output.path).rows] == [2, 3]


def accept(path: Path, server: BenchServer, *args: str, **more: Any) -> Any:
    data = write_ids(path / "own.jsonl", [[i + 1, 2, 3] for i in range(60)])
    words = ("--dataset", "own", "--dataset-path", f"own={data}", "--concurrency", "1")
    words += ("--num-prompts", "50", "--max-new-tokens", "16")
    words += ("--output-file", "run.json")
    code, _, err = against({"plain": server}, "accept", *words, *args, cwd=path, **more)
    return code, err, record(path / "run.json")["rows"]


def test_a_resumed_run_that_is_stopped_keeps_the_cut_off_row(tmp_path: Path) -> None:
    slow = BenchServer(speculative=False, step_s=0.05)
    code, _, cut = accept(tmp_path, slow, stop_when=lambda: slow.requests >= 4)
    assert code == 130 and cut[0]["partial"] and cut[0]["requests"] >= 1
    stuck = BenchServer(speculative=False, lies=Lies({"hang"}))
    code, err, rows = accept(
        tmp_path, stuck, "--resume", stop_when=lambda: stuck.requests >= 1
    )
    assert code == 130 and rows == cut, "measured before, and still there"
    # Whether it had read the record by then is a race; what is in it is not.
    assert "interrupted" in err
    code, err, rows = accept(tmp_path, BenchServer(speculative=False), "--resume")
    assert code == 0, err
    (row,) = rows
    assert (row["requests"], row["partial"]) == (50, False)


def test_memory_measured_anew_keeps_the_old_until_then(tmp_path: Path) -> None:
    usage = {"weight": 50.25, "kvcache": 40.0, "graph": {}, "token_capacity": 1000}
    good = {"internal_states": [{"memory_usage": usage}]}
    words = ("memory", "--output-file", "run.json", "--resume")

    def measured(info: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        server = BenchServer(speculative=False, info=info)
        code, _, _ = against({"plain": server}, *words, cwd=tmp_path)
        return code, record(tmp_path / "run.json")

    code, first = measured(good)
    assert code == 0 and first["complete"]
    code, second = measured({"internal_states": [{}], "dtype": "float16"})
    assert code == 2 and not second["complete"]
    assert second["rows"] == first["rows"]
    (server,) = second["provenance"]["servers"]
    assert server["fields"].get("dtype") != "float16", "the set-up of what is measured"
    code, third = measured({**good, "dtype": "float16"})
    (server,) = third["provenance"]["servers"]
    assert code == 0 and len(third["rows"]) == 1
    assert server["fields"]["dtype"] == "float16"


def test_a_round_that_is_cut_off_keeps_its_answers(tmp_path: Path) -> None:
    def in_round(asked: dict[str, Any], _: Any = None) -> bool:
        # The warm-up asks for fewer tokens.
        return asked["sampling_params"]["max_new_tokens"] == 20

    stuck = Lies({"hang"}, when=in_round)
    spec = BenchServer(lies=stuck)
    servers = {"plain": BenchServer(speculative=False), "spec": spec}
    words = ("--prompt-lengths", "16", "--rounds", "3", "--max-new-tokens", "20")
    code, _, err = against(
        servers,
        "decode-table",
        *words,
        *("--output-file", "run.json"),
        cwd=tmp_path,
        stop_when=lambda: any(map(in_round, spec.calls)),
    )
    assert code == 130 and "what was measured is in run.json" in err
    (row,) = record(tmp_path / "run.json")["rows"]
    assert (row["server"], row["rounds"]) == ("plain", 1)


def test_a_foreign_run_log_is_not_claimed(tmp_path: Path) -> None:
    csv = tmp_path / "taxes.csv"
    csv.write_text("year,paid\n2025,no\n")
    code, said = command("leaderboard", *NOBODY, "--csv", str(csv))
    assert code == 2 and "found no run log of this release" in said
    assert "what was measured" not in said
    assert csv.read_text() == "year,paid\n2025,no\n"


def test_a_run_log_and_its_record_stay_apart(tmp_path: Path) -> None:
    csv, path = tmp_path / "lb.csv", tmp_path / "lb.json"
    code, said = command("leaderboard", *NOBODY, "--csv", str(path))
    assert code == 2 and "found --output-file and --csv both" in said
    assert not path.exists()
    for verb in ("leaderboard", "accept"):
        row = {"configuration": "mtp", "draft_length": 3, "runs": 2}
        before = finished(path, verb, [row])
        code, said = command("leaderboard", *NOBODY, "--csv", str(csv))
        assert code == 2 and path.read_bytes() == before
        assert f"found a record of {verb} with measurements" in said
        assert "what was measured" not in said


def test_pages_replace_no_record(tmp_path: Path) -> None:
    path, page = tmp_path / "run.json", tmp_path / "page.md"
    before = finished(path, "accept", [{"server": "plain"}])
    for option in ("--html", "--markdown"):
        code, said = command("report", str(path), option, str(path))
        assert code == 2 and f"found {option} and {path} both {path}" in said
    other = tmp_path / "other.json"
    for verb in ("accept", "decode-table", "quality", "memory", "sweep"):
        words = ("--output-file", str(other), "--markdown", str(path))
        code, said = command(verb, *NOBODY, *words)
        assert code == 2 and f"--markdown {path}, which holds measurements" in said
    assert path.read_bytes() == before
    page.write_text("# an older page\n")
    check_pages({"--markdown": page}, {"--output-file": path})
    with pytest.raises(WouldBeLost, match="found --html and --markdown both"):
        check_pages({"--markdown": page, "--html": page}, {})


@pytest.mark.parametrize("option", ["--html", "--json", "--submit-row"])
def test_a_verifier_report_does_not_replace_its_record(
    option: str, tmp_path: Path
) -> None:
    import typer

    app = typer.Typer()
    app.command()(report)
    path, other = tmp_path / "run.jsonl", tmp_path / "other.jsonl"
    for file in (path, other):
        with verify_record.Writer(file) as writer:
            writer.header({"format": verify_record.FORMAT})
    for target in (path, other):
        before = target.read_bytes()
        done = CliRunner().invoke(app, [str(path), option, str(target)])
        assert done.exit_code == 2 and "expected a file of its own" in done.output
        assert target.read_bytes() == before


@pytest.mark.parametrize("name", ["record", "log", "answers"])
def test_what_is_known_as_measured(name: str, tmp_path: Path) -> None:
    """The beginnings that `holds_measurements` knows are those that are written."""
    path = tmp_path / name
    if name == "record":
        finished(path, "accept", [])
    elif name == "log":
        path.write_text(",".join(Line._fields) + "\n")
    else:
        path.write_text('{"dataset":"own","request":"1"}\n')
    with pytest.raises(WouldBeLost, match="which holds measurements"):
        check_pages({"--html": path}, {})
    path.write_text("<!doctype html>")
    check_pages({"--html": path}, {})


def test_an_unreachable_server_is_told_once() -> None:
    from sglang_exact.client.http import Failed
    from sglang_exact.verify.servers import Address, connect

    async def go() -> str:
        from contextlib import AsyncExitStack

        same = [Address(role, "http://127.0.0.1:9") for role in ("tested", "reference")]
        other = Address("width", "http://127.0.0.1:10")
        async with AsyncExitStack() as stack:
            with pytest.raises(Failed) as told:
                await connect(stack, [*same, other], timeout=5, vocab_size=None)
        return str(told.value)

    said = asyncio.run(go())
    assert said.count("127.0.0.1:9:") == 1, said
    assert said.startswith("tested and reference server http://127.0.0.1:9:")
    assert "; width server http://127.0.0.1:10:" in said


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    """Replaced by a file it would be gone, /dev/full for the whole machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(pipe, b"text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert pipe.is_fifo()
    write_atomic(tmp_path / "file", b"text")
    assert (tmp_path / "file").read_bytes() == b"text"
