# SPDX-License-Identifier: Apache-2.0
"""Run the verifier against fake servers inside one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from fake_server import FakeServer, Lies

from sglang_exact.verify import session, summary
from sglang_exact.verify.arms import REFERENCE, TESTED
from sglang_exact.verify.plan import Settings
from sglang_exact.verify.runner import RunOptions
from sglang_exact.verify.servers import Address
from sglang_exact.view.console import Silent

FAST = RunOptions(reconnect_s=0.3, restart_timeout_s=5)
# For servers that do return, however busy the machine is.
PATIENT = FAST._replace(reconnect_s=60)


def silent(_: int) -> Any:
    return contextlib.nullcontext(Silent())


def settings(arms: str = "speculation", **changes: Any) -> Settings:
    base = {"suite": "quick", "tokens": 12, "num_prompts": 3, "repeats": 24}
    return Settings(arms=tuple(arms.split(",")) if arms else (), **(base | changes))


def inputs(
    tested: FakeServer,
    reference: FakeServer | None,
    path: Path,
    plan: Settings | None = None,
    *,
    extra: tuple[tuple[str, FakeServer], ...] = (),
    key: str | None = None,
    **changes: Any,
) -> session.Inputs:
    addresses = [Address(TESTED, tested.url, key)]
    if reference is not None:
        addresses.append(Address(REFERENCE, reference.url, key))
    addresses += [Address(role, server.url, key) for role, server in extra]
    base = {"timeout": 5.0, "options": FAST, "command": "test"} | changes
    return session.Inputs(
        addresses, plan or settings(), output=path / "run.jsonl", **base
    )


async def against(
    tested: FakeServer, path: Path, plan: Settings | None = None, **changes: Any
) -> summary.Run:
    """Verify `tested` against an honest plain server."""
    async with FakeServer(speculative=False) as plain, tested:
        return await session.verify(
            inputs(tested, plain, path, plan, **changes), silent
        )


def lie(
    path: Path, *kinds: str, arms: str = "speculation", when: Any = None, **server: Any
) -> summary.Run:
    """The run against a server that lies in these ways."""
    tested = FakeServer(lies=Lies(set(kinds), when=when), **server)
    return asyncio.run(against(tested, path, settings(arms)))


def states(run: summary.Run) -> dict[str, str]:
    return {result.name: result.state for result in run.results}


def reasons(run: summary.Run) -> str:
    return " | ".join(text for result in run.results for text in result.reasons)
