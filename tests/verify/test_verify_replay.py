# SPDX-License-Identifier: Apache-2.0
"""Records that were cut, edited, interrupted or are of something else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Lies
from verify_runs import PATIENT, inputs, reasons, settings, silent, states

from sglang_exact.verify import record, session, summary
from sglang_exact.verify.record import RecordError

ARMS = "speculation,streaming"


def verified(path: Path, arms: str = ARMS, *, plain: bool = True) -> Path:
    """The record of a verification; without `plain` there is no reference server."""

    async def go() -> None:
        async with FakeServer(speculative=False) as reference, FakeServer() as tested:
            other = reference if plain else None
            given = inputs(tested, other, path, settings(arms))
            await session.verify(given, silent)

    asyncio.run(go())
    return path / "run.jsonl"


def replay(path: Path, file: Path, arms: str = ARMS, **server: Any) -> summary.Run:
    """Verify a server against a record."""

    async def go() -> summary.Run:
        async with FakeServer(**server) as tested:
            given = inputs(tested, None, path, settings(arms), reference_file=file)
            output = path / "replay.jsonl"
            return await session.verify(given._replace(output=output), silent)

    return asyncio.run(go())


def edited(file: Path, change: Callable[[dict[str, Any]], None], kind: str) -> Path:
    """The record with every line of a kind changed."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if row["kind"] == kind:
            change(row)
    other = file.with_name("edited.jsonl")
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return other


def test_record_of_a_verification_is_a_reference(tmp_path: Path) -> None:
    file = verified(tmp_path)
    run = replay(tmp_path, file)
    assert set(states(run).values()) == {"verified"}, reasons(run)
    reference = run.server("reference")
    # Its plain server, not the one that was tested then.
    assert reference is not None and reference.speculative() is False
    bad = Lies({"logprob-bit"})
    assert summary.verdict(replay(tmp_path / "b", file, lies=bad)) == "divergence"


def test_own_answers_of_a_speculating_server_are_no_reference(tmp_path: Path) -> None:
    file = verified(tmp_path, plain=False)
    with pytest.raises(RecordError, match="there was no plain reference"):
        replay(tmp_path, file)


def _drop_logprobs(row: dict[str, Any]) -> None:
    row["answer"]["logprobs"] = []


def _drop_lists(row: dict[str, Any]) -> None:
    row["answer"]["top"] = [[] for _ in row["answer"]["top"]]


def _no_number(row: dict[str, Any]) -> None:
    row["answer"]["logprobs"][2] = None


def _other_prompt(row: dict[str, Any]) -> None:
    row["sha256"] = "0" * 64


def _other_sampling(row: dict[str, Any]) -> None:
    row["params"]["temperature"] = 0.7


def _longer(row: dict[str, Any]) -> None:
    for name in ("ids", "logprobs", "top"):
        row["answer"][name] *= 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_drop_logprobs, "found 0 logprobs, expected 12"),
        (_drop_lists, "top lists of other lengths"),
        (_no_number, "12 finite ones"),
        (_other_prompt, "another prompt or other parameters"),
        (_other_sampling, "another prompt or other parameters"),
        (_longer, "found 24 tokens, expected 12 at most"),
    ],
)
def test_edited_answers_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    """Whatever they lack would otherwise not be compared."""
    file = edited(verified(tmp_path), change, "reference")
    with pytest.raises(RecordError, match=said):
        replay(tmp_path, file)
    # A record that is gone on with is held to the same.
    file.rename(tmp_path / "run.jsonl")

    async def resumed() -> summary.Run:
        async with FakeServer(speculative=False) as plain, FakeServer() as tested:
            plan = settings(ARMS)
            given = inputs(tested, plain, tmp_path, plan, resume=True)
            return await session.verify(given, silent)

    with pytest.raises(RecordError, match=said):
        asyncio.run(resumed())


def _speculates(row: dict[str, Any]) -> None:
    row["answer"]["counters"]["verify"] = 4


def _algorithm(row: dict[str, Any]) -> None:
    row["fields"]["speculative_algorithm"] = "DFLASH"


@pytest.mark.parametrize(
    ("change", "kind"), [(_speculates, "reference"), (_algorithm, "server")]
)
def test_record_of_a_speculating_server_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], kind: str
) -> None:
    file = edited(verified(tmp_path), change, kind)
    with pytest.raises(RecordError, match="the recorded reference speculates"):
        replay(tmp_path, file)


@pytest.mark.parametrize("left", [3, 5])
def test_record_that_was_cut_short_is_not_exercised(tmp_path: Path, left: int) -> None:
    file = verified(tmp_path)
    lines = file.read_bytes().splitlines(keepends=True)
    # Header, two servers, then the answers; the last one is cut in its middle.
    file.write_bytes(b"".join(lines[:left]) + lines[left][:100])
    if left == 3:
        with pytest.raises(RecordError, match="holds no reference answer"):
            replay(tmp_path, file)
        return
    run = replay(tmp_path, file)
    assert set(states(run).values()) == {"not exercised"}
    assert "no reference for 1 of 3 cases" in reasons(run)


