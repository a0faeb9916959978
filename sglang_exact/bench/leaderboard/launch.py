# SPDX-License-Identifier: Apache-2.0
"""Start a server from a command line, wait until it answers, and stop it for sure."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import string
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.provenance import scrub_text
from sglang_exact.client.http import Client
from sglang_exact.client.process import Process, free_port
from sglang_exact.client.wire import clean

FIELDS = ("port", "draft_length", "draft_tokens")
_LENGTH_FIELDS = {"draft_length", "draft_tokens"}
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_STOP_S = 30.0
_POLL_S = 0.5
_TAIL = 8


class Template(NamedTuple):
    """A configuration and the command line that serves it."""

    name: str
    command: str

    def words(self, length: int, port: int) -> list[str]:
        """The command for a draft length: drafts per verify step, while the host's
        --speculative-num-draft-tokens counts the committed token as well."""
        filled = self.command.format(
            port=port, draft_length=length, draft_tokens=length + 1
        )
        return shlex.split(filled)


def parse(texts: Iterable[str], plain: str) -> list[Template]:
    """Read `NAME=COMMAND` templates; `plain` need not name the draft length.

    Raises CannotRun with every bad one.
    """
    found: list[Template] = []
    problems = []
    for text in texts:
        name, _, command = text.partition("=")
        problem = _problem(name, command, plain)
        if problem or any(t.name == name for t in found):
            shown = scrub_text(text) if command else repr(text)
            problems.append(f"{shown}: {problem or 'a second one of this name'}")
        else:
            found.append(Template(name, command))
    if problems:
        raise CannotRun(
            f"found --launch {'; '.join(problems)}; expected NAME=COMMAND with "
            "{port} and {draft_tokens} (or {draft_length}) where the numbers belong"
        )
    return found


def _problem(name: str, command: str, plain: str) -> str:
    if not name or not command:
        return "no NAME=COMMAND"
    try:
        used = {f for _, f, _, _ in string.Formatter().parse(command) if f is not None}
        shlex.split(command)
    except ValueError as error:
        return f"not a command line ({error})"
    if used - set(FIELDS):
        return f"unknown fields {', '.join(sorted(used - set(FIELDS)))}"
    if "port" not in used:
        return "no {port}"
    if name != plain and not used & _LENGTH_FIELDS:
        return "no {draft_tokens}"
    return ""


class Launched:
    """A server in a process group of its own; the group also ends with this process.

    Use as an async context manager; `url` is its address. Assignments before the
    command, as in `NAME=VALUE sglang serve`, go to its environment.
    """

    def __init__(
        self,
        template: Template,
        length: int,
        log: Path,
        *,
        key: str | None = None,
        timeout: float = 1800.0,
    ):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.words = template.words(length, self.port)
        self.name = template.name
        self.log, self.key, self.timeout = log, key, timeout
        self._process: Process | None = None

    async def __aenter__(self) -> Launched:
        words, env = list(self.words), dict(os.environ)
        while words and _ASSIGNMENT.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            env[name] = value
        self._process = Process(words, self.log, env=env, private=True)
        try:
            await self._ready()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stop()

    async def _ready(self) -> None:
        process = self._process
        if process is None:
            raise RuntimeError("found no process, expected a started one")
        until = time.monotonic() + self.timeout
        client = Client(self.url, key=self.key)
        async with client:
            while not await client.is_ready():
                if (status := process.status()) is not None:
                    found = f"it ended with status {status}"
                elif time.monotonic() > until:
                    found = f"it did not answer within {self.timeout:g} s"
                else:
                    await asyncio.sleep(_POLL_S)
                    continue
                raise CannotRun(
                    f"server {self.name}: {found}; expected it to answer on port "
                    f"{self.port}; fix: look into {self.log}; it ends with: "
                    f"{self._tail(process)}"
                )

    def _tail(self, process: Process) -> str:
        text = clean(" / ".join(process.tail(_TAIL)), 800)
        return text.replace(self.key, "***") if self.key else text

    async def _stop(self) -> None:
        """SIGTERM, then SIGKILL, to the whole group. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        # Also when the run is being cancelled: a server left behind holds the GPU.
        await asyncio.shield(asyncio.to_thread(process.stop, _STOP_S))
