# SPDX-License-Identifier: Apache-2.0
"""Progress on stderr: a bar with the time left, or plain lines without a terminal."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_EVERY_S = 30.0
T = TypeVar("T")


async def stoppable(work: Coroutine[Any, Any, T]) -> T:
    """Let SIGTERM end a run as Ctrl-C does: with its partial result."""
    task = asyncio.current_task()
    if task is not None and sys.platform != "win32":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


class Display(Protocol):
    """Where progress goes."""

    def begin(self, name: str, tokens: int) -> None:
        """A part with so many tokens to go begins."""

    def advance(self, tokens: int) -> None:
        """So many tokens are done."""

    def say(self, text: str) -> None:
        """One line."""


class Silent:
    """Shows nothing."""

    def begin(self, name: str, tokens: int) -> None:
        """Ignore."""

    def advance(self, tokens: int) -> None:
        """Ignore."""

    def say(self, text: str) -> None:
        """Ignore."""


class Bar:
    """One bar over all tokens of the run; use as a context manager.

    `total` is the number of tokens that may be generated in all. Work that a resumed
    run need not repeat is taken off as each arm begins.
    """

    def __init__(self, console: Console, total: int):
        self.console, self.total = console, max(total, 1)
        self.live = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}", markup=True),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not self.live,
            transient=True,
        )
        self._task = self._progress.add_task("start", total=self.total)
        self._done = 0
        self._began = self._spoke = time.monotonic()
        self._name = ""

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begin(self, name: str, tokens: int) -> None:
        """A part of the run with `tokens` tokens to go begins."""
        self._name = name
        self._progress.update(self._task, description=escape(name))
        if not self.live:
            self.say(f"{name}: up to {tokens:,} tokens")

    def advance(self, tokens: int) -> None:
        """`tokens` more tokens are done."""
        self._done += tokens
        self._progress.advance(self._task, tokens)
        now = time.monotonic()
        if not self.live and now - self._spoke > LINE_EVERY_S:
            self._spoke = now
            rate = self._done / (now - self._began)
            left = max(self.total - self._done, 0) / max(rate, 1e-9)
            self.say(
                f"{self._name}: {100 * self._done / self.total:.0f} % of all tokens, "
                f"about {left / 60:.0f} min left"
            )

    def say(self, text: str) -> None:
        """One line beside the bar."""
        self.console.print(text, markup=False, highlight=False)