async def _changing(path: Path, dtype: str) -> list[str]:
    """Record a server that comes back with this dtype after three requests."""
    plain = FakeServer(speculative=False, step_s=0.01)
    async with plain:

        async def swap() -> None:
            # One asks for the size of the vocabulary.
            while plain.requests < 4:
                await asyncio.sleep(0.002)
            await plain.stop()
            plain.info = {"startup_time": {"process": 2}, "dtype": dtype}
            await plain.start()

        task = asyncio.create_task(swap())
        plan = settings("speculation", num_prompts=6)
        given = inputs(plain, plain, path, plan, options=PATIENT)
        problems = await session.record_reference(given, silent)
        await task
        return problems


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_server_that_changes_while_it_is_recorded(tmp_path: Path, dtype: str) -> None:
    problems = asyncio.run(_changing(tmp_path, dtype))
    if dtype == "bfloat16":
        assert problems == []
        run = replay(tmp_path, tmp_path / "run.jsonl", "speculation")
        assert summary.verdict(run) == "verified", reasons(run)
        return
    assert "came back with another set-up: dtype: 'bfloat16' before" in problems[0]
    file = tmp_path / "run.jsonl"
    with pytest.raises(RecordError, match="changed while it was recorded"):
        replay(tmp_path, file, "speculation")
    # Going on with it makes the earlier answers no better.
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    with record.Writer(file, append=True) as writer:
        writer.header({k: v for k, v in rows[0].items() if k != "kind"})
        for end in ({"finished": "", "interrupted": False}, None):
            with pytest.raises(RecordError, match="changed while it was recorded"):
                replay(tmp_path, file, "speculation")
            if end:
                writer.end(end)


def test_report_of_a_resumed_run_that_was_killed(tmp_path: Path) -> None:
    """The first run ended by itself; of the second only its beginning is there."""

    async def go() -> None:
        bad = Lies({"error-500"}, when=lambda body, _: body["stream"])
        async with (
            FakeServer(speculative=False) as plain,
            FakeServer(lies=bad) as tested,
        ):
            given = inputs(tested, plain, tmp_path, settings(ARMS))
            assert summary.verdict(await session.verify(given, silent)) != "verified"

    asyncio.run(go())
    file = tmp_path / "run.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    with record.Writer(file, append=True) as writer:
        writer.header({k: v for k, v in rows[0].items() if k != "kind"})
        writer.arm_restart("streaming")
    run = session.load_run(file)
    assert states(run) == {"speculation": "verified", "streaming": "not reached"}
    assert summary.EXIT[summary.verdict(run)] == 130


def test_report_of_a_record_without_one_of_its_arms(tmp_path: Path) -> None:
    file = verified(tmp_path)
    assert summary.verdict(session.load_run(file)) == "verified"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    names = ("arm", "name")
    kept = [r for r in rows if "streaming" not in (r.get(n) for n in names)]
    file.write_text("".join(json.dumps(row) + "\n" for row in kept))
    run = session.load_run(file)
    assert states(run)["streaming"] == "not reached"
    assert summary.verdict(run) == "not verified"


@pytest.mark.parametrize("content", [b"", b'{"kind":"header","for'])
def test_resume_of_a_record_that_never_began(tmp_path: Path, content: bytes) -> None:
    """What a full disk leaves: nothing is lost by starting afresh."""
    (tmp_path / "run.jsonl").write_bytes(content)

    async def go() -> summary.Run:
        async with FakeServer(speculative=False) as plain, FakeServer() as tested:
            given = inputs(tested, plain, tmp_path, resume=True)
            return await session.verify(given, silent)

    assert summary.verdict(asyncio.run(go())) == "verified"
    assert summary.verdict(session.load_run(tmp_path / "run.jsonl")) == "verified"


def test_resume_at_another_address_says_so(tmp_path: Path) -> None:
    """The same set-up may be another machine: both are in the report."""
    file = verified(tmp_path)

    async def go() -> tuple[summary.Run, str]:
        async with FakeServer(speculative=False) as plain, FakeServer() as tested:
            plan = settings(ARMS)
            given = inputs(tested, plain, tmp_path, plan, resume=True)
            return await session.verify(given, silent), tested.url

    before = session.load_run(file).servers
    run, url = asyncio.run(go())
    assert len(run.servers) == 2 * len(before)
    (tested,) = [s for s in run.servers if s.url == url]
    assert before[0].url in tested.notes[-1]
    assert summary.to_json(session.load_run(file)) == summary.to_json(run)
