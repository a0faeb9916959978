# SPDX-License-Identifier: Apache-2.0
"""Equal answers that show less than the arm claims are never "verified".

Each server here is as honest as the one of the control in every answer it compares; it
only leaves out the part that was to be looked at.
"""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_server import FakeServer, Lies
from verify_runs import FAST, against, inputs, lie, reasons, settings, silent, states

from sglang_exact.client.answer import Counters, ServerInfo
from sglang_exact.verify import session, summary
from sglang_exact.verify.counters import contradiction, counted
from sglang_exact.verify.model import Outcome


class ShortLists(FakeServer):
    """Top lists of `keep` entries, whatever was asked for."""

    keep = 0

    def _meta(self, *args: Any) -> dict[str, Any]:
        meta = super()._meta(*args)
        rows = meta.get("output_top_logprobs")
        if rows is not None:
            meta["output_top_logprobs"] = [row[: self.keep] or None for row in rows]
        return meta


class NoNumbers(FakeServer):
    """The last entry of every top list is no number, on every server alike."""

    def _meta(self, *args: Any) -> dict[str, Any]:
        meta = super()._meta(*args)
        for row in meta.get("output_top_logprobs", []):
            row[-1][0] = float("nan")
        return meta


class Capped(FakeServer):
    """Six tokens fewer than asked for, and "length" as if they were all."""

    def _generate(self, body: dict[str, Any], kinds: set[str]) -> Any:
        body = copy.deepcopy(body)
        body["sampling_params"]["max_new_tokens"] -= 6
        return super()._generate(body, kinds)


class EndsEarly(FakeServer):
    """Ends at end-of-text although that was to be ignored."""

    def _generate(self, body: dict[str, Any], kinds: set[str]) -> Any:
        body = copy.deepcopy(body)
        body["sampling_params"]["ignore_eos"] = False
        return super()._generate(body, kinds)


class Constant(FakeServer):
    """A plain server that sends one and the same spec_verify_ct."""

    def _meta(self, *args: Any) -> dict[str, Any]:
        return super()._meta(*args) | {"spec_verify_ct": 3}


class SeldomStreams(FakeServer):
    """Two of three answers come in one piece."""

    async def _stream(self, request: Any, answer: Any, steps: Any, kinds: Any) -> Any:
        more = {"one-piece"} if self.requests % 3 else set()
        return await super()._stream(request, answer, steps, kinds | more)


def both(
    kind: type[FakeServer], path: Path, arms: str, tokens: int = 40, **more: Any
) -> summary.Run:
    """Tested and plain server are of the same kind, so every answer is equal."""

    async def go() -> summary.Run:
        speculates = more.pop("speculative", True)
        plain = kind(speculative=False) if kind is not Constant else FakeServer(False)
        async with plain, kind(speculative=speculates, **more) as tested:
            given = inputs(tested, plain, path, settings(arms, tokens=tokens))
            return await session.verify(given, silent)

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("kind", "arms", "said"),
    [
        (ShortLists, "speculation", "a top-logprob row has 0 entries, expected 5"),
        (NoNumbers, "speculation", "not finite"),
        (Capped, "speculation", "3 answers end early (34 of 40 tokens)"),
        (EndsEarly, "without-logprobs", "does not honour ignore_eos"),
        (SeldomStreams, "streaming", "1 of 3 answers came in more than one piece"),
    ],
)
def test_what_both_servers_leave_out(
    tmp_path: Path, kind: type[FakeServer], arms: str, said: str
) -> None:
    run = both(kind, tmp_path, arms)
    assert set(states(run).values()) == {"not exercised"}
    assert said in reasons(run)
    assert summary.EXIT[summary.verdict(run)] == 2
    compared, equal = summary.counts(run.results[0].outcomes)
    assert compared == equal


@pytest.mark.parametrize("arms", ["speculation", "without-logprobs", "streaming"])
def test_control_leaves_nothing_out(tmp_path: Path, arms: str) -> None:
    run = both(FakeServer, tmp_path, arms)
    assert set(states(run).values()) == {"verified"}, reasons(run)


