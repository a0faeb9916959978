# SPDX-License-Identifier: Apache-2.0
"""The workers of an arm: so many requests in flight, one record line for each."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from sglang_exact.verify.client import Failed, Refused
from sglang_exact.verify.fleet import InFlight, Server
from sglang_exact.verify.model import (
    FAILED,
    REFUSED,
    ArmResult,
    Outcome,
    Sample,
)
from sglang_exact.verify.plan import Job, PlannedArm
from sglang_exact.verify.reference import GIVE_UP, ReferenceBook

Judge = Callable[[Server, Job, str, Sample], Outcome]


class ArmRun:
    """The workers of one arm on one server."""

    def __init__(
        self,
        book: ReferenceBook,
        judge: Judge,
        server: Server,
        planned: PlannedArm,
        result: ArmResult,
        todo: deque[Job],
        counter: InFlight,
    ):
        self.book, self.judge = book, judge
        self.server, self.planned = server, planned
        self.result, self.todo, self.counter = result, todo, counter
        self.failures = 0

    async def worker(self, delay: float) -> None:
        """Take requests until there are none left or too many failed in a row."""
        await asyncio.sleep(delay)
        while self.todo and self.failures < GIVE_UP:
            job = self.todo.popleft()
            token = self.counter.enter()
            began = time.monotonic()
            try:
                outcome = await self._ask(job)
            finally:
                peak = self.counter.leave(token)
            outcome.in_flight, outcome.company = peak
            outcome.latency_s = time.monotonic() - began
            self.failures = self.failures + 1 if outcome.status == FAILED else 0
            self.result.outcomes.append(outcome)
            self.book.writer.outcome(outcome)
            self.book.display.advance(job.case.max_new_tokens)

    async def _ask(self, job: Job) -> Outcome:
        name = self.planned.arm.name
        try:
            sample, attempts = await self.server.ask(
                job.case, job.manner, self.book.reconnect_s
            )
        except (Refused, Failed) as error:
            unserved = isinstance(error, Refused) and error.unserved
            status = REFUSED if unserved else FAILED
            return Outcome(
                name, job.case.key(), job.index, self.server.label, status, str(error)
            )
        outcome = self.judge(self.server, job, name, sample)
        outcome.attempts = attempts
        return outcome
