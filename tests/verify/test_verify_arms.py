# SPDX-License-Identifier: Apache-2.0
"""Each arm against an honest server, and against one that belies its claim."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Lies
from verify_runs import (
    FAST,
    PATIENT,
    against,
    inputs,
    lie,
    reasons,
    settings,
    silent,
    states,
)

from sglang_exact.verify import arms, session, summary

OWN_SERVER = {"rejected", "widths", "restart"}


def test_every_arm_is_verified_where_it_can_be(tmp_path: Path) -> None:
    """All arms at once, with every role served; two that need more are below."""
    left_out = {"long-128k", "evict", "multi-turn"}
    names = ",".join(arm.name for arm in arms.ARMS if arm.name not in left_out)

    async def go() -> summary.Run:
        async with (
            FakeServer(speculative=False, step_s=0.002) as plain,
            FakeServer(step_s=0.004) as tested,
            FakeServer(accept=0.0) as rejecting,
            FakeServer(width=8) as wide,
            FakeServer(process=2) as again,
        ):
            extra = (("reject-all", rejecting), ("width", wide), ("restarted", again))
            plan = settings(names, tokens=32)
            return await session.verify(
                inputs(tested, plain, tmp_path, plan, extra=extra), silent
            )

    run = asyncio.run(go())
    assert set(states(run).values()) == {"verified"}, reasons(run)
    repeats = next(r for r in run.results if r.name == "repeats")
    assert len(repeats.outcomes) == 24
    assert summary.failure_bound(1200, 1200) == (
        "0 of 1,200 answers differ: failure rate below 0.25 % with 95 % confidence "
        "(rule of three, 3/1,200)"
    )
    assert summary.failure_bound(29, 29) is None
    assert summary.failure_bound(1200, 1199) is None


@pytest.mark.parametrize("name", sorted(OWN_SERVER))
def test_missing_server_says_what_to_start(tmp_path: Path, name: str) -> None:
    run = asyncio.run(against(FakeServer(), tmp_path, settings(name)))
    assert states(run) == {name: "not exercised"}
    assert "--server" in reasons(run)


@pytest.mark.parametrize(
    ("role", "name", "said"),
    [
        ("reject-all", "rejected", "does not reject all"),
        ("width", "widths", "draft widths seen: 4"),
        ("restarted", "restart", "nothing shows that the server process"),
    ],
)
def test_server_without_its_role_is_not_exercised(
    tmp_path: Path, role: str, name: str, said: str
) -> None:
    async def go() -> summary.Run:
        async with (
            FakeServer(speculative=False) as plain,
            FakeServer() as tested,
            FakeServer() as other,
        ):
            plan = settings("speculation," + name)
            extra = ((role, other),)
            return await session.verify(
                inputs(tested, plain, tmp_path, plan, extra=extra), silent
            )

    run = asyncio.run(go())
    assert states(run)[name] == "not exercised"
    assert said in reasons(run)


def test_other_width_that_differs_points_to_the_kernel(tmp_path: Path) -> None:
    async def go() -> summary.Run:
        bad = Lies({"logprob-bit"})
        async with (
            FakeServer(speculative=False) as plain,
            FakeServer(lies=bad) as tested,
            FakeServer(width=8, lies=bad) as wide,
        ):
            plan = settings("speculation,widths")
            extra = (("width", wide),)
            return await session.verify(
                inputs(tested, plain, tmp_path, plan, extra=extra), silent
            )

    run = asyncio.run(go())
    suspicion = run.suspicions["widths"]
    assert suspicion.moves_with_width is False
    assert suspicion.name == "kernel"


def test_cache_that_is_off_is_not_offered(tmp_path: Path) -> None:
    tested = FakeServer(radix=False)
    run = asyncio.run(
        against(tested, tmp_path, settings("", suite="standard", tokens=32))
    )
    assert states(run)["warm"] == "not offered"
    named = lie(tmp_path, arms="warm", radix=False)
    assert summary.verdict(named) == "not verified", "asked for by name"


def test_cache_that_gives_nothing_is_not_exercised(tmp_path: Path) -> None:
    tested = FakeServer(radix=False, info={"disable_radix_cache": False})
    run = asyncio.run(against(tested, tmp_path, settings("warm")))
    assert states(run) == {"warm": "not exercised"}
    assert "prefix cache" in reasons(run)


def test_refused_seeds_are_not_offered_and_not_a_pass(tmp_path: Path) -> None:
    run = lie(
        tmp_path,
        "refuse",
        arms="speculation,seeds",
        when=lambda body, _: body["sampling_params"]["temperature"] > 0,
    )
    assert states(run) == {"speculation": "verified", "seeds": "not offered"}
    assert summary.verdict(run) == "not verified"


def test_reference_that_ignores_seeds_is_no_reference(tmp_path: Path) -> None:
    async def go() -> summary.Run:
        restless = Lies({"wrong-token"}, when=lambda _, server: server.requests % 2)
        async with (
            FakeServer(speculative=False, lies=restless) as plain,
            FakeServer() as tested,
        ):
            plan = settings("seeds")
            return await session.verify(inputs(tested, plain, tmp_path, plan), silent)

    run = asyncio.run(go())
    assert states(run) == {"seeds": "not exercised"}
    assert "does not repeat a sampled answer" in reasons(run)


def test_seeds_without_effect_are_not_exercised(tmp_path: Path) -> None:
    async def go() -> summary.Run:
        greedy = Lies({"only-greedy"})
        async with (
            FakeServer(speculative=False, lies=greedy) as plain,
            FakeServer(lies=greedy) as tested,
        ):
            plan = settings("seeds")
            return await session.verify(inputs(tested, plain, tmp_path, plan), silent)

    run = asyncio.run(go())
    assert states(run) == {"seeds": "not exercised"}
    assert "the seed had no effect" in reasons(run)


def test_generations_that_do_not_stop_are_not_exercised(tmp_path: Path) -> None:
    run = asyncio.run(
        against(FakeServer(), tmp_path, settings("stops", tokens=2), by_ids=True)
    )
    assert states(run) == {"stops": "not exercised"}
    assert "no generation ended by itself" in reasons(run)


def test_company_that_is_refused_is_not_offered(tmp_path: Path) -> None:
    tested = FakeServer(context_length=4000)
    run = asyncio.run(against(tested, tmp_path, settings("prefill-neighbours")))
    assert states(run) == {"prefill-neighbours": "not offered"}


def test_low_server_limit_is_not_offered(tmp_path: Path) -> None:
    states_of = [{"effective_max_running_requests_per_dp": 4}]
    tested = FakeServer(step_s=0.01, info={"internal_states": states_of})
    run = asyncio.run(against(tested, tmp_path, settings("in-flight-8")))
    assert states(run) == {"in-flight-8": "not offered"}
    assert "at most 4 requests" in reasons(run)


def test_no_reference_is_never_verified(tmp_path: Path) -> None:
    async def go() -> summary.Run:
        async with FakeServer() as tested:
            return await session.verify(inputs(tested, None, tmp_path), silent)

    run = asyncio.run(go())
    assert states(run) == {"speculation": "not exercised"}
    assert "no plain reference was given" in reasons(run)


def test_speculating_reference_is_refused(tmp_path: Path) -> None:
    async def go(kinds: set[str]) -> summary.Run:
        async with (
            FakeServer(lies=Lies(kinds)) as plain,
            FakeServer() as tested,
        ):
            return await session.verify(inputs(tested, plain, tmp_path), silent)

    with pytest.raises(RuntimeError, match="expected none; start it without"):
        asyncio.run(go(set()))
    hidden = asyncio.run(go({"no-info"}))
    assert states(hidden) == {"speculation": "not exercised"}
    assert "the reference speculates" in reasons(hidden)


def test_restart_command_restarts(tmp_path: Path) -> None:
    """The command tells the fake server to come back as another process."""

    async def go() -> summary.Run:
        async with FakeServer(speculative=False) as plain, FakeServer() as tested:
            flag = tmp_path / "restart"

            async def watch() -> None:
                while not flag.exists():
                    await asyncio.sleep(0.01)
                await tested.stop()
                tested.process = 2
                await tested.start()

            task = asyncio.create_task(watch())
            options = FAST._replace(restart_command=f"touch {flag}")
            run = await session.verify(
                inputs(tested, plain, tmp_path, settings("restart"), options=options),
                silent,
            )
            await task
            return run

    run = asyncio.run(go())
    assert states(run) == {"restart": "verified"}, reasons(run)


def test_restart_command_without_effect_is_not_exercised(tmp_path: Path) -> None:
    options = FAST._replace(restart_command="true", restart_timeout_s=0.5)
    run = asyncio.run(
        against(FakeServer(), tmp_path, settings("restart"), options=options)
    )
    assert states(run) == {"restart": "not exercised"}
    assert "process was started again" in reasons(run)


def test_server_that_dies_and_returns_is_noted(tmp_path: Path) -> None:
    async def go() -> summary.Run:
        async with (
            FakeServer(speculative=False) as plain,
            FakeServer(step_s=0.02) as tested,
        ):

            async def die() -> None:
                while tested.requests < 2:
                    await asyncio.sleep(0.005)
                await tested.stop()
                await asyncio.sleep(0.2)
                tested.process = 2
                await tested.start()

            task = asyncio.create_task(die())
            options = PATIENT
            run = await session.verify(
                inputs(tested, plain, tmp_path, options=options), silent
            )
            await task
            return run

    run = asyncio.run(go())
    assert states(run) == {"speculation": "verified"}, reasons(run)
    assert any("as a new process" in note for note in run.results[0].notes)


def test_server_that_stays_away_could_not_run(tmp_path: Path) -> None:
    async def go() -> summary.Run:
        async with (
            FakeServer(speculative=False) as plain,
            FakeServer(step_s=0.02) as tested,
        ):

            async def die() -> None:
                while tested.requests < 2:
                    await asyncio.sleep(0.005)
                await tested.stop()

            task = asyncio.create_task(die())
            plan = settings("speculation,streaming")
            run = await session.verify(inputs(tested, plain, tmp_path, plan), silent)
            await task
            return run

    run = asyncio.run(go())
    assert set(states(run).values()) == {"could not run"}
    assert "did not answer again" in reasons(run)


def test_prompt_longer_than_the_context_is_not_offered(tmp_path: Path) -> None:
    async def go() -> summary.Run:
        async with (
            FakeServer(speculative=False, context_length=4000) as plain,
            FakeServer(context_length=4000) as tested,
        ):
            plan = settings("long-2k,long-8k")
            return await session.verify(inputs(tested, plain, tmp_path, plan), silent)

    run = asyncio.run(go())
    assert states(run) == {"long-2k": "verified", "long-8k": "not offered"}
    assert "longer than the context" in reasons(run)


@pytest.mark.parametrize("odd", [0, -5, True, "4", 2.5, None])
def test_limit_that_is_no_number_of_requests(tmp_path: Path, odd: Any) -> None:
    """Whoever says that it runs none at once has run eight."""
    tested = FakeServer(
        step_s=0.01, info={"internal_states": [], "max_running_requests": odd}
    )
    run = asyncio.run(against(tested, tmp_path, settings("in-flight-8")))
    assert states(run) == {"in-flight-8": "verified"}, reasons(run)


@pytest.mark.parametrize("turn", [0, 2])
def test_refused_now_and_answered_then_is_offered(tmp_path: Path, turn: int) -> None:
    """One and the same long prompt, refused once: a whim and no limit."""
    asked: list[int] = []

    def refused(body: dict[str, Any], _: FakeServer) -> bool:
        asked.append(len(body["input_ids"]))
        return len(asked) > turn and (turn == 0 or len(asked) == turn + 1)

    run = lie(tmp_path, "refuse", arms="long-repeat", when=refused)
    wanted = "not exercised" if turn else "not offered"
    assert states(run) == {"long-repeat": wanted}, reasons(run)
    assert "not under exact mode" in reasons(run)


@pytest.mark.parametrize("accept", [0.6, 0.0])
def test_every_server_of_an_arm_speculates(tmp_path: Path, accept: float) -> None:
    """One width that accepts drafts shows nothing about the other."""

    async def go() -> summary.Run:
        async with (
            FakeServer(speculative=False) as plain,
            FakeServer() as tested,
            FakeServer(width=8) as wide,
            FakeServer(width=6, accept=accept) as other,
        ):
            plan, extra = settings("widths"), (("width", wide), ("width", other))
            given = inputs(tested, plain, tmp_path, plan, extra=extra)
            return await session.verify(given, silent)

    run = asyncio.run(go())
    wanted = "verified" if accept else "not exercised"
    assert states(run) == {"widths": wanted}, reasons(run)
    assert accept or "width-2: no draft was accepted" in reasons(run)


@pytest.mark.parametrize(
    ("arm", "changes"), [("multi-turn", {"tokens": None}), ("branch", {})]
)
def test_prefixes_are_found_and_compared(
    tmp_path: Path, arm: str, changes: dict[str, Any]
) -> None:
    plan = settings(arm, num_prompts=8, **changes)
    run = asyncio.run(against(FakeServer(), tmp_path, plan))
    assert states(run) == {arm: "verified"}, reasons(run)
    # Control: a server that finds nothing, or says that it does not look.
    nothing = FakeServer(radix=False, info={"disable_radix_cache": False})
    run = asyncio.run(against(nothing, tmp_path / "b", plan))
    assert states(run) == {arm: "not exercised"}
    assert "prompts began in the prefix cache" in reasons(run)
    room = {"info": {"disable_radix_cache": False}, "exact": {"prefix_cache": None}}
    for name, off in (("c", {}), ("d", room)):
        tested = FakeServer(radix=False, **off)
        run = asyncio.run(against(tested, tmp_path / name, plan))
        assert states(run) == {arm: "not offered"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": 12}, "an answer of less than 64 tokens"),
        ({"tokens": None, "max_prompt_tokens": 200}, "cut to the first turn"),
    ],
)
def test_conversations_cut_short(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    plan = settings("multi-turn", **changes)
    run = asyncio.run(against(FakeServer(), tmp_path, plan))
    assert states(run) == {"multi-turn": "not exercised"}
    assert said in reasons(run)


def test_answers_that_no_later_prompt_holds(tmp_path: Path) -> None:
    """A server that ignores the bias has other answers than its later prompts."""

    class Ignores(FakeServer):
        def _generate(self, body: dict[str, Any], kinds: set[str]) -> Any:
            body["sampling_params"].pop("logit_bias", None)
            return super()._generate(body, kinds)

    async def go() -> summary.Run:
        async with Ignores(speculative=False) as plain, Ignores() as tested:
            given = inputs(tested, plain, tmp_path, settings("multi-turn"))
            return await session.verify(given, silent)

    run = asyncio.run(go())
    assert states(run) == {"multi-turn": "not exercised"}
    assert "logit_bias did not decide an answer" in reasons(run)


def test_prefixes_that_were_evicted(tmp_path: Path) -> None:
    class Small(FakeServer):
        """Keeps the last three prompts."""

        def _generate(self, body: dict[str, Any], kinds: set[str]) -> Any:
            answer = super()._generate(body, kinds)
            self.kept = [*getattr(self, "kept", []), tuple(body["input_ids"])][-3:]
            self._seen = set(self.kept)
            return answer

    plan = settings("evict", num_prompts=6)
    run = asyncio.run(against(Small(), tmp_path, plan))
    assert states(run) == {"evict": "verified"}, reasons(run)
    run = asyncio.run(against(FakeServer(), tmp_path / "b", plan))
    assert states(run) == {"evict": "not exercised"}
    assert "nothing was evicted" in reasons(run)