def test_lists_of_another_length_on_the_tested_side_alone(tmp_path: Path) -> None:
    server = ShortLists()
    server.keep = 4
    run = asyncio.run(against(server, tmp_path))
    assert states(run) == {"speculation": "could not run"}
    assert "4 entries, expected 5" in reasons(run)


@pytest.mark.parametrize("width", [None, 4])
def test_constant_verify_count_is_no_speculation(
    tmp_path: Path, width: int | None
) -> None:
    info = {"speculative_num_draft_tokens": width, "speculative_algorithm": "DFLASH"}
    arms = "without-logprobs,streaming"
    run = both(Constant, tmp_path, arms, speculative=False, info=info)
    assert set(states(run).values()) == {"not exercised"}
    assert (
        "it may count anything" if width is None else "3 verify steps of 4 draft tokens"
    ) in reasons(run)
    assert "40 pieces of a stream from 3 verify steps" in reasons(run)


def outcome(case: str, tokens: int, counters: Counters, **more: Any) -> Outcome:
    return Outcome(
        "a", case, 0, "tested", "equal", tokens=tokens, counters=counters, **more
    )


def test_counters_are_held_against_one_another() -> None:
    info = ServerInfo("tested", "", {"speculative_num_draft_tokens": 8}, {}, None, "")
    same = [outcome(f"p{n}:x", 64, Counters(20)) for n in range(8)]
    assert "spec_verify_ct is 20 in all answers to 8" in counted([info], same)[1][0]
    # Fewer prompts, another number, all rejected or all accepted: nothing is said.
    assert counted([info], same[:7]) == (same[:7], [])
    other = [*same[1:], outcome("p0:x", 64, Counters(21))]
    assert counted([info], other) == (other, [])
    for counters in (Counters(63, 0, 63 * 7), Counters(8, 56, 56)):
        extreme = [outcome(f"p{n}:x", 64, counters) for n in range(8)]
        assert counted([info], extreme) == (extreme, [])


@pytest.mark.parametrize(
    ("counters", "chunks", "wrong"),
    [
        (Counters(3, 8, 9), 0, False),
        (Counters(3, 7, 9), 0, True),
        # The token of a prefill after a retraction is of no verify step.
        (Counters(3, 7, 9, retractions=1), 0, False),
        (Counters(3, 8, 9), 4, False),
        (Counters(3, 8, 9), 5, True),
        (Counters(3, 8, 9, retractions=1), 5, False),
    ],
)
def test_contradictions(counters: Counters, chunks: int, wrong: bool) -> None:
    found = contradiction(outcome("p:x", 12, counters, chunks=chunks))
    assert (found is not None) == wrong


def test_reference_alone_is_not_the_tested_server(tmp_path: Path) -> None:
    """The tested server lies in every answer, and no arm asks it for one."""
    run = lie(tmp_path, "wrong-token", arms="plain-repeat")
    assert states(run) == {"plain-repeat": "verified"}
    assert summary.verdict(run) == "not verified"
    assert "the tested server was not compared" in summary.headline(run)
    assert summary.total_bound(run) is None
    beside = lie(tmp_path / "b", arms="plain-repeat,speculation")
    assert summary.verdict(beside) == "verified"


def test_bound_leaves_out_the_reference(tmp_path: Path) -> None:
    plan = settings("plain-repeat,repeats", repeats=40, num_prompts=24)
    run = asyncio.run(against(FakeServer(step_s=0.004), tmp_path, plan))
    assert summary.verdict(run) == "verified", reasons(run)
    assert summary.total_bound(run) == summary.failure_bound(40, 40)


def test_headline_says_that_ids_alone_were_compared(tmp_path: Path) -> None:
    ids_only = lie(tmp_path, arms="without-logprobs")
    assert summary.verdict(ids_only) == "verified"
    assert "ids only" in summary.headline(ids_only)
    both_ways = lie(tmp_path / "b", arms="without-logprobs,speculation")
    assert "ids only" not in summary.headline(both_ways)


