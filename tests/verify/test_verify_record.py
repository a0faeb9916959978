# SPDX-License-Identifier: Apache-2.0
"""Record once, replay later, resume after an interruption."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from fake_server import FakeServer, Lies
from verify_runs import against, inputs, reasons, settings, silent, states

from sglang_exact.client.http import Client
from sglang_exact.verify import record, session, summary
from sglang_exact.verify.arms import REFERENCE, TESTED
from sglang_exact.verify.plan import build
from sglang_exact.verify.servers import Address

ARMS = "speculation,seeds,long-2k,stops"


def record_plain(path: Path, arms: str = ARMS, **server: object) -> Path:
    """Record an honest plain server and return the file."""

    async def go() -> list[str]:
        async with FakeServer(speculative=False, **server) as plain:
            given = inputs(plain, None, path, settings(arms, tokens=40))
            both = [Address(TESTED, plain.url), Address(REFERENCE, plain.url)]
            return await session.record_reference(
                given._replace(addresses=both, output=path / "ref.jsonl"), silent
            )

    assert asyncio.run(go()) == []
    return path / "ref.jsonl"


def replay(path: Path, reference: Path, arms: str, **server: object) -> summary.Run:
    async def go() -> summary.Run:
        async with FakeServer(**server) as tested:
            given = inputs(tested, None, path, settings(arms, tokens=40))
            return await session.verify(
                given._replace(reference_file=reference), silent
            )

    return asyncio.run(go())


def test_replay_verifies_and_can_fail(tmp_path: Path) -> None:
    reference = record_plain(tmp_path)
    good = replay(tmp_path, reference, ARMS)
    assert set(states(good).values()) == {"verified"}, reasons(good)
    assert good.server(REFERENCE) is not None
    bad = replay(tmp_path, reference, ARMS, lies=Lies({"logprob-bit"}))
    assert summary.verdict(bad) == "divergence"


def test_replay_has_no_control_arm(tmp_path: Path) -> None:
    run = replay(tmp_path, record_plain(tmp_path, "speculation"), "plain-repeat")
    assert states(run) == {"plain-repeat": "not offered"}
    assert summary.EXIT[summary.verdict(run)] == 2


def test_recorded_refusal_is_not_offered(tmp_path: Path) -> None:
    reference = record_plain(tmp_path, "speculation,long-2k", context_length=2000)
    run = replay(tmp_path, reference, "speculation,long-2k")
    assert states(run) == {"speculation": "verified", "long-2k": "not offered"}


def test_reference_file_that_lacks_a_case_says_so(tmp_path: Path) -> None:
    reference = record_plain(tmp_path, "speculation")
    run = replay(tmp_path, reference, "speculation,long-2k")
    assert states(run) == {"speculation": "verified", "long-2k": "not exercised"}
    assert "record them with sglang-exact record" in reasons(run)


def test_changed_bit_in_the_file_is_a_divergence(tmp_path: Path) -> None:
    reference = record_plain(tmp_path, "speculation")
    lines = [json.loads(line) for line in reference.read_text().splitlines()]
    answer = next(row["answer"] for row in lines if row["kind"] == "reference")
    answer["logprobs"][3] *= 1 + 2**-23
    reference.write_text("".join(json.dumps(row) + "\n" for row in lines))
    run = replay(tmp_path, reference, "speculation")
    assert states(run) == {"speculation": "diverged"}


def test_record_reads_back_as_it_was_run(tmp_path: Path) -> None:
    tested = FakeServer(lies=Lies({"logprob-bit"}))
    run = asyncio.run(against(tested, tmp_path, settings("speculation,streaming")))
    again = session.load_run(tmp_path / "run.jsonl")
    assert summary.to_json(again) == summary.to_json(run)
    assert again.suspicions["speculation"].evidence


@pytest.mark.parametrize("cut", [0, 7])
def test_resume_asks_only_what_is_missing(tmp_path: Path, cut: int) -> None:
    """A record that stops in the middle, its last line perhaps cut off."""
    plan = settings("speculation,streaming")

    async def go(resume: bool) -> tuple[summary.Run, int]:
        async with FakeServer(speculative=False) as plain, FakeServer() as tested:
            given = inputs(tested, plain, tmp_path, plan, resume=resume)
            run = await session.verify(given, silent)
            return run, sum(len(s.calls) for s in (plain, tested))

    first, _ = asyncio.run(go(False))
    path = tmp_path / "run.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    # Keep the references and two answers of the first arm.
    marks = [n for n, line in enumerate(lines) if b'"kind":"outcome"' in line]
    kept = b"".join(lines[: marks[2]]) + lines[marks[2]][:cut]
    path.write_bytes(kept)
    second, asked = asyncio.run(go(True))
    assert summary.verdict(second) == summary.verdict(first) == "verified"
    # Two vocabulary look-ups, one answer of the first arm, three of the second.
    assert asked == 2 + 1 + 3
    assert session.load_run(path).interrupted is False


def test_arm_about_company_starts_afresh(tmp_path: Path) -> None:
    plan = settings("in-flight-8")

    async def go(resume: bool) -> tuple[summary.Run, int]:
        async with (
            FakeServer(speculative=False, step_s=0.002) as plain,
            FakeServer(step_s=0.01) as tested,
        ):
            given = inputs(tested, plain, tmp_path, plan, resume=resume)
            return await session.verify(given, silent), tested.requests

    asyncio.run(go(False))
    path = tmp_path / "run.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-4]))
    run, asked = asyncio.run(go(True))
    assert asked == 1 + 16
    assert states(run) == {"in-flight-8": "verified"}, reasons(run)
    assert summary.counts(session.load_run(path).results[0].outcomes) == (16, 16)


def test_resume_refuses_another_plan_or_server(tmp_path: Path) -> None:
    asyncio.run(against(FakeServer(), tmp_path))
    with pytest.raises(record.RecordError, match="another plan"):
        asyncio.run(against(FakeServer(), tmp_path, settings(tokens=13), resume=True))
    other = FakeServer(info={"dtype": "float16"})
    with pytest.raises(record.RecordError, match="servers of another set-up"):
        asyncio.run(against(other, tmp_path, resume=True))


@pytest.mark.parametrize(
    "content", [b"", b"hello\n", b'{"kind":"header","format":99}\n', b"[]\n{}\n"]
)
def test_file_that_is_no_record(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(record.RecordError):
        record.read(path)


def test_interruption_keeps_what_was_answered(tmp_path: Path) -> None:
    async def go() -> summary.Run:
        async with FakeServer(speculative=False) as plain, FakeServer() as tested:
            tested.step_s = 0.02
            given = inputs(tested, plain, tmp_path, settings("speculation,streaming"))
            task = asyncio.create_task(session.verify(given, silent))
            while tested.requests < 3:
                await asyncio.sleep(0.005)
            task.cancel()
            return await task

    run = asyncio.run(go())
    assert run.interrupted
    assert summary.EXIT[summary.verdict(run)] == 130
    assert set(states(run).values()) == {"not reached"}
    assert summary.counts(run.results[0].outcomes)[0] >= 1
    assert summary.to_json(run)["partial"] is True
    assert session.load_run(tmp_path / "run.jsonl").interrupted


def test_one_reason_of_many_arms_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every long arm lacks the vocabulary size: one line, not one for each arm."""

    async def unknown(_: object) -> None:
        return None

    monkeypatch.setattr(Client, "vocab_size", unknown)
    plan = settings("speculation,long-2k,long-8k")
    refused = [p for p in build(plan, by_ids=False, vocab_size=None).arms if p.refusal]
    assert len(refused) > 1

    async def go() -> list[str]:
        async with FakeServer(speculative=False) as plain:
            return await session.record_reference(
                inputs(plain, plain, tmp_path, plan), silent
            )

    said = [line for line in asyncio.run(go()) if "vocabulary size" in line]
    assert said == [refused[0].refusal]
