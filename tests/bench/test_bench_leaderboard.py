# SPDX-License-Identifier: Apache-2.0
"""The leaderboard: every run on disk, going on after an interruption, launching."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from bench_runs import against, call, record
from bench_server import BenchServer
from fake_server import Lies

from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.leaderboard import launch
from sglang_exact.bench.leaderboard import measure as leaderboard
from sglang_exact.bench.leaderboard import tables as leaderboard_table
from sglang_exact.bench.leaderboard.run_log import Line, RunLog
from sglang_exact.bench.run import BenchRun
from sglang_exact.bench.servers import Address
from sglang_exact.view import files as plotting

PROGRAM = Path(__file__).with_name("launched_server.py")
SMALL = ("--runs", "2", "--max-new-tokens", "24", "--csv", "lb.csv")
PNG = b"\x89PNG\r\n\x1a\n"


def line(**more: Any) -> Line:
    base = Line(
        "2026-11-29T00:00:00+00:00",
        "dflash2",
        7,
        1,
        100,
        2.0,
        50.0,
        0.1,
        52.1,
        25,
        4.0,
        3.0,
        "a" * 64,
        "b" * 32,
        "c" * 16,
    )
    return base._replace(**more)


def test_a_line_reads_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lb.csv"
    log = RunLog(path)
    first = line(tok_s=1 / 3)
    second = line(
        configuration="plain, old",
        draft_length=0,
        verify=None,
        acceptance_length=None,
        accepted_per_verify=None,
        ttft_s=None,
    )
    log.append(first)
    log.append(second)
    assert RunLog(path).lines == [first, second]
    assert log.done("dflash2", 7) == {1} and log.done("dflash2", 6) == set()


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "lb.csv"
    log = RunLog(path)
    log.append(line())
    whole = path.read_bytes()
    log.append(line(run=2))
    path.write_bytes(path.read_bytes()[:-9])
    again = RunLog(path)
    assert again.lines == [line()] and path.read_bytes() == whole
    again.append(line(run=2))
    assert RunLog(path).lines == [line(), line(run=2)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a,b\n1,2\n", "found no run log"),
        ("no newline at all", "found no run log"),
        (",".join(Line._fields) + "\n1,2\n", "line 2: found 2 cells"),
        (
            ",".join(Line._fields) + "\n" + "x," * 14 + "x\n",
            r"line 2: \[2\]: found str, expected int",
        ),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "lb.csv"
    path.write_text(text)
    with pytest.raises(CannotRun, match=found):
        RunLog(path)
    assert path.read_text() == text, "nothing of somebody else's file is touched"


def test_runs_of_another_prompt_are_refused(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "lb.csv")
    log.append(line())
    log.check("b" * 32)
    with pytest.raises(CannotRun, match="found 1 runs of another prompt"):
        log.check("d" * 32)


def test_rows_of_a_leaderboard() -> None:
    lines = [
        line(configuration="plain", draft_length=0, tok_s=10.0, verify=None),
        line(configuration="plain", draft_length=0, run=2, tok_s=30.0, verify=None),
        line(tok_s=40.0),
        line(run=2, tok_s=60.0, ids_sha256="d" * 64),
        line(draft_length=3, tok_s=45.0),
    ]
    rows, exact = leaderboard_table.summarize(lines, "plain")
    assert [(r["configuration"], r["draft_length"]) for r in rows] == [
        ("plain", 0),
        ("dflash2", 3),
        ("dflash2", 7),
    ]
    seven = rows[2]
    assert seven["tok_s"] == {
        "n": 2,
        "median": 50.0,
        "mean": 50.0,
        "low": 40.0,
        "high": 60.0,
    }
    assert seven["speed_up"] == 2.5 and seven["distinct_answers"] == 2
    found = seven["exactness"]
    assert (found["compared"], found["ids_equal"]) == (2, 1)
    assert found["first_difference"] == {"request": "2"}
    counts = [exact[name] for name in ("compared", "ids_equal", "plain_answers")]
    assert counts == [3, 2, 1]
    top = leaderboard_table.best(rows)
    assert [(r["configuration"], r["draft_length"]) for r in top] == [
        ("dflash2", 7),
        ("plain", 0),
    ]


def test_a_plain_server_that_differs_from_itself_is_no_reference() -> None:
    lines = [
        line(configuration="plain", draft_length=0),
        line(configuration="plain", draft_length=0, run=2, ids_sha256="d" * 64),
        line(),
    ]
    rows, exact = leaderboard_table.summarize(lines, "plain")
    assert exact["plain_answers"] == 2 and exact["compared"] == 0
    assert all(row["exactness"]["compared"] == 0 for row in rows)


def test_targets() -> None:
    addresses = [Address("dflash2@a", "http://h:1"), Address("plain", "http://h:2")]
    templates = [launch.Template("mtp", "serve {port} {draft_tokens}")]
    found = leaderboard.targets(addresses, templates, [1, 2], "plain")
    assert [(t.configuration, t.length) for t in found] == [
        ("plain", 0),
        ("dflash2", None),
        ("mtp", 1),
        ("mtp", 2),
    ]


def test_templates() -> None:
    (found,) = launch.parse(["a=X=1 serve {port} {draft_length} {draft_tokens}"], "p")
    assert found.words(7, 123) == ["X=1", "serve", "123", "7", "8"]
    assert launch.parse(["p=serve {port}"], "p")[0].words(0, 5) == ["serve", "5"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("serve", "no NAME=COMMAND"),
        ("a=serve {draft_tokens}", "no {port}"),
        ("a=serve {port}", "no {draft_tokens}"),
        ("a=serve {port} {draft_tokens} {other}", "unknown fields other"),
        ("a=serve {port} {draft_tokens", "not a command line"),
        ("a=serve '{port} {draft_tokens}", "not a command line"),
    ],
)
def test_bad_templates_are_refused(text: str, found: str) -> None:
    with pytest.raises(CannotRun) as error:
        launch.parse([text], "plain")
    assert found in str(error.value) and "expected NAME=COMMAND" in str(error.value)


def test_running_servers(tmp_path: Path) -> None:
    servers = {
        "plain": BenchServer(speculative=False),
        "dflash2@3": BenchServer(width=4),
        "dflash2@1": BenchServer(width=2),
        "stock": BenchServer(lies=Lies({"wrong-token"})),
    }
    plot = ("--plot", "lb.png", "--markdown", "lb.md")
    code, out, err = against(servers, "leaderboard", *SMALL, *plot, cwd=tmp_path)
    assert code == 0, err
    run = record(tmp_path / "lb.json")
    found = [(r["configuration"], r["draft_length"], r["runs"]) for r in run["rows"]]
    assert found == [("plain", 0, 2), ("dflash2", 1, 2), ("dflash2", 3, 2)] + [
        ("stock", 3, 2)
    ]
    equal = [row["exactness"]["ids_equal"] for row in run["rows"]]
    # Of two plain runs one is the reference.
    assert equal == [1, 2, 2, 0]
    assert run["complete"] and run["exactness"]["compared"] == 6
    assert "ids equal 2/2" in out and "ids equal 0/2" in out
    assert "Best mean per configuration" in (tmp_path / "lb.md").read_text()
    assert (tmp_path / "lb.png").read_bytes().startswith(PNG)
    lines = RunLog(tmp_path / "lb.csv").lines
    assert len(lines) == 8 and all(one.tokens == 24 for one in lines)
    drafted = [one for one in lines if one.verify]
    assert len(drafted) == 6 and all(one.acceptance_length for one in drafted)
    assert "found no matplotlib" not in err


def test_a_record_is_gone_on_with(tmp_path: Path) -> None:
    def servers() -> dict[str, BenchServer]:
        return {"plain": BenchServer(speculative=False), "spec": BenchServer()}

    code, *_ = against(servers(), "leaderboard", *SMALL, cwd=tmp_path)
    first = record(tmp_path / "lb.json")
    before = (tmp_path / "lb.csv").read_bytes()
    more = ("--runs", "3", *SMALL[2:])
    second = servers()
    code, _, err = against(second, "leaderboard", *more, cwd=tmp_path)
    assert code == 0, err
    after = (tmp_path / "lb.csv").read_bytes()
    assert after.startswith(before) and len(RunLog(tmp_path / "lb.csv").lines) == 6
    run = record(tmp_path / "lb.json")
    assert run["created"] == first["created"] and run["settings"]["runs"] == 3
    # The prompt's ids, a warm-up and one run each.
    timed = [c for c in second["spec"].calls if c.get("stream")]
    assert len(timed) == 2
    other = ("--prompt", "chat-cat-tetris-thinking", *SMALL)
    code, _, err = against(servers(), "leaderboard", *other, cwd=tmp_path)
    assert code == 2 and "found 6 runs of another prompt" in err
    assert (tmp_path / "lb.csv").read_bytes() == after


def test_without_matplotlib_the_numbers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = BenchRun("leaderboard")
    monkeypatch.setattr(plotting, "available", lambda: False)
    with pytest.raises(plotting.NoPlot, match="fix: pip install matplotlib"):
        leaderboard_table.plot(run, tmp_path / "lb.png")
    monkeypatch.undo()
    with pytest.raises(plotting.NoPlot, match=r"found the plot file lb.bmp"):
        leaderboard_table.plot(run, tmp_path / "lb.bmp")


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot_is_an_image(tmp_path: Path, suffix: str) -> None:
    lines = [
        line(draft_length=n, tok_s=40.0 + n, configuration=name)
        for n in range(1, 16)
        for name in ("dflash2", "mtp")
    ]
    lines.append(line(configuration="plain", draft_length=0))
    rows, _ = leaderboard_table.summarize(lines, "plain")
    path = tmp_path / f"lb{suffix}"
    leaderboard_table.plot(BenchRun("leaderboard", rows=rows), path)
    raw = path.read_bytes()
    assert raw.startswith(PNG) if suffix == ".png" else b"</svg>" in raw


def run_board(path: Path, *args: str, **more: Any) -> tuple[int, str, str]:
    async def go() -> tuple[int, str, str]:
        return await call("leaderboard", *SMALL, *args, cwd=path, **more)

    return asyncio.run(go())


def launching(name: str, lie: str = "", tokens: str = "{draft_tokens}") -> str:
    return f"{name}={sys.executable} {PROGRAM} {{port}} {tokens} {lie}"


def started(path: Path) -> list[int]:
    """Process ids of the servers that came up."""
    return [int(p.name.removeprefix("up-")) for p in path.glob("up-*")]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().split(")")[1].split()[0] == "Z")


def test_a_server_for_every_draft_length(tmp_path: Path) -> None:
    options = (
        *("--launch", launching("plain", tokens="1")),
        *("--launch", launching("dflash2"), "--draft-lengths", "1-3"),
    )
    code, out, err = run_board(tmp_path, *options)
    assert code == 0, err
    run = record(tmp_path / "lb.json")
    found = [(r["configuration"], r["draft_length"]) for r in run["rows"]]
    assert found == [("plain", 0), *(("dflash2", n) for n in (1, 2, 3))]
    assert [r["exactness"]["ids_equal"] for r in run["rows"]] == [1, 2, 2, 2]
    pids = started(tmp_path)
    assert len(pids) == 4 and not any(alive(pid) for pid in pids)
    # Nothing is left to run, so nothing is started.
    code, again, err = run_board(tmp_path, *options)
    assert code == 0 and started(tmp_path) == pids, err
    assert again.splitlines()[:4] == out.splitlines()[:4]
    assert "all runs are in lb.csv" in err


def test_one_that_does_not_start_does_not_stop_the_others(tmp_path: Path) -> None:
    code, _, err = run_board(
        tmp_path,
        *("--launch", launching("plain", tokens="1")),
        *("--launch", launching("broken", "dies"), "--draft-lengths", "2"),
        *("--launch", launching("wrong", "other-width")),
        *("--launch", launching("good")),
    )
    assert code == 2
    assert "server broken: it ended with status 1" in err
    assert "out of memory with 3 draft tokens" in err, "the end of its log"
    assert "found 8 drafts per verify step, expected 2" in err
    run = record(tmp_path / "lb.json")
    assert not run["complete"]
    found = [(r["configuration"], r["runs"]) for r in run["rows"]]
    assert found == [("plain", 2), ("good", 2)]


def test_an_interrupted_board_goes_on(tmp_path: Path) -> None:
    options = ("--launch", launching("dflash2"), "--draft-lengths", "1-2")
    csv = tmp_path / "lb.csv"

    def two_runs() -> bool:
        return csv.exists() and csv.read_bytes().count(b"\n") >= 3

    slow = ("--runs", "40", *SMALL[2:], *options)

    async def go() -> tuple[int, str, str]:
        return await call(
            "leaderboard", *slow, cwd=tmp_path, stop_when=two_runs, STEP_S="0.02"
        )

    code, _, err = asyncio.run(go())
    assert code == 130 and "interrupted; what was measured is in lb.csv" in err
    kept = RunLog(csv).lines
    assert 2 <= len(kept) < 40
    (row,) = record(tmp_path / "lb.json")["rows"]
    assert row["runs"] == len(kept)
    until = time.monotonic() + 20
    while any(alive(pid) for pid in started(tmp_path)):
        assert time.monotonic() < until, "a server was left behind"
        time.sleep(0.05)
    code, _, err = run_board(tmp_path, *options)
    assert code == 0, err
    lines = RunLog(csv).lines
    assert lines[: len(kept)] == kept
    assert {one.run for one in lines if one.draft_length == 2} == {1, 2}


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ((), "found nothing to measure"),
        (("--draft-lengths", "0-3"), "found --draft-lengths '0-3'"),
        (("--prompt", "nope"), "found --prompt 'nope'"),
        (("--prompt-file", "none.txt"), "none.txt: cannot be read as a prompt"),
    ],
)
def test_what_cannot_run(tmp_path: Path, args: tuple[str, ...], found: str) -> None:
    servers = {} if not args else {"spec": BenchServer()}
    code, _, err = against(servers, "leaderboard", *SMALL, *args, cwd=tmp_path)
    assert code == 2 and found in err, err
