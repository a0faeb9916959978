# SPDX-License-Identifier: Apache-2.0
"""Every way in which a server can be wrong ends in the right verdict, never a pass."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_server import FakeServer, Lies
from verify_runs import against, inputs, lie, reasons, settings, silent, states

from sglang_exact.verify import session, summary

QUICK = "speculation,without-logprobs,streaming,in-flight-8,long-2k"


def test_honest_server_is_verified(tmp_path: Path) -> None:
    tested = FakeServer(step_s=0.01)
    run = asyncio.run(against(tested, tmp_path, settings(QUICK)))
    assert set(states(run).values()) == {"verified"}, reasons(run)
    assert summary.verdict(run) == "verified"
    assert summary.headline(run).startswith("verified: ")


def test_incremental_stream_is_verified(tmp_path: Path) -> None:
    run = lie(tmp_path, arms="streaming", incremental=True)
    assert states(run) == {"streaming": "verified"}, reasons(run)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("wrong-token", "ids"),
        ("logprob-bit", "logprobs"),
        ("nan", "not finite"),
        ("short", "length"),
        ("other-finish", "finish reason"),
    ],
)
def test_other_answer_is_a_divergence(tmp_path: Path, kind: str, what: str) -> None:
    # "short" also lowers completion_tokens: a consistent answer that is too short.
    run = lie(tmp_path, kind)
    assert states(run) == {"speculation": "diverged"}, reasons(run)
    assert summary.EXIT[summary.verdict(run)] == 1
    found = run.suspicions["speculation"].outcome.difference
    assert found is not None
    assert what in found.what
    if kind in ("wrong-token", "logprob-bit", "nan"):
        assert found.position == 5
    if kind == "logprob-bit":
        assert found.ulps == 1
        assert found.id_position is None


def test_wrong_token_without_logprobs(tmp_path: Path) -> None:
    run = lie(tmp_path, "wrong-token", arms="without-logprobs")
    assert states(run) == {"without-logprobs": "diverged"}


@pytest.mark.parametrize(
    ("kind", "arm", "state", "said"),
    [
        ("no-counters", "speculation", "not exercised", "no spec_verify_ct"),
        ("false-counters", "speculation", "not exercised", "contradict"),
        ("no-logprobs", "speculation", "could not run", "logprobs is missing"),
        ("truncated", "streaming", "could not run", "cut off"),
        ("stream-garbage", "streaming", "could not run", "not JSON"),
        ("error-500", "speculation", "could not run", "500: boom"),
        ("garbage", "speculation", "could not run", "not JSON"),
        ("other-json", "speculation", "could not run", "found array"),
        ("wrong-count", "speculation", "could not run", "completion_tokens is 13"),
        ("refuse", "speculation", "not exercised", "not under exact mode"),
        ("unasked-logprobs", "without-logprobs", "not exercised", "not asked for"),
        ("one-piece", "streaming", "not exercised", "more than one piece"),
        ("only-greedy", "sampled-neighbours", "not exercised", "gave greedy answers"),
    ],
)
def test_unusable_answer_is_never_a_pass(
    tmp_path: Path, kind: str, arm: str, state: str, said: str
) -> None:
    run = lie(tmp_path, kind, arms=arm)
    assert states(run) == {arm: state}
    assert said in reasons(run)
    assert "\x1b" not in reasons(run)
    assert summary.EXIT[summary.verdict(run)] == 2


def test_error_half_way_keeps_the_rest_compared(tmp_path: Path) -> None:
    run = lie(tmp_path, "error-500", when=lambda _, server: server.requests == 3)
    (result,) = run.results
    assert result.state == "could not run"
    assert summary.counts(result.outcomes) == (2, 2)


def test_error_in_one_arm_only(tmp_path: Path) -> None:
    run = lie(
        tmp_path,
        "error-500",
        arms="speculation,streaming",
        when=lambda body, _: body["stream"],
    )
    assert states(run) == {"speculation": "verified", "streaming": "could not run"}
    assert summary.verdict(run) == "not verified"


def test_hung_connection_ends_in_time(tmp_path: Path) -> None:
    tested = FakeServer(lies=Lies({"hang"}))
    run = asyncio.run(against(tested, tmp_path, timeout=0.3))
    assert states(run) == {"speculation": "could not run"}
    assert "no complete answer within 0.3 s" in reasons(run)


def test_dropped_connections_are_given_up(tmp_path: Path) -> None:
    run = lie(tmp_path, "drop")
    assert states(run) == {"speculation": "could not run"}
    assert "connection broke 3 times" in reasons(run)


def test_one_dropped_connection_is_asked_again(tmp_path: Path) -> None:
    run = lie(tmp_path, "drop", when=lambda _, server: server.requests == 2)
    (result,) = run.results
    assert result.state == "verified", reasons(run)
    assert "came back as the same process" in result.notes[0]
    assert sum(o.attempts > 1 for o in result.outcomes) == 1


@pytest.mark.parametrize("kind", ["info-garbage", "no-info"])
def test_server_without_info_is_still_compared(tmp_path: Path, kind: str) -> None:
    run = lie(tmp_path, kind)
    assert states(run) == {"speculation": "verified"}, reasons(run)
    notes = [note for server in run.servers for note in server.notes]
    assert any("no usable /server_info" in note for note in notes)


def test_plain_server_does_not_pass_as_speculative(tmp_path: Path) -> None:
    run = lie(tmp_path, speculative=False)
    assert states(run) == {"speculation": "not exercised"}


@pytest.mark.parametrize(
    ("accept", "said"), [(0.0, "no draft was accepted"), (1.0, "every draft was")]
)
def test_acceptance_must_vary(tmp_path: Path, accept: float, said: str) -> None:
    run = lie(tmp_path, accept=accept)
    assert states(run) == {"speculation": "not exercised"}
    assert said in reasons(run)


def test_batch_only_divergence_is_scheduling(tmp_path: Path) -> None:
    run = lie(
        tmp_path,
        "logprob-bit",
        arms="speculation,in-flight-8",
        when=lambda _, server: server.running >= 4,
        step_s=0.01,
    )
    assert states(run) == {"speculation": "verified", "in-flight-8": "diverged"}
    suspicion = run.suspicions["in-flight-8"]
    assert suspicion.name == "scheduling"
    assert suspicion.survives_alone is False


def test_tie_taken_the_other_way_is_the_sampler(tmp_path: Path) -> None:
    async def go() -> summary.Run:
        tie = Lies({"tie"})
        async with (
            FakeServer(speculative=False, lies=tie) as plain,
            FakeServer(lies=tie) as tested,
        ):
            return await session.verify(inputs(tested, plain, tmp_path), silent)

    run = asyncio.run(go())
    suspicion = run.suspicions["speculation"]
    assert suspicion.name == "sampler", suspicion.evidence
    found = suspicion.outcome.difference
    assert found is not None and found.top2_gap == 0.0


def test_repeatable_small_difference_is_the_kernel(tmp_path: Path) -> None:
    run = lie(tmp_path, "logprob-bit")
    suspicion = run.suspicions["speculation"]
    assert suspicion.name == "kernel", suspicion.evidence
    assert suspicion.survives_alone is True
    assert suspicion.follows_reject is not None


def test_the_earliest_difference_is_looked_at(tmp_path: Path) -> None:
    """Not the first that came: the report is about the earliest position."""

    class Later(FakeServer):
        def _generate(self, body: dict[str, Any], kinds: set[str]) -> Any:
            # Each further prompt leaves the reference earlier.
            known = list(dict.fromkeys(call["text"] for call in self.calls))
            self.lies.position = 9 - known.index(body["text"])
            return super()._generate(body, kinds)

    tested = Later(lies=Lies({"logprob-bit"}))
    plan = settings("speculation", num_prompts=6)
    run = asyncio.run(against(tested, tmp_path, plan, vocab_size=512))
    suspicion = run.suspicions["speculation"]
    found = suspicion.outcome.difference
    assert found is not None and found.position == 4
    assert suspicion.survives_alone is True
    assert not any("no longer answered" in line for line in suspicion.evidence)
    probed = list(dict.fromkeys(p.case for p in run.probes))
    assert probed[0] == suspicion.outcome.case
    assert len(probed) == 2


class Split(FakeServer):
    """Comments, other fields, CRLF, text of several bytes, cut anywhere; `end` is what
    is left out at the end."""

    end = 0

    async def _stream(self, request: Any, answer: Any, steps: Any, kinds: Any) -> Any:
        ids, meta, sent = answer["output_ids"], answer["meta_info"], 0
        parts = [b": hello", b"event: message", b"id: 3", b"retry: 10", b""]
        for size in steps:
            sent += size
            part = {**meta, "completion_tokens": sent, "note": "\u00e9\u4e2d\U0001f600"}
            for key in ("output_token_logprobs", "output_top_logprobs"):
                part[key] = meta[key][:sent]
            if sent < len(ids):
                part["finish_reason"] = None
            chunk = {"output_ids": ids[:sent], "meta_info": part}
            text = json.dumps(chunk, ensure_ascii=False)
            parts += [b"data:" + text.encode(), b"", b": ping"]
        raw = b"\r\n".join([*parts, b"data: [DONE]", b"", b""])
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(raw) - self.end, 7):
            await response.write(raw[start : min(start + 7, len(raw) - self.end)])
        return response


@pytest.mark.parametrize("end", [0, 8, 200])
def test_stream_that_is_cut_anywhere(tmp_path: Path, end: int) -> None:
    tested = Split()
    tested.end = end
    run = asyncio.run(against(tested, tmp_path, settings("streaming")))
    assert states(run) == {"streaming": "could not run" if end else "verified"}
    assert not end or "cut off" in reasons(run) or "not JSON" in reasons(run)
