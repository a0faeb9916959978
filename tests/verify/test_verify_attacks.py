# SPDX-License-Identifier: Apache-2.0
"""Hostile servers, full disks, changed set-ups: never a traceback, never "verified"."""

from __future__ import annotations

import asyncio
import copy
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Lies
from hostile_server import HostileServer, endless, fixed, head
from test_verify_cli import KEY
from test_verify_wire import answer
from verify_runs import PATIENT, against, inputs, reasons, settings, silent, states

from sglang_exact.client import http as client
from sglang_exact.client.wire import BadAnswer, parse_answer
from sglang_exact.verify import record, session, summary
from sglang_exact.verify.arms import REFERENCE, TESTED
from sglang_exact.verify.servers import Address

BOMB = gzip.compress(b" " * 50_000_000)
RAW = {
    "html": head(Content_Type="text/html") + b"<html><script>alert(1)</script>",
    "not http": b"220 mail.example ESMTP\r\n",
    "nothing": b"",
    "http 9": b"HTTP/9.9 200 OK\r\n\r\n{}",
    "status 204": head("204 No Content"),
    "status 304": head("304 Not Modified"),
    "status 600": head("600 Odd") + b"{}",
    "status 99999": b"HTTP/1.1 99999 Odd\r\n\r\n",
    "negative length": head(Content_Length="-5") + b"{}",
    "long length": head(Content_Length="99") + b"{}",
    "bad chunk": head(Transfer_Encoding="chunked") + b"zz\r\n{}\r\n",
    "long header": head(X="y" * 70_000) + b"{}",
    "many headers": head(**{f"X{n}": "y" for n in range(3000)}) + b"{}",
    "odd charset": head(Content_Type="application/json; charset=\xb5x") + b"{}",
    "gzip bomb": head(Content_Encoding="gzip", Content_Length=str(len(BOMB))) + BOMB,
    "not gzip": head(Content_Encoding="gzip") + b"{}",
    "lone surrogate": head() + rb'{"error": "\ud800 \u202e"}',
    "deep": head() + b"[" * 100_000,
    "long number": head() + b'{"output_ids": [' + b"9" * 5000 + b"]}",
    "null": head() + b"null",
    "zero bytes": head() + b"\x00" * 1000,
}


async def hostile(path: Path, server: HostileServer, **changes: Any) -> summary.Run:
    """Verify a hostile server against an honest plain one."""
    async with FakeServer(speculative=False) as plain, server:
        given = inputs(FakeServer(), plain, path, **{"timeout": 0.6, **changes})
        addresses = [
            Address(TESTED, server.url, KEY),
            Address(REFERENCE, plain.url),
        ]
        return await session.verify(given._replace(addresses=addresses), silent)


def survives(path: Path, server: HostileServer, **changes: Any) -> str:
    """The reasons of a run that ended without a verdict about the answers."""
    try:
        run = asyncio.run(hostile(path, server, vocab_size=512, **changes))
    except client.Failed as error:
        return str(error)
    assert summary.EXIT[summary.verdict(run)] == 2, states(run)
    assert set(states(run).values()) <= {"could not run", "not exercised"}
    return reasons(run)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", sorted(RAW))
def test_raw_bytes(tmp_path: Path, kind: str, stream: bool) -> None:
    plan = settings("streaming" if stream else "speculation", num_prompts=1)
    said = survives(tmp_path, HostileServer(fixed(RAW[kind])), plan=plan)
    assert said
    assert said.isprintable()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (head(), b"{" * 65536),
        (head(Content_Type="text/event-stream"), b"data: " + b"1" * 65536),
        (head(Content_Type="text/event-stream"), b": ping\n\n" * 9000),
        (head("500 Internal Server Error"), b"x" * 65536),
    ],
)
def test_endless_bodies(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: bytes,
    piece: bytes,
    stream: bool,
) -> None:
    monkeypatch.setattr(client, "MAX_BODY", 2**20)
    monkeypatch.setattr(client, "MAX_STREAM", 2**20)
    monkeypatch.setattr(client, "READ_BUFFER", 2**18)
    plan = settings("streaming" if stream else "speculation", num_prompts=1)
    assert survives(tmp_path, HostileServer(endless(start, piece)), plan=plan)