@pytest.mark.parametrize(
    ("status", "state"),
    [(400, "not offered"), (422, "not offered"), (429, "could not run")]
    + [(code, "could not run") for code in (401, 403, 404, 408)],
)
def test_only_a_word_on_the_request_is_not_offered(
    tmp_path: Path, status: int, state: str
) -> None:
    """A rate limit or a key that expired says nothing about seeds."""

    class Gateway(FakeServer):
        async def generate(self, request: web.Request) -> web.StreamResponse:
            body = json.loads(await request.text())
            if body["sampling_params"].get("temperature"):
                return web.json_response({"error": "not now"}, status=status)
            return await super().generate(request)

    run = asyncio.run(against(Gateway(), tmp_path, settings("speculation,seeds")))
    assert states(run) == {"speculation": "verified", "seeds": state}


def test_neighbours_that_give_up_are_no_company(tmp_path: Path) -> None:
    """One neighbour is answered, the rest of the arm runs without any."""

    def refused(body: dict[str, Any], server: FakeServer) -> bool:
        sampled = [b for b in server.calls if b["sampling_params"]["temperature"]]
        return bool(body["sampling_params"]["temperature"]) and len(sampled) > 1

    tested = FakeServer(lies=Lies({"error-500"}, when=refused), step_s=0.01)
    plan = settings("sampled-neighbours", num_prompts=24, tokens=24)
    run = asyncio.run(against(tested, tmp_path, plan))
    assert states(run) == {"sampled-neighbours": "not exercised"}
    assert "of 24 answers had a neighbour in flight" in reasons(run)
    honest = FakeServer(step_s=0.01)
    run = asyncio.run(against(honest, tmp_path / "b", plan))
    assert states(run) == {"sampled-neighbours": "verified"}, reasons(run)


@pytest.mark.parametrize(
    ("deterministic", "exact", "usable"),
    [(False, None, False), (True, None, True), (False, {"version": "1"}, True)],
)
def test_seeds_that_the_reference_does_not_read(
    tmp_path: Path, deterministic: bool, exact: Any, usable: bool
) -> None:
    """Short sampled answers repeat by chance: no ground for a divergence."""

    async def go() -> summary.Run:
        info = {"enable_deterministic_inference": deterministic}
        plain = FakeServer(speculative=False, info=info, exact=exact)
        async with plain, FakeServer(lies=Lies({"wrong-token"})) as tested:
            given = inputs(tested, plain, tmp_path, settings("seeds"))
            return await session.verify(given, silent)

    run = asyncio.run(go())
    assert states(run) == {"seeds": "diverged" if usable else "not exercised"}
    assert usable or "enable_deterministic_inference is off" in reasons(run)


def test_cache_that_serves_one_prompt_of_four(tmp_path: Path) -> None:
    class Forgets(FakeServer):
        def _generate(self, body: dict[str, Any], kinds: set[str]) -> Any:
            known = body["input_ids"] if len(self._seen) == 4 else ()
            answer = super()._generate(body, kinds)
            if known:
                self._seen.clear()
                self._seen |= {(n,) for n in range(5)}
            return answer

    plan = settings("warm", num_prompts=4)
    run = asyncio.run(against(Forgets(), tmp_path, plan))
    assert states(run) == {"warm": "not exercised"}
    assert "1 of 4 prompts asked again came from the prefix cache" in reasons(run)
    run = asyncio.run(against(FakeServer(), tmp_path / "b", plan))
    assert states(run) == {"warm": "verified"}, reasons(run)


