# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_verify: its arms, its planted bit, and that it can end in status 1.

The servers are fake ones, the calls of `sglang-exact` real ones.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_server import FakeServer, Lies
from verify_runs import inputs, silent

pytest.importorskip("torch")

from sglang_exact import scope  # noqa: E402
from sglang_exact.rehearsal.drafters import DRAFTERS  # noqa: E402
from sglang_exact.rehearsal.server import Server  # noqa: E402
from sglang_exact.verify import arms as arm_table  # noqa: E402
from sglang_exact.verify import session, summary  # noqa: E402
from sglang_exact.verify.servers import Address  # noqa: E402
from tools.proof import (  # noqa: E402
    options,
    planted_bit,
    verifier,
    verifier_setup,
)
from tools.proof import verifier_arms as verify_arms  # noqa: E402
from tools.proof import verifier_calls as verify_calls  # noqa: E402
from tools.proof.arms import Arm  # noqa: E402

SCALES = (verify_arms.Scale(), verify_arms.REHEARSAL)
IDS_ONLY = {"skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return verifier


def made(script: ModuleType, folder: Path, *more: str) -> Any:
    """A rehearsal's run with fast servers in mind."""
    where = ["--state", str(folder / "state"), "--out", str(folder / "out")]
    run = script.Run(options.verifier([*where, "--rehearsal", *more]))
    run.scale = run.scale._replace(new=12, num_prompts=3)
    run.prepare()
    run.keep_earlier()
    return run


@contextlib.contextmanager
def served(fake: FakeServer) -> Iterator[FakeServer]:
    """The fake server in a thread of its own: calls of the product block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(fake.start(), loop).result(10)
        yield fake
        asyncio.run_coroutine_threadsafe(fake.stop(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def takes(run: Any, fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next arm of a run find this server."""
    server = SimpleNamespace(started_in_s=1.0, url=fake.url, info=dict)
    monkeypatch.setattr(run, "server", lambda _: contextlib.nullcontext(server))


def refused(flags: list[str]) -> list[str]:
    """What the overlay's table of arguments says to flags, unresolved ones left out."""
    tables = scope.ALLOWED | scope.ALLOWED_SPECULATIVE
    fields: dict[str, Any] = {name: allowed[0] for name, allowed in tables.items()}
    fields |= {
        "speculative_algorithm": None,
        "speculative_num_draft_tokens": None,
        **scope.NGRAM_LEAST,
        "disable_custom_all_reduce": True,
    }
    for flag, value in zip(flags, [*flags[1:], "--"], strict=True):
        if flag.startswith("--"):
            given: Any = True if value.startswith("--") else value
            given = int(value) if value.isdigit() else given
            fields[flag[2:].replace("-", "_")] = given
    if fields["speculative_algorithm"] == "NEXTN":
        fields["speculative_algorithm"] = "EAGLE"
    return [r.found for r in scope.argument_reasons(SimpleNamespace(**fields))]


@pytest.mark.parametrize("scale", SCALES, ids=["gpu", "rehearsal"])
@pytest.mark.parametrize("arm", verify_arms.ARMS, ids=lambda arm: arm.name)
def test_every_arm_has_a_server(
    arm: Arm, scale: verify_arms.Scale, tmp_path: Path
) -> None:
    flags = verifier_setup.server_flags(arm, tmp_path, 4, scale)
    server = Server("target", mode=arm.mode, flags=flags, device="cuda")
    line = server.command()
    assert ("--speculative-algorithm" in line) == (arm.drafter is not None)
    context = int(line[line.index("--context-length") + 1])
    assert context == scale.context
    if not scale.rehearsal:
        assert int(line[line.index("--max-total-tokens") + 1]) > context > 131072 + 64
    if arm.mode == "exact":
        assert refused(flags) == []
        # Control: the same table does refuse.
        assert refused([*flags, "--attention-backend", "fa3"]) != []
    for group in arm.records:
        assert arm_table.by_name(list(verify_arms.GROUPS[group]))
    for ask in arm.phases:
        assert arm_table.by_name(list(ask.arms))
        record = verify_arms.BY_NAME[arm.reference]
        assert ask.group in record.records and record.drafter is None


def test_arms_are_complete() -> None:
    """Plain first, each drafter, and a control of each kind."""
    arms = verify_arms.ARMS
    assert arms[0].name == "plain"
    drafters = {arm.drafter for arm in arms}
    assert drafters == {None, *DRAFTERS}
    assert {arm.disable for arm in arms} >= {"gdn_verify", "attention_verify"}
    for arm in arms:
        control = arm.disable or arm.env or (arm.mode == "stock" and arm.drafter)
        wanted = {ask.expect for ask in arm.phases if not ask.planted}
        caught = wanted & {"differs", "not verified"} or arm.refusal
        assert bool(caught) == bool(control), arm.name
        whole = arm.mode == "exact" and not (arm.disable or arm.env)
        assert ("equal" in wanted) == whole
    assert [ask.name for ask in verify_arms.BY_NAME["dflash"].phases if ask.planted]


def through_proxy(path: Path, number: int, **server: Any) -> tuple[Any, Any]:
    """The verification of a server behind a proxy, and what the proxy did."""

    async def run() -> tuple[Any, Any]:
        tested = FakeServer(info=IDS_ONLY, **server)
        async with FakeServer(speculative=False) as plain, tested:
            with planted_bit.Proxy(tested.url, number) as proxy:
                made = inputs(tested, plain, path)
                addresses = [Address("tested", proxy.url, None), *made.addresses[1:]]
                made = made._replace(addresses=addresses)
                return await session.verify(made, silent), proxy.planted

    return asyncio.run(run())


def test_planted_bit_is_named(tmp_path: Path) -> None:
    run, planted = through_proxy(tmp_path, 2)
    (arm,) = summary.to_json(run)["arms"]
    assert summary.verdict(run) == "divergence"
    assert planted.after == planted.before ^ 1
    assert planted_bit.is_named(planted, arm)
    # Controls: another place, another bit, another prompt, no bit, a second one.
    for other in (
        planted._replace(position=planted.position + 1),
        planted._replace(after=planted.before ^ 2),
        planted._replace(prompt_sha256="0" * 64),
        planted._replace(token=planted.token + 1),
        None,
    ):
        assert not planted_bit.is_named(other, arm)
    assert not planted_bit.is_named(planted, arm | {"different": 2})
    assert not planted_bit.is_named(planted, arm | {"first_divergence": None})


def test_proxy_without_a_bit_changes_nothing(tmp_path: Path) -> None:
    run, planted = through_proxy(tmp_path, 99)
    assert summary.verdict(run) == "verified" and planted is None


def test_another_error_is_not_the_planted_one(tmp_path: Path) -> None:
    run, planted = through_proxy(tmp_path, 2, lies=Lies({"wrong-token"}))
    (arm,) = summary.to_json(run)["arms"]
    assert arm["state"] == "diverged" and planted is not None
    assert not planted_bit.is_named(planted, arm)


def test_arms_on_fake_servers(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record, verify, plant; then a server that lies ends in status 1."""
    run = made(script, tmp_path)
    plain = verify_arms.BY_NAME["plain"]._replace(records=("short",))
    with served(FakeServer(speculative=False, info=IDS_ONLY)) as fake:
        takes(run, fake, monkeypatch)
        run.one(plain, ())
    arm = verify_arms.BY_NAME["dflash"]
    asks = [ask for ask in arm.phases if ask.name in ("repeats", "planted-bit")]
    with served(FakeServer(info=IDS_ONLY, step_s=0.01)) as fake:
        takes(run, fake, monkeypatch)
        run.one(arm, asks)
    assert run.finish() == 0, run.rows
    plan = json.loads(run.plan(arm).read_text())
    assert plan["rate"] == verify_arms.RATE and len(plan["continuations"]) == 3
    row = run.rows["dflash planted-bit"]
    assert row["exit_status"] == 1 and row["planted"]["position"] == 6
    assert run.rows["dflash repeats"]["arms"][0]["compared"] == 16

    later = made(script, tmp_path)
    with served(FakeServer(info=IDS_ONLY, lies=Lies({"wrong-token"}))) as fake:
        takes(later, fake, monkeypatch)
        later.one(arm, asks[1:])
        later.one(arm, [ask._replace(planted=False) for ask in asks[:1]])
    assert later.bad == ["dflash repeats", "dflash planted-bit"]
    assert later.finish() == 1
    kept = json.loads(later.path.read_text())
    assert [row["as_expected"] for row in kept["rows"]] == [True, False, False]
    assert len(kept["commands"]) == 2


def test_a_later_call_keeps_the_rows_of_other_asks(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(script, tmp_path)
    fine = {"as_expected": True, "arms": [], "exit_status": 0, "expected": "equal"}
    first.rows = {f"mtp {n}": {"arm": "mtp", "ask": n, **fine} for n in ("a", "b")}
    first.failed = {"mtp": "no server", "ngram": "no server"}
    first.not_run = ["mtp c"]
    first.write()
    later = made(script, tmp_path)
    assert later.rows == first.rows and later.failed == first.failed
    server = contextlib.nullcontext(
        SimpleNamespace(started_in_s=1.0, url="", info=dict)
    )
    monkeypatch.setattr(later, "server", lambda _: server)
    monkeypatch.setattr(later, "ask", lambda *_: {**fine, "exit_status": 7})
    ask = verify_arms.Ask("b", ("speculation",))
    later.one(verify_arms.BY_NAME["mtp"], [ask, ask._replace(name="c")])
    kept = json.loads(later.path.read_text())
    assert [row["exit_status"] for row in kept["rows"]] == [0, 7, 7]
    assert kept["failed"] == {"ngram": "no server"} and kept["not_run"] == []
    assert later.finish() == 1, "ngram still has no server"


def test_no_record_and_no_time(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are named, and neither is a pass."""
    run = made(script, tmp_path)
    with served(FakeServer(info=IDS_ONLY)) as fake:
        takes(run, fake, monkeypatch)
        run.one(verify_arms.BY_NAME["mtp"], verify_arms.BY_NAME["mtp"].phases)
    assert "fix: run arm plain" in run.failed["mtp speculation"]
    run.args.budget = 0
    run.one(verify_arms.BY_NAME["ngram"], verify_arms.BY_NAME["ngram"].phases)
    assert run.not_run == ["ngram speculation"] and run.finish() == 1


@pytest.mark.parametrize("said", ["the reason", "another", None])
def test_a_server_that_shall_not_start(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str | None,
) -> None:
    """Its own reason is the proof; another one, or a server, is none."""
    arm = verify_arms.BY_NAME["decode-attention-hook-off"]
    run = made(script, tmp_path)
    text = arm.refusal if said == "the reason" else said

    def server(_: Arm) -> Any:
        if text is None:
            return contextlib.nullcontext(SimpleNamespace(started_in_s=1.0))
        raise RuntimeError(f"no server: {text}")

    monkeypatch.setattr(run, "server", server)
    run.one(arm, arm.phases)
    fine = said == "the reason"
    assert run.finish() == (0 if fine else 1)
    assert (arm.name in run.failed) != fine and run.not_run == []
    rows = list(run.rows.values())
    assert [(r["expected"], r["as_expected"], r["ask"]) for r in rows] == [
        ("refused to start", True, "start")
    ] * fine
    # A later call of other arms keeps it, and one without time names it.
    later = made(script, tmp_path)
    assert later.rows == run.rows and later.failed == run.failed
    later.args.budget = 0
    later.one(arm, arm.phases)
    assert later.not_run == [f"{arm.name} start"] and later.finish() == 1
    # A row of an earlier call does not stand beside a server that starts now.
    again = made(script, tmp_path)
    again.args.budget = 1e9
    monkeypatch.setattr(
        again,
        "server",
        lambda _: contextlib.nullcontext(SimpleNamespace(started_in_s=1.0)),
    )
    again.one(arm, arm.phases)
    assert again.rows == {} and "server that started" in again.failed[arm.name]


def test_a_call_ends_with_the_budget_and_goes_on_later(tmp_path: Path) -> None:
    """The partial result is kept; the next call resumes it."""
    options = ["--prompts", "p.jsonl", "--max-new-tokens", "8", "--vocab-size", "512"]
    (tmp_path / "p.jsonl").write_text('{"input_ids": [5, 6, 7]}\n')
    asked = ["--arms", "speculation", *options]
    caller = verify_calls.Caller(tmp_path, lambda: 60.0)
    with served(FakeServer(speculative=False, info=IDS_ONLY)) as fake:
        words = ["record", "--base-url", fake.url, "--output-file", "plain.jsonl"]
        status, said = caller.call("record", [*words, *asked])
        assert status == 0, said
    lies = Lies({"hang"})
    with served(FakeServer(info=IDS_ONLY, lies=lies)) as fake:
        words = ["verify", "--base-url", fake.url, "--reference", "plain.jsonl", *asked]
        short = verify_calls.Caller(tmp_path, lambda: verify_calls.FAREWELL + 12)
        status, said, _ = short.verify("x", list(words))
        assert status == verify_calls.INTERRUPTED, said
        lies.kinds.clear()
        status, said, words = caller.verify("x", list(words))
    assert words[-1] == "--resume" and status == 0, said


def figure(**changes: Any) -> dict[str, Any]:
    return {"state": "verified", "compared": 3, "different": 0, **changes}


@pytest.mark.parametrize(
    ("expect", "status", "found", "cut", "fine"),
    [
        ("equal", 0, [figure()], False, True),
        ("equal", 1, [figure(different=1)], False, False),
        ("equal", 2, [figure(state="not exercised")], False, False),
        ("equal", 2, [figure(state="not exercised")], True, True),
        ("equal", 2, [figure(state="not exercised", different=1)], True, False),
        ("equal", 2, [figure(state="could not run")], True, False),
        ("equal", 2, [figure(compared=0)], True, False),
        ("equal", 2, [], True, False),
        ("equal", 1, [figure(different=1)], True, False),
        ("equal", 130, [figure()], True, False),
        ("differs", 1, [figure(different=1)], False, True),
        ("differs", 0, [figure()], False, False),
        ("differs", 2, [figure()], True, False),
        ("not verified", 1, [figure(different=1)], False, True),
        ("not verified", 2, [figure()], False, True),
        ("not verified", 0, [figure()], False, False),
        ("not verified", 2, [], False, False),
        ("noted", 0, [figure()], False, True),
        ("noted", 1, [figure(different=1)], False, True),
        ("noted", 2, [], False, False),
        ("noted", 130, [figure()], False, False),
    ],
)
def test_what_is_as_expected(
    expect: str, status: int, found: list[dict[str, Any]], cut: bool, fine: bool
) -> None:
    ask = verify_arms.Ask("x", ("speculation",), expect=expect)
    assert verify_calls.as_expected(ask, status, found, cut) is fine


def test_unknown_names_are_refused(script: ModuleType) -> None:
    where = ["--state", "s", "--out", "o"]
    for wrong in (["--arms", "plane"], ["--asks", "repeat"], ["--arms", ","]):
        with pytest.raises(SystemExit):
            options.verifier([*where, *wrong])
    assert isinstance(options.verifier(where), argparse.Namespace)
