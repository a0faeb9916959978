# SPDX-License-Identifier: Apache-2.0
"""The servers of one run: addresses, roles, and whether they still answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from sglang_exact.client import facts as server_facts
from sglang_exact.client.answer import Case, Options, Sample, ServerInfo
from sglang_exact.client.http import Client, Failed, Lost, Refused
from sglang_exact.verify.arms import REFERENCE, TESTED

ATTEMPTS = 3
# Pauses before each look at a server that says that it is another one, in seconds.
SETTLE_S = (0.0, 0.2, 0.6)


@dataclass(slots=True)
class Server:
    """One server and what is known of it.

    `down` holds the reason once it has stopped answering for good, `changed` what it
    has said about itself since then otherwise than at first.
    """

    label: str
    role: str
    client: Client
    info: ServerInfo
    down: str = ""
    changed: list[str] = field(default_factory=list)
    returns: list[str] = field(default_factory=list)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _generation: int = 0

    async def ask(
        self, case: Case, options: Options, reconnect_s: float
    ) -> tuple[Sample, int]:
        """One generation and the attempts it took.

        A broken connection is waited out: if the server comes back within `reconnect_s`
        the request is made again, and the return is noted. Raises Refused or Failed.
        """
        for attempt in range(1, ATTEMPTS + 1):
            if self.down:
                raise Failed(self.down)
            generation = self._generation
            try:
                return await self.client.generate(case, options), attempt
            except Lost as error:
                await self._wait(generation, str(error), reconnect_s)
        raise Failed(f"the connection broke {ATTEMPTS} times in a row")

    async def _wait(self, generation: int, reason: str, reconnect_s: float) -> None:
        async with self._lock:
            # Many requests break at once when a server dies; one of them waits for it.
            if self._generation != generation or self.down:
                return
            if not await self.client.wait_ready(reconnect_s):
                self.down = (
                    f"the server went away ({reason}) and did not answer again "
                    f"within {reconnect_s:g} s"
                )
                return
            self._generation += 1
            kind = "a new process" if await self._look_again() else "the same process"
            if not self.info.identity:
                kind = "a process that cannot be told"
            self.returns.append(
                f"the connection broke ({reason}); it came back as {kind}"
            )

    async def check_identity(self) -> str | None:
        """A note if the process behind the address is another one than before."""
        if not await self._look_again():
            return None
        return "the server was restarted during this arm"

    async def _look_again(self) -> bool:
        """Is it another process than before?

        What it says otherwise than at first is added to `changed` for good: going back
        to the first set-up does not undo what was answered in between.
        """
        now, found = self.info, []
        for pause in SETTLE_S:
            await asyncio.sleep(pause)
            try:
                now = await server_facts.inspect(
                    self.client, self.info.label, self.info.vocab_size
                )
            except (Lost, Refused):
                return False
            found = server_facts.changes(self.info, now)
            # A server that is still starting may not say everything yet.
            if not found:
                break
        self.changed += [text for text in found if text not in self.changed]
        same = now.identity == self.info.identity or not self.info.identity
        if same or not now.fields:
            return False
        self.info = self.info._replace(identity=now.identity)
        return True


class Servers:
    """Every server of the run, by role."""

    def __init__(self, servers: list[Server]):
        self.all = servers

    def role(self, role: str) -> list[Server]:
        return [server for server in self.all if server.role == role]

    @property
    def tested(self) -> Server:
        return self.role(TESTED)[0]

    @property
    def reference(self) -> Server | None:
        found = self.role(REFERENCE)
        return found[0] if found else None


@dataclass(slots=True)
class Address:
    """Where a server is and what it is for."""

    role: str
    url: str
    key: str | None = None


async def connect(
    stack: Any, addresses: list[Address], *, timeout: float, vocab_size: int | None
) -> Servers:
    """Open a client for every address on an AsyncExitStack and ask what each server is.

    Raises Failed with every server that does not answer.
    """
    servers: list[Server] = []
    problems: dict[str, list[str]] = {}
    for number, address in enumerate(addresses):
        client = await stack.enter_async_context(
            Client(address.url, key=address.key, timeout=timeout)
        )
        same = sum(a.role == address.role for a in addresses[:number])
        label = address.role if not same else f"{address.role}-{same + 1}"
        try:
            info = await server_facts.inspect(client, label, vocab_size)
        except (Lost, Refused) as error:
            # One server may have two roles: what is wrong with it is said once.
            problems.setdefault(f"server {client.url}: {error}", []).append(label)
            continue
        servers.append(Server(label, address.role, client, await _steady(client, info)))
    if problems:
        raise Failed(
            "; ".join(f"{' and '.join(names)} {why}" for why, names in problems.items())
        )
    return Servers(servers)


async def _steady(client: Client, info: ServerInfo) -> ServerInfo:
    """The description without an identity, if it is another one at every look."""
    again = await server_facts.current_identity(client)
    if again in (None, info.identity):
        return info
    note = "another process answers at every look: restarts cannot be told"
    return info._replace(identity="", notes=(*info.notes, note))