@pytest.mark.parametrize("width", [1, 4])
def test_no_draft_is_no_rejected_draft(tmp_path: Path, width: int) -> None:
    """Verify steps of one token alone reject nothing."""

    async def go() -> summary.Run:
        async with (
            FakeServer(speculative=False) as plain,
            FakeServer() as tested,
            FakeServer(accept=0.0, width=width) as rejecting,
        ):
            plan, extra = settings("rejected"), (("reject-all", rejecting),)
            given = inputs(tested, plain, tmp_path, plan, extra=extra)
            return await session.verify(given, silent)

    run = asyncio.run(go())
    wanted = "not exercised" if width == 1 else "verified"
    assert states(run) == {"rejected": wanted}, reasons(run)
    assert width > 1 or "no draft was proposed in 3 answers" in reasons(run)


@pytest.mark.parametrize("arms", ["speculation", "speculation,rejected"])
def test_server_that_no_arm_asks_is_refused(tmp_path: Path, arms: str) -> None:
    """Status 0 would be read as a word on that server too."""

    async def go() -> summary.Run:
        async with (
            FakeServer(speculative=False) as plain,
            FakeServer() as tested,
            FakeServer(accept=0.0) as rejecting,
        ):
            extra = (("reject-all", rejecting),)
            given = inputs(tested, plain, tmp_path, settings(arms), extra=extra)
            return await session.verify(given, silent)

    if arms == "speculation":
        with pytest.raises(ValueError, match="not in this run: rejected; pass"):
            asyncio.run(go())
        return
    assert summary.verdict(asyncio.run(go())) == "verified"


def test_restart_command_without_the_arm_is_refused(tmp_path: Path) -> None:
    options = FAST._replace(restart_command="false")
    with pytest.raises(ValueError, match="not in this run: restart; pass"):
        asyncio.run(against(FakeServer(), tmp_path, options=options))


class Repeats(FakeServer):
    """A gateway that answers the same question from its memory."""

    memory: dict[str, Any]

    def _generate(self, body: dict[str, Any], kinds: set[str]) -> Any:
        asked = json.dumps({k: v for k, v in body.items() if k != "stream"})
        if asked not in self.memory:
            self.memory[asked] = super()._generate(body, kinds)
        return copy.deepcopy(self.memory[asked])


@pytest.mark.parametrize("arms", ["repeats", "speculation,streaming"])
@pytest.mark.parametrize("shared", [False, True])
def test_answers_from_a_memory_are_no_answers(
    tmp_path: Path, arms: str, shared: bool
) -> None:
    """1,200 answers from a cache are one answer; so is one that the reference gave."""

    async def go() -> summary.Run:
        plain, tested = Repeats(speculative=False), Repeats(step_s=0.004)
        plain.memory, tested.memory = {}, {}
        if shared:
            # Both addresses lead to one server, whose answers look speculated.
            plain.speculative = True
            plain.info = {"speculative_algorithm": None}
            plain.lies.kinds = {"no-counters"}
            tested = Repeats(step_s=0.004, process=2)
            tested.memory = plain.memory
        async with plain, tested:
            given = inputs(tested, plain, tmp_path, settings(arms))
            return await session.verify(given, silent)

    run = asyncio.run(go())
    if shared or arms == "repeats":
        assert "verified" not in states(run).values()
        # What the reference gave carries no counters either.
        assert "carry the request id of another answer" in reasons(run)
    else:
        # What the first arm asked, the second gets from the memory.
        found = states(run)
        assert found == {"speculation": "verified", "streaming": "not exercised"}


@pytest.mark.parametrize("read", [8, 4])
def test_prompt_that_is_not_read_whole(tmp_path: Path, read: int) -> None:
    class Truncates(FakeServer):
        def _context(self, body: dict[str, Any]) -> list[int]:
            return super()._context(body)[:read]

    async def go() -> summary.Run:
        async with Truncates(speculative=False) as plain, Truncates() as tested:
            plan = settings("speculation", num_prompts=1)
            given = inputs(tested, plain, tmp_path, plan, by_ids=True)
            return await session.verify(given, silent)

    run = asyncio.run(go())
    if read == 8:
        assert states(run) == {"speculation": "verified"}, reasons(run)
        return
    assert states(run) == {"speculation": "not exercised"}
    assert "prompt_tokens is 4 but 8 input_ids were sent" in reasons(run)
