# SPDX-License-Identifier: Apache-2.0
"""Servers that say something else about themselves while they are verified."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_server import FakeServer, Lies
from test_verify_cli import KEY
from verify_runs import PATIENT, against, inputs, reasons, settings, silent, states

from sglang_exact.client import facts as server
from sglang_exact.client.answer import ServerInfo
from sglang_exact.client.http import Client
from sglang_exact.verify import record, session, summary

PLAN = settings("speculation,streaming")
OFF = {"test_settings": {"disabled_hooks": ["stop"]}}


class Changing(FakeServer):
    """The same process, which after the third request says `later` of itself."""

    later: Any = None

    async def server_info(self, request: web.Request) -> web.Response:
        if self.requests > 3 and self.later == "nothing":
            return web.Response(status=404)
        if self.requests > 3 and self.later is not None:
            self.exact = self.later
        return await super().server_info(request)


@pytest.mark.parametrize(
    ("later", "said"),
    [
        (None, ""),
        (OFF, "sglang_exact.test_settings"),
        ({"numerics": "near"}, "sglang_exact.numerics"),
        ("nothing", "dtype: 'bfloat16' before, None now"),
    ],
)
def test_attestation_that_changes_without_a_restart(
    tmp_path: Path, later: Any, said: str
) -> None:
    tested = Changing(exact={"numerics": "bitwise"})
    tested.later = later
    run = asyncio.run(against(tested, tmp_path, PLAN))
    wanted = "not exercised" if said else "verified"
    assert set(states(run).values()) == {wanted}, reasons(run)
    assert said in reasons(run)


def test_going_back_to_the_first_set_up_undoes_nothing(tmp_path: Path) -> None:
    """Two restarts within one arm: what was answered between them counts."""

    async def go() -> summary.Run:
        tested = FakeServer(step_s=0.02)
        async with FakeServer(speculative=False) as plain, tested:

            async def swap() -> None:
                for process, radix in ((2, False), (3, True)):
                    before = tested.requests
                    while tested.requests < before + 2:
                        await asyncio.sleep(0.002)
                    await tested.stop()
                    tested.process, tested.radix = process, radix
                    await tested.start()

            task = asyncio.create_task(swap())
            plan = settings("speculation", num_prompts=8)
            given = inputs(tested, plain, tmp_path, plan, options=PATIENT)
            run = await session.verify(given, silent)
            await task
            return run

    run = asyncio.run(go())
    assert states(run) == {"speculation": "not exercised"}
    assert "disable_radix_cache: False before, True now" in reasons(run)


def test_gpu_that_is_not_told_once_is_no_change() -> None:
    """The endpoint that names it may be busy; another GPU is another set-up."""

    def info(**fields: Any) -> ServerInfo:
        return ServerInfo("tested", "", {"dtype": "x", **fields}, {}, None, "")

    assert server.changes(info(accelerator="H200"), info()) == []
    assert server.changes(info(), info(accelerator="H200")) == []
    assert server.changes(info(accelerator="H200"), info(accelerator="H100"))
    assert server.changes(info(), info(revision="2"))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -0.0])
def test_numbers_that_are_none_are_no_change(tmp_path: Path, odd: float) -> None:
    """NaN differs from itself, and the record would read null."""
    more = {"mem_fraction_static": odd, "page_size": odd}
    run = asyncio.run(against(FakeServer(info=more), tmp_path, PLAN))
    assert summary.verdict(run) == "verified", reasons(run)
    again = asyncio.run(against(FakeServer(info=more), tmp_path, PLAN, resume=True))
    assert summary.verdict(again) == "verified"
    with pytest.raises(record.RecordError, match="page_size"):
        changed = FakeServer(info={**more, "page_size": 16})
        asyncio.run(against(changed, tmp_path, PLAN, resume=True))


def test_key_is_cut_out_of_every_depth() -> None:
    # Fields whose name speaks of a key are left out: this one speaks of none.
    secret = "tOp-s3cret"
    client = Client("http://h:1", key=secret)
    nested: Any = secret
    for _ in range(8):
        nested = {f"of {secret}": [nested, f"so {secret}"]}
    found = repr(server._plain(nested, client))
    assert secret not in found
    assert "'of ***'" in found and "'so ***'" in found


@pytest.mark.parametrize("length", range(270, 310, 3))
def test_message_is_not_cut_within_the_key(tmp_path: Path, length: int) -> None:
    """Server text is cut to 300 characters; a half of the key is too much of it."""

    class Talks(FakeServer):
        async def generate(self, request: web.Request) -> web.StreamResponse:
            text = "x" * length + KEY
            return web.json_response({"error": {"message": text}}, status=500)

    async def go() -> summary.Run:
        async with FakeServer(speculative=False) as plain, Talks() as tested:
            plan = settings(num_prompts=1)
            given = inputs(tested, plain, tmp_path, plan, key=KEY, vocab_size=512)
            return await session.verify(given, silent)

    assert KEY[:4] not in reasons(asyncio.run(go()))


def test_key_in_a_finish_reason(tmp_path: Path) -> None:
    class Echoes(FakeServer):
        def _generate(self, body: dict[str, Any], kinds: set[str]) -> Any:
            answer, steps = super()._generate(body, kinds)
            reason = {"type": "stop", "matched": f"a {KEY} b"}
            answer["meta_info"]["finish_reason"] = reason
            return answer, steps

    async def go() -> summary.Run:
        async with FakeServer(speculative=False) as plain, Echoes() as tested:
            given = inputs(tested, plain, tmp_path, key=KEY)
            return await session.verify(given, silent)

    run = asyncio.run(go())
    assert summary.verdict(run) == "divergence"
    assert KEY not in repr(summary.to_json(run))
    assert KEY not in (tmp_path / "run.jsonl").read_text()
    assert "stop:a *** b" in repr(summary.to_json(run))


def test_lies_of_the_first_process_stay_with_it(tmp_path: Path) -> None:
    """A plain restart within an arm hides no difference found before it."""

    async def go() -> summary.Run:
        bad = Lies({"wrong-token"})
        tested = FakeServer(step_s=0.02, lies=bad)
        async with FakeServer(speculative=False) as plain, tested:

            async def swap() -> None:
                while tested.requests < 3:
                    await asyncio.sleep(0.002)
                await tested.stop()
                tested.process, tested.lies = 2, Lies()
                await tested.start()

            task = asyncio.create_task(swap())
            plan = settings("speculation", num_prompts=6)
            given = inputs(tested, plain, tmp_path, plan, options=PATIENT)
            run = await session.verify(given, silent)
            await task
            return run

    run = asyncio.run(go())
    assert summary.verdict(run) == "divergence"
    compared, equal = summary.counts(run.results[0].outcomes)
    assert 0 < equal < compared == 6


@pytest.mark.parametrize("restless", [False, True])
def test_identity_that_changes_at_every_look(tmp_path: Path, restless: bool) -> None:
    """Several processes behind one address: "restarted" would always be true."""

    class Balanced(FakeServer):
        async def server_info(self, request: web.Request) -> web.Response:
            self.process += restless
            return await super().server_info(request)

    async def go() -> summary.Run:
        async with (
            FakeServer(speculative=False) as plain,
            FakeServer() as tested,
            Balanced(process=7) as other,
        ):
            plan, extra = settings("restart"), (("restarted", other),)
            given = inputs(tested, plain, tmp_path, plan, extra=extra)
            return await session.verify(given, silent)

    run = asyncio.run(go())
    wanted = "not exercised" if restless else "verified"
    assert states(run) == {"restart": wanted}, reasons(run)
    notes = [note for info in run.servers for note in info.notes]
    assert any("restarts cannot be told" in note for note in notes) == restless