def test_slow_drip(tmp_path: Path) -> None:
    """A byte now and then keeps no request alive beyond its time."""

    async def drip(path: str, writer: asyncio.StreamWriter) -> None:
        body = b"{}" if path != "/generate" else b""
        writer.write(head() + body)
        while path == "/generate" and not writer.is_closing():
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.05)

    said = survives(tmp_path, HostileServer(drip), plan=settings(num_prompts=1))
    assert "no complete answer within 0.6 s" in said


@pytest.mark.parametrize("status", ["301", "302", "303", "307", "308"])
def test_redirects_are_not_followed(tmp_path: Path, status: str) -> None:
    """The key is for the address that was given, and for no other."""

    async def go() -> tuple[str, list[str]]:
        async with HostileServer(fixed(head() + b"{}")) as other:
            there = head(f"{status} Moved", Location=f"{other.url}/x?{KEY}")
            server = HostileServer(fixed(there))
            run = await hostile(tmp_path, server, vocab_size=512)
            return reasons(run), other.heads

    said, heads = asyncio.run(go())
    # Others on this machine may look for a server of theirs on a port that is free.
    assert [text for text in heads if "aiohttp" in text or KEY in text] == []
    assert "redirects to 'http://127.0.0.1:" in said
    assert KEY not in said


ODD = (
    None,
    True,
    -1,
    0,
    2**31,
    2**70,
    1.5,
    1e999,
    "x",
    "",
    [],
    {},
    [[]],
    [None],
    "\ud800",
)


# Of a surrogate nothing is left when it is made printable.
NOTHING = (None, 0, "", [], {}, "\ud800")


