# SPDX-License-Identifier: Apache-2.0
"""The named servers of a run: NAME=URL, opened and described."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang_exact.bench import provenance
from sglang_exact.bench.drive import CannotRun
from sglang_exact.client import facts as server_facts
from sglang_exact.client.answer import ServerInfo
from sglang_exact.client.http import Client, Lost, Refused

PLAIN = "plain"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+@-]{0,63}")


class Address(NamedTuple):
    """A server's name in the tables, and where it is."""

    name: str
    url: str
    key: str | None = None


@dataclass(slots=True)
class Served:
    """One open server: its client, what it says of itself, its provenance."""

    name: str
    client: Client
    info: ServerInfo
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def by_ids(self) -> bool:
        """Whether the server has no tokenizer and takes token ids only."""
        return self.info.fields.get("skip_tokenizer_init") is True

    @property
    def draft_tokens(self) -> int | None:
        """Draft tokens per verify step as the server reports them, committed token
        included; None without speculation."""
        found = self.info.fields.get("speculative_num_draft_tokens")
        return found if type(found) is int and self.info.speculative() else None


def parse(texts: Iterable[str], key: str | None = None) -> list[Address]:
    """Read `NAME=URL` options.

    Raises CannotRun with every bad one at once.
    """
    found: list[Address] = []
    problems: list[str] = []
    for text in texts:
        name, equals, url = text.partition("=")
        if not equals or not _NAME.fullmatch(name):
            problems.append(f"found --server {provenance.scrub_text(text)!r}")
        elif any(a.name == name for a in found):
            problems.append(f"found two servers named {name!r}")
        else:
            found.append(Address(name, url, key))
    if problems:
        raise CannotRun(
            f"{'; '.join(problems)}; expected NAME=http://HOST:PORT, each name once"
        )
    if not found:
        raise CannotRun(
            "found no server; expected one or more; fix: give "
            "--server NAME=http://HOST:PORT"
        )
    return found


def choose(names: Sequence[str], asked: str, option: str) -> str:
    """`asked`, if a server is called so; else raises CannotRun."""
    if asked not in names:
        raise CannotRun(
            f"found {option} {asked!r}; expected one of {', '.join(names)}; fix: add "
            f"--server {asked}=URL or name another"
        )
    return asked


def choose_plain(names: Sequence[str], asked: str | None) -> str | None:
    """The name of the plain server: the one asked for, else `plain` if there is one.

    Raises CannotRun for a name that no server has.
    """
    if asked is None:
        return PLAIN if PLAIN in names else None
    return choose(names, asked, "--plain")


async def open_all(
    stack: AsyncExitStack,
    addresses: Sequence[Address],
    *,
    timeout: float = 1800.0,
    client: type[Client] = Client,
) -> list[Served]:
    """Open every server, each with a `client`, and ask what it is.

    Raises CannotRun with every server that does not answer.
    """
    opened, problems = [], []
    for address in addresses:
        try:
            asker = client(address.url, key=address.key, timeout=timeout)
            await stack.enter_async_context(asker)
            info = await server_facts.inspect(asker, address.name, None)
            facts = await provenance.server(asker, info)
        except (Lost, Refused, ValueError) as error:
            problems.append(f"server {address.name}: {error}")
            continue
        opened.append(Served(address.name, asker, info, facts))
    if problems:
        raise CannotRun(
            f"{'; '.join(problems)}; expected SGLang servers that answer; fix: start "
            "them, or check address and --api-key"
        )
    return opened


def check_plain(server: Served) -> None:
    """Raise CannotRun if the server called plain says that it speculates."""
    if server.info.speculative():
        algorithm = server.info.fields.get("speculative_algorithm")
        raise CannotRun(
            f"server {server.name}: found speculative_algorithm {algorithm}; expected "
            "a plain server as the base of speed-up and exactness; fix: name another "
            "with --plain, or start one without speculation"
        )


async def flush(served: Served, name: str, note: Callable[[str], None]) -> str | None:
    """Empty the prefix cache; why not, where the server does not: `note` is told."""
    why = await served.client.flush()
    if why is not None:
        note(
            f"{name}: the prefix cache was not emptied ({why}): prompts may have been "
            "served from it"
        )
    return why


def needs_counters(served: Served, verify_steps: Iterable[int | None]) -> None:
    """Raise CannotRun if a speculative server sent no `spec_verify_ct` at all."""
    if served.info.speculative() and not any(verify_steps):
        raise CannotRun(
            f"server {served.name}: found speculation on and no spec_verify_ct in any "
            "answer; expected the counter in meta_info; fix: serve with the pinned "
            "SGLang and ask for more than one token"
        )


def needs_no_counters(served: Served, verify_steps: Iterable[int | None]) -> None:
    """Raise CannotRun if a server called plain sent `spec_verify_ct`.

    What it says of itself may be missing or wrong; its answers give it away.
    """
    if any(verify_steps):
        raise CannotRun(
            f"server {served.name}: found spec_verify_ct in its answers; expected a "
            "plain server as the base of speed-up and exactness; fix: name another "
            "with --plain, or start one without speculation"
        )


def setup_notes(servers: Sequence[Served]) -> list[str]:
    """What the servers themselves say that a reader of their numbers has to know."""
    notes = []
    for served in servers:
        notes += [f"{served.name}: {text}" for text in served.info.notes]
        if served.info.fields.get("load_format") == "dummy":
            notes.append(f"{served.name}: random weights")
        tests = served.info.exact.get("test_settings")
        if tests:
            notes.append(f"{served.name}: test settings {tests}")
    return notes
