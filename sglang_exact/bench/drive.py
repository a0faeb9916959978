# SPDX-License-Identifier: Apache-2.0
"""Requests in flight: so many at a time, in order, and what came of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_exact.client.answer import IDS_ONLY, Answer, Options, Request, Sample
from sglang_exact.client.http import Client

# A server that fails so often in a row will not answer the rest either.
GIVE_UP = 5


class CannotRun(RuntimeError):
    """Nothing can be measured, or no more; the text says what was found, what was
    expected and how to fix it."""


def shorter(answer: Answer, tokens: int) -> str:
    """Why an answer that ignores the end token is not one of `tokens`; "" if it is."""
    found = len(answer.sample.ids) if answer.sample else tokens
    if found == tokens:
        return ""
    return f"found {found} tokens, expected {tokens}: the speed is of another length"


@dataclass(frozen=True, slots=True)
class Load:
    """The answers of one load, in the order of the requests; `wall_s` from the first
    request sent to the last answer complete."""

    answers: tuple[Answer, ...]
    wall_s: float

    @property
    def samples(self) -> list[Sample]:
        """The answers that are complete."""
        return [a.sample for a in self.answers if a.sample is not None]

    @property
    def errors(self) -> list[str]:
        """What the failed requests said, each text once."""
        return list(dict.fromkeys(a.error for a in self.answers if a.sample is None))

    @property
    def tokens(self) -> int:
        """Completion tokens of all complete answers."""
        return sum(len(sample.ids) for sample in self.samples)

    @property
    def tok_s(self) -> float | None:
        """Output tokens per second of wall time; None if nothing was answered."""
        return self.tokens / self.wall_s if self.tokens and self.wall_s else None


async def drive(
    client: Client,
    requests: Sequence[Request],
    concurrency: int,
    *,
    options: Options = IDS_ONLY,
    done: Callable[[Answer], None] | None = None,
) -> Load:
    """Ask every request, at most `concurrency` at a time, in order.

    `done` is called after each answer. Raises CannotRun after GIVE_UP failures in a
    row.
    """
    todo = deque(enumerate(requests))
    answers: dict[int, Answer] = {}
    failed = 0

    async def worker() -> None:
        nonlocal failed
        while todo and failed < GIVE_UP:
            place, request = todo.popleft()
            answer = await client.ask(request, options)
            answers[place] = answer
            failed = 0 if answer.sample is not None else failed + 1
            if done is not None:
                done(answer)

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(worker())
    wall = time.monotonic() - began
    load = Load(tuple(answers[place] for place in sorted(answers)), wall)
    if failed >= GIVE_UP or not load.samples:
        raise CannotRun(
            f"server {client.url}: found {failed} failed requests in a row "
            f"({'; '.join(load.errors[:3])}); expected answers; fix: look into the "
            "server's log"
        )
    return load
