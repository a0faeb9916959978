# SPDX-License-Identifier: Apache-2.0
"""Attempts to get figures into tables that are not what they say, with controls."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import bench_records as records
import pytest
from aiohttp import web
from bench_runs import against, record, write_ids
from bench_server import BenchServer
from fake_server import Lies

from sglang_exact.bench import exactness, provenance, run, stats
from sglang_exact.bench.accept import tables as accept_table
from sglang_exact.bench.drive import CannotRun, shorter
from sglang_exact.bench.leaderboard import measure as leaderboard
from sglang_exact.bench.leaderboard.run_log import RunLog
from sglang_exact.bench.quality import tables as quality_table
from sglang_exact.bench.run import BenchRun, RunError
from sglang_exact.client import http
from sglang_exact.client.answer import (
    STREAMED,
    Answer,
    Counters,
    Request,
    Sample,
)
from sglang_exact.client.http import Client

GPU = {"name": "NVIDIA H200", "driver_version": "580.1"}
OTHER_GPU = {"name": "NVIDIA L40S", "driver_version": "580.1"}


def plain(**more: Any) -> BenchServer:
    return BenchServer(speculative=False, **more)


def accept(path: Path, found: dict[str, BenchServer], *args: str) -> Any:
    data = write_ids(path / "own.jsonl", [[i + 1, 2, 3] for i in range(4)])
    code, out, err = against(
        found, "accept", "--dataset", "own", "--dataset-path", f"own={data}",
        "--num-prompts", "3", "--concurrency", "1", "--max-new-tokens", "12",
        "--output-file", "run.json", *args, cwd=path,
    )  # fmt: skip
    kept = path / "run.json"
    return code, out, err, record(kept) if kept.exists() else None


def kept(gpu: dict[str, str], **more: Any) -> BenchRun:
    """A record of one server `spec`, measured on `gpu`."""
    made = BenchRun("accept", settings={"concurrency": [1]}, rows=[{"server": "spec"}])
    server = records.server("spec", **more)
    server["speculative"] = {"speculative_num_draft_tokens": more.get("width", 8)}
    made.provenance = {"servers": [server], "gpu": [gpu] if gpu else []}
    return made


def test_no_ratio_between_two_machines() -> None:
    path = Path("run.json")
    with pytest.raises(RunError, match=r"another machine .*H200.*L40S"):
        run.resume(kept(GPU), kept(OTHER_GPU), path)
    newer = {**GPU, "driver_version": "590"}
    with pytest.raises(RunError, match="another machine"):
        run.resume(kept(GPU), kept(newer), path)
    # Control: the same machine, and one whose GPUs the client cannot see.
    assert run.resume(kept(GPU), kept(GPU), path).rows
    later = run.resume(kept(GPU), kept({}), path)
    assert later.provenance["gpu"] == [GPU], "where the rows were measured stays known"


def test_one_name_is_one_set_up() -> None:
    path = Path("run.json")
    for change in ({"width": 16}, {"dtype": "float16"}, {"exact": {"version": "0.2"}}):
        with pytest.raises(RunError, match=r"another server spec \(.* before, .* now"):
            run.resume(kept(GPU), kept(GPU, **change), path)
    # Control: what a plain restart changes, and a server that has no rows yet.
    assert run.resume(kept(GPU), kept(GPU, random_seed=7), path).rows
    empty = kept(GPU)
    empty.rows = []
    assert run.resume(empty, kept(GPU, width=16), path).rows == []


def test_servers_of_one_run_on_two_gpus_are_said() -> None:
    for other, said in (("NVIDIA L40S", True), ("NVIDIA H200", False)):
        made = records.accept()
        exact = {"version": "0.1.0", "gpu": "NVIDIA H200"}
        made.provenance["servers"] = [
            records.server("plain", exact=exact),
            records.server("spec", exact={}, accelerator=other),
        ]
        below = " ".join(accept_table.tables(made)[0].below)
        assert ("GPU differs between the servers" in below) is said


def test_a_base_that_speculates_in_silence(tmp_path: Path) -> None:
    silent = {"plain": BenchServer(lies=Lies({"no-info"}))}
    code, _, err, run_ = accept(tmp_path, silent)
    assert code == 2 and "found spec_verify_ct in its answers" in err
    assert run_["rows"] == [] and not run_["complete"]
    # Control: a silent one that does not is measured, and that it is silent is said.
    code, out, err, run_ = accept(tmp_path, {"plain": plain(lies=Lies({"no-info"}))})
    assert code == 0 and len(run_["rows"]) == 1, err
    assert "the set-up of this server is not known" in out


def test_failed_requests_do_not_go_away(tmp_path: Path) -> None:
    lies = Lies({"error-500"}, when=lambda body, state: body["input_ids"][0] == 3)
    code, _, _, run_ = accept(tmp_path, {"plain": plain(lies=lies)})
    assert code == 2 and run_["rows"][0]["failed"] == 1
    code, _, err, run_ = accept(tmp_path, {"plain": plain()}, "--resume")
    assert code == 2 and "1 requests failed in an earlier call" in err
    assert run_["rows"][0]["failed"] == 1 and not run_["complete"]
    # Control: a call of its own is whole.
    code, _, err, run_ = accept(tmp_path, {"plain": plain()})
    assert code == 0 and run_["complete"], err


def test_prompts_that_are_asked_twice_are_said(tmp_path: Path) -> None:
    _, out, _, _ = accept(tmp_path, {"plain": plain()})
    assert "it starts over" not in out
    _, out, _, _ = accept(tmp_path, {"plain": plain()}, "--num-prompts", "9")
    assert "10 prompts are asked at 1 in flight, the set has 4: it starts over" in out


def test_what_was_not_compared_is_not_equal() -> None:
    tally = exactness.Tally()
    sample = Sample((1, 2))
    tally.add("a", sample, sample)
    assert tally.text() == "ids equal 1/1"
    tally.add("b", sample, None)
    assert tally.text() == "ids equal 1/1, 1 not compared"


def test_acceptance_of_some_answers_says_so() -> None:
    made = records.accept()
    whole = accept_table.tables(made)[1].rows[0]
    assert "5.50 (5.30)" in whole
    made.rows[1]["acceptance"]["requests"] = 5
    assert "5.50 (5.30), of 5 of 8 answers" in accept_table.tables(made)[1].rows[0]


def counted(tokens: int, verify: int, **more: int) -> Sample:
    return Sample((1,) * tokens, counters=Counters(verify=verify, **more))


def test_counters_that_contradict_the_tokens_are_no_acceptance(tmp_path: Path) -> None:
    right = counted(9, 2, correct=6, proposed=6)
    for wrong in (counted(9, 1, correct=6, proposed=6), counted(9, 2, proposed=4)):
        assert not stats.consistent(wrong)
        found = stats.acceptance([right, wrong])
        assert found is not None and (found.requests, found.macro) == (1, 4.5)
    # Control: a last block that was cut off, and no counters.
    assert stats.consistent(counted(8, 2, correct=6, proposed=6))
    assert stats.consistent(Sample((1, 2, 3)))
    lying = {"plain": plain(), "spec": BenchServer(lies=Lies({"false-counters"}))}
    _, out, _, run_ = accept(tmp_path, lying, "--ignore-eos")
    assert run_["rows"][1]["acceptance"] is None and "12.00" not in out
    assert "the counters of 3 of 3 answers contradict" in out
    code, _, err, run_ = board(tmp_path, lying)
    assert code == 2 and "contradict" in err and len(run_["rows"]) == 1


def test_a_server_that_is_lost_costs_itself_alone(tmp_path: Path) -> None:
    broken = BenchServer(lies=Lies({"error-500"}))
    found = {"plain": plain(), "broken": broken, "spec": BenchServer()}
    code, out, err, run_ = accept(tmp_path, found, "--concurrency", "1,2")
    assert code == 2 and not run_["complete"]
    rows = [(row["server"], row["concurrency"]) for row in run_["rows"]]
    assert rows == [("plain", 1), ("spec", 1), ("plain", 2), ("spec", 2)]
    assert "own, 2 in flight, broken: left out" in err
    # Control: without the plain server there is nothing to go on with.
    found = {"plain": plain(lies=Lies({"error-500"})), "spec": BenchServer()}
    code, _, _, run_ = accept(tmp_path, found)
    assert code == 2 and run_["rows"] == []


def ask(server: Any, work: Any) -> Any:
    async def go() -> Any:
        async with server, Client(server.url, timeout=5) as client:
            return await work(client)

    return asyncio.run(go())


def test_a_redirect_is_not_another_server() -> None:
    class Moved(BenchServer):
        target = ""

        async def generate(self, request: web.Request) -> web.StreamResponse:
            if self.target:
                raise web.HTTPTemporaryRedirect(f"{self.target}/generate")
            return await super().generate(request)

    async def go(follow: bool) -> tuple[Answer, int]:
        other, moved = BenchServer(), Moved()
        async with other, moved, Client(moved.url) as client:
            moved.target = other.url if follow else ""
            answer = await client.ask(Request("r", 4, ids=(1, 2)))
            return answer, len(other.calls)

    answer, asked = asyncio.run(go(follow=True))
    assert answer.sample is None and "redirects to" in answer.error and asked == 0
    assert asyncio.run(go(follow=False))[0].sample is not None


def test_a_line_without_end_is_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_exact.client.http.READ_BUFFER", 512)
    long = Request("r", 4000, ids=(1, 2), ignore_eos=True)
    answer = ask(BenchServer(), lambda c: c.ask(long, STREAMED))
    assert answer.sample is None and "LineTooLong" in answer.error
    short = Request("r", 4, ids=(1, 2), ignore_eos=True)
    assert ask(BenchServer(), lambda c: c.ask(short, STREAMED)).sample


def test_a_stream_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("r", 8, ids=(1, 2), ignore_eos=True)
    assert ask(BenchServer(), lambda c: c.ask(request, STREAMED)).sample
    monkeypatch.setattr(http, "MAX_STREAM", 100)
    answer = ask(BenchServer(), lambda c: c.ask(request, STREAMED))
    assert answer.sample is None and "longer than 100 bytes" in answer.error


def test_no_time_to_a_first_token_without_one() -> None:
    request = Request("r", 8, ids=(1, 2), ignore_eos=True)
    whole = BenchServer(lies=Lies({"one-piece"}))
    answer = ask(whole, lambda c: c.ask(request, STREAMED))
    assert answer.sample is not None and answer.sample.ttft_s is None
    answer = ask(BenchServer(), lambda c: c.ask(request, STREAMED))
    assert answer.sample.ttft_s is not None and answer.sample.decode_tok_s is not None


def test_a_short_answer_has_another_length() -> None:
    answer = Answer("r", Sample((1, 2, 3)))
    assert shorter(answer, 3) == ""
    assert "found 3 tokens, expected 4" in shorter(answer, 4)


def board(path: Path, found: dict[str, BenchServer], *args: str) -> Any:
    code, out, err = against(
        found, "leaderboard", "--runs", "2", "--max-new-tokens", "12", "--csv",
        "lb.csv", *args, cwd=path,
    )  # fmt: skip
    return code, out, err, record(path / "lb.json")


def test_short_runs_are_no_runs(tmp_path: Path) -> None:
    found = {"plain": plain(), "spec": BenchServer(lies=Lies({"short"}))}
    code, out, err, run_ = board(tmp_path, found)
    assert code == 2 and "spec, run 1: found 11 tokens, expected 12" in err
    assert [row["configuration"] for row in run_["rows"]] == ["plain"]
    # A later call that goes well does not forget it.
    code, out, err, run_ = board(tmp_path, {"plain": plain(), "spec": BenchServer()})
    assert code == 0 and len(run_["rows"]) == 2, err
    assert "failed: spec, run 1: found 11 tokens" in out


def test_one_configuration_is_one_set_up(tmp_path: Path) -> None:
    other = BenchServer(width=2, info={"dtype": "float16"})
    found = {"plain": plain(), "spec@3": BenchServer(width=4), "spec@1": other}
    code, _, err, run_ = board(tmp_path, found)
    assert code == 2 and "another set-up than in earlier runs of spec (dtype" in err
    lengths = [(row["configuration"], row["draft_length"]) for row in run_["rows"]]
    assert lengths == [("plain", 0), ("spec", 3)]
    # Control: a draft length alone makes no other set-up.
    found = {"plain": plain(), "spec@1": BenchServer(width=2)}
    code, _, err, run_ = board(tmp_path, found)
    assert code == 0 and len(run_["rows"]) == 3, err


def test_the_reference_is_not_compared_with_itself(tmp_path: Path) -> None:
    code, out, err, run_ = board(tmp_path, {"plain": plain()}, "--runs", "1")
    assert code == 0 and run_["rows"][0]["exactness"]["compared"] == 0, err
    assert "reference" in out and "ids equal" not in out
    _, out, _, _ = board(tmp_path, {"plain": plain()})
    assert "ids equal 1/1" in out


def test_runs_of_another_gpu_are_refused(tmp_path: Path) -> None:
    plan, here = leaderboard.Plan(), provenance.machine({"gpu": [GPU]})
    there = provenance.machine({"gpu": [OTHER_GPU]})
    assert here and plan.setup((1, 2), here) != plan.setup((1, 2), there)
    log = RunLog(tmp_path / "runs.csv")
    line = leaderboard._line("plain", 0, 1, Sample((1,), latency_s=1.0))
    log.append(line._replace(setup_sha256=plan.setup((1, 2), here)))
    log.check(plan.setup((1, 2), here))
    with pytest.raises(CannotRun, match="another GPU"):
        log.check(plan.setup((1, 2), there))


def test_a_warm_cache_shows_beside_the_time(tmp_path: Path) -> None:
    args = ("decode-table", "--prompt-lengths", "40", "--rounds", "2")
    args = (*args, "--max-new-tokens", "6", "--output-file", "d.json")
    _, out, _ = against({"plain": plain()}, *args, cwd=tmp_path)
    assert "came from the prefix cache" not in out
    _, out, _ = against({"plain": plain()}, *args, "--no-flush", cwd=tmp_path)
    assert "up to 39 prompt tokens came from the prefix cache" in out


def test_a_cache_that_was_not_emptied_is_said(tmp_path: Path) -> None:
    class Busy(BenchServer):
        async def flush(self, request: web.Request) -> web.Response:
            return web.json_response({"error": "requests run"}, status=400)

    _, out, _, run_ = accept(tmp_path, {"plain": Busy(speculative=False)})
    assert "the prefix cache was not emptied (400: requests run)" in out
    assert not run_["rows"][0]["cache_flushed"]
    _, out, _, _ = accept(tmp_path, {"plain": BenchServer(speculative=False)})
    assert "the prefix cache was not emptied" not in out


def graded(server: str, **states: str) -> list[dict[str, Any]]:
    return [
        {"server": server, "problem": p, "subject": "N", "state": s}
        for p, s in states.items()
    ]


def test_scores_are_of_what_was_graded() -> None:
    rows = graded("plain", a="correct", b="wrong", c="correct", d="correct")
    rows += graded("spec", a="correct", b="correct", c="not graded")
    line = quality_table.by_subject(rows)[-1]
    assert quality_table._score(line, "plain") == "3 (75 %)"
    assert quality_table._score(line, "spec") == "2 (100 % of 2 graded)"
    # 2 of 2 against 3 of 4 is no loss: over what both answered it is a gain.
    assert quality_table._gap(line, "spec") == "+1 over 2"
    again = graded("spec", a="wrong", b="wrong", c="correct", d="correct")
    full = quality_table.by_subject([*rows[:4], *again])[-1]
    assert quality_table._gap(full, "spec") == "-1"
    none = quality_table.by_subject([*rows[:4], *graded("spec", a="not graded")])[-1]
    assert quality_table._score(none, "spec") == "- (none graded)"
    assert quality_table._gap(none, "spec") == "-"