def mutations(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place inside a JSON value."""
    if path:
        yield path
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield from mutations(inner, (*path, key))


def test_any_type_in_any_field_of_an_answer() -> None:
    whole = answer(
        spec_verify_ct=1,
        spec_num_correct_drafts=0,
        spec_num_proposed_drafts=3,
        spec_correct_drafts_histogram=[1],
        cached_tokens=0,
        id="x",
    )
    honest = parse_answer(whole, logprobs=True, top_k=1)
    tried = 0
    for path in mutations(whole):
        for odd in ODD:
            body = copy.deepcopy(whole)
            place = body
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = odd
            tried += 1
            try:
                sample = parse_answer(body, logprobs=True, top_k=1)
            except BadAnswer as error:
                assert str(error).isprintable()
                continue
            # What is taken can be written down and read again.
            row = json.loads(json.dumps(record.sample_to_json(sample)))
            assert record.sample_from_json(row) == sample
    assert tried > 400
    assert honest.counters.verify == 1


@pytest.mark.parametrize("odd", ODD)
def test_any_type_in_any_field_of_server_info(tmp_path: Path, odd: Any) -> None:
    fields = (
        *("version", "model_path", "dtype", "tp_size", "startup_time"),
        *("max_running_requests", "context_length", "disable_radix_cache"),
        *("vocab_size", "internal_states", "random_seed"),
    )
    states_ = [{"effective_max_running_requests_per_dp": odd}]
    exact = {"numerics": odd, "hooks": odd, "test_settings": odd, "version": odd}
    for info, attested in (
        (dict.fromkeys(fields, odd), odd if isinstance(odd, dict) else exact),
        ({"internal_states": states_}, {"test_settings": {"disabled_hooks": odd}}),
        ({"internal_states": [odd, 3]}, {"gpu": odd, "stack": {"torch": odd}}),
    ):
        server = FakeServer(info=info, exact=attested, accelerator=odd)
        plan = settings(num_prompts=1)
        run = asyncio.run(against(server, tmp_path, plan))
        assert summary.verdict(run) in ("verified", "not verified")
        page = json.dumps(summary.to_json(run))
        assert json.loads(page)["verdict"] == summary.verdict(run)
        session.load_run(tmp_path / "run.jsonl")
    # The one of them that matters: hooks that are off, in whatever form.
    server = FakeServer(exact={"test_settings": {"disabled_hooks": odd}})
    run = asyncio.run(against(server, tmp_path, settings(num_prompts=1)))
    assert (summary.verdict(run) == "verified") == (odd in NOTHING)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_values_that_are_no_numbers_on_both_sides(tmp_path: Path, text: str) -> None:
    """Equal on both sides, and still no evidence."""
    value = float(text.replace("Infinity", "inf"))

    class Odd(FakeServer):
        def _spoil(self, chosen: list[float], *_: Any) -> None:
            chosen[2] = value

    async def go() -> summary.Run:
        async with Odd(speculative=False) as plain, Odd() as tested:
            return await session.verify(inputs(tested, plain, tmp_path), silent)

    run = asyncio.run(go())
    assert summary.verdict(run) == "not verified"
    assert "not finite" in reasons(run)


async def _with_restart(path: Path, **after: Any) -> summary.Run:
    """A tested server that ends within an arm and comes back otherwise."""
    tested = FakeServer(info={"startup_time": {"process": 1}}, step_s=0.02)
    async with FakeServer(speculative=False) as plain, tested:
        plan = settings("speculation,streaming")
        given = inputs(tested, plain, path, plan, options=PATIENT)

        async def swap() -> None:
            while tested.requests < 3:
                await asyncio.sleep(0.002)
            await tested.stop()
            tested.info = {"startup_time": {"process": 2}}
            for name, value in after.items():
                setattr(tested, name, value)
            await tested.start()

        task = asyncio.create_task(swap())
        run = await session.verify(given, silent)
        await task
        return run


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ({}, None),
        ({"exact": {"test_settings": {"disabled_hooks": ["stop"]}}}, "test_settings"),
        ({"width": 8}, "speculative_num_draft_tokens: 4 before, 8 now"),
        ({"radix": False}, "disable_radix_cache: False before, True now"),
    ],
)
def test_server_that_comes_back_as_another(
    tmp_path: Path, after: dict[str, Any], said: str | None
) -> None:
    run = asyncio.run(_with_restart(tmp_path, **after))
    found = states(run)
    if said is None:
        assert set(found.values()) == {"verified"}, reasons(run)
        return
    # The arm in which it happened may be over.
    assert found["streaming"] == "not exercised", reasons(run)
    assert said in reasons(run)


def test_second_process_with_another_set_up_is_no_restart(tmp_path: Path) -> None:
    async def go() -> summary.Run:
        async with (
            FakeServer(speculative=False) as plain,
            FakeServer() as tested,
            FakeServer(process=2, width=8) as other,
        ):
            extra = (("restarted", other),)
            plan = settings("restart")
            given = inputs(tested, plain, tmp_path, plan, extra=extra)
            return await session.verify(given, silent)

    run = asyncio.run(go())
    assert states(run) == {"restart": "not exercised"}
    assert "another one than the tested" in reasons(run)


def test_resume_refuses_hooks_off_and_another_reference(tmp_path: Path) -> None:
    asyncio.run(against(FakeServer(exact={"version": "1"}), tmp_path))
    off = {"version": "1", "test_settings": {"disabled_hooks": ["stop"]}}
    with pytest.raises(record.RecordError, match="test_settings: None before"):
        asyncio.run(against(FakeServer(exact=off), tmp_path, resume=True))

    async def replay(name: str, resume: bool) -> summary.Run:
        async with FakeServer() as tested:
            given = inputs(tested, None, tmp_path, reference_file=tmp_path / name)
            output = tmp_path / "replay.jsonl"
            given = given._replace(output=output, resume=resume)
            return await session.verify(given, silent)

    first = (tmp_path / "run.jsonl").read_text()
    (tmp_path / "one.jsonl").write_text(first)
    rows = [json.loads(line) for line in first.splitlines()]
    answered = next(row["answer"] for row in rows if row["kind"] == "reference")
    answered["logprobs"][0] *= 2
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "two.jsonl").write_text(text)
    run = asyncio.run(replay("one.jsonl", False))
    assert summary.verdict(run) == "verified"
    with pytest.raises(record.RecordError, match="another reference"):
        asyncio.run(replay("two.jsonl", True))
    # What was replayed can be reported without the other file.
    (tmp_path / "one.jsonl").unlink()
    again = session.load_run(tmp_path / "replay.jsonl")
    assert summary.to_json(again) == summary.to_json(run)


def test_report_of_a_replay_that_diverged(tmp_path: Path) -> None:
    asyncio.run(against(FakeServer(), tmp_path))
    (tmp_path / "run.jsonl").rename(tmp_path / "plain.jsonl")

    async def replay() -> summary.Run:
        async with FakeServer(lies=Lies({"wrong-token"})) as tested:
            file = tmp_path / "plain.jsonl"
            given = inputs(tested, None, tmp_path, reference_file=file)
            return await session.verify(given, silent)

    run = asyncio.run(replay())
    again = session.load_run(tmp_path / "run.jsonl")
    assert summary.to_json(again) == summary.to_json(run)
    assert summary.verdict(again) == "divergence"
