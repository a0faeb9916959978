# SPDX-License-Identifier: Apache-2.0
"""Requests in flight: the workers of an arm, and the neighbours beside them.

Neighbours keep a server busy beside the requests that are compared.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from itertools import count

from sglang_exact.client.answer import Case, Options
from sglang_exact.client.http import Failed, Refused
from sglang_exact.verify.arms import PREFILL_TOKENS
from sglang_exact.verify.model import (
    DIFFERENT,
    EQUAL,
    FAILED,
    REFUSED,
    CheckResult,
    Outcome,
    Reference,
)
from sglang_exact.verify.plan import Job, Plan, PlannedCheck, with_sampling
from sglang_exact.verify.prompts import id_prompt
from sglang_exact.verify.reference import GIVE_UP, Judge, References
from sglang_exact.verify.servers import Server

NEIGHBOURS = 4
SAMPLED_TEMPERATURE = 1.0
SAMPLED_TOP_P = 0.9
FAILURES = 3


class InFlight:
    """Counts requests that overlap; every request learns its own peaks."""

    def __init__(self) -> None:
        self._peaks: dict[object, tuple[int, int]] = {}
        self._neighbours: set[object] = set()

    def enter(self, *, neighbour: bool = False) -> object:
        """A request begins; its token is for leave()."""
        token = object()
        self._peaks[token] = (0, 0)
        if neighbour:
            self._neighbours.add(token)
        now, beside = len(self._peaks), len(self._neighbours)
        for other, (most, neighbours) in self._peaks.items():
            self._peaks[other] = (max(most, now), max(neighbours, beside))
        return token

    def leave(self, token: object) -> tuple[int, int]:
        """The most requests, and of them neighbours, that ran at once meanwhile."""
        self._neighbours.discard(token)
        return self._peaks.pop(token)


class Workers:
    """The workers of one arm on one server."""

    def __init__(
        self,
        references: References,
        judge: Judge,
        server: Server,
        planned: PlannedCheck,
        result: CheckResult,
        todo: deque[Job],
        counter: InFlight,
    ):
        self.references, self.judge = references, judge
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
            outcome.in_flight, outcome.beside = peak
            outcome.latency_s = time.monotonic() - began
            self.failures = self.failures + 1 if outcome.status == FAILED else 0
            self.result.outcomes.append(outcome)
            self.references.writer.outcome(outcome)
            self.references.display.advance(job.case.max_new_tokens)

    async def _ask(self, job: Job) -> Outcome:
        name = self.planned.arm.name
        try:
            sample, attempts = await self.server.ask(
                job.case, job.options, self.references.reconnect_s
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


class Neighbours:
    """Starts and stops the neighbours of one arm and keeps what became of them."""

    def __init__(
        self, planned: PlannedCheck, plan: Plan, references: dict[str, Reference]
    ):
        self.kind = planned.arm.neighbours
        self.planned, self.plan, self.references = planned, plan, references
        self.outcomes: list[Outcome] = []

    def start(
        self, server: Server, counter: InFlight, reconnect_s: float
    ) -> list[asyncio.Task[None]]:
        """Start the neighbours; an arm without any gets an empty list."""
        if not self.kind:
            return []
        return [
            asyncio.create_task(self._loop(server, counter, reconnect_s, number))
            for number in range(NEIGHBOURS if self.kind == "sampled" else 1)
        ]

    async def stop(self, tasks: list[asyncio.Task[None]]) -> None:
        """Cancel the neighbours: their last requests are aborted, as users do."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def notes(self) -> list[str]:
        """One line on the neighbours, if there were any."""
        if not self.kind:
            return []
        done = sum(o.status in (EQUAL, DIFFERENT) for o in self.outcomes)
        return [f"{done} {self.kind} neighbours were answered meanwhile"]

    def _case(self, number: int, turn: int) -> Case | None:
        jobs = self.planned.jobs
        if self.kind == "sampled":
            case = jobs[(number * 7 + turn) % len(jobs)].case
            case = case._replace(temperature=SAMPLED_TEMPERATURE)
            # A neighbour with top-p takes the host's sampler another way.
            return with_sampling(case, top_p=SAMPLED_TOP_P) if number % 2 else case
        if self.plan.vocab_size is None:
            return None
        # A fresh prompt each turn, or the prefix cache would spare the prefill.
        settings = self.plan.settings
        prompt = id_prompt(
            f"neighbour-{number}-{turn}",
            min(PREFILL_TOKENS, settings.max_prompt_tokens or PREFILL_TOKENS),
            self.plan.vocab_size,
            settings.seed,
        )
        return Case(prompt, 1)

    async def _loop(
        self, server: Server, counter: InFlight, reconnect_s: float, number: int
    ) -> None:
        failures = 0
        for turn in count():
            case = self._case(number, turn)
            if failures >= FAILURES:
                return
            if case is None:
                self._cannot(server)
                return
            outcome = Outcome(
                self.planned.arm.name, "", turn, server.label, FAILED, neighbour=True
            )
            token = counter.enter(neighbour=True)
            try:
                options = Options(logprobs=False)
                sample, _ = await server.ask(case, options, reconnect_s)
                outcome.status = self._status(case.prompt.id, sample.ids)
                outcome.tokens = len(sample.ids)
                outcome.prompt_tokens = sample.prompt_tokens
                failures = 0
            except (Refused, Failed) as error:
                failures += 1
                outcome.message = str(error)
                unserved = isinstance(error, Refused) and error.unserved
                outcome.status = REFUSED if unserved else FAILED
            finally:
                outcome.in_flight, _ = counter.leave(token)
            self.outcomes.append(outcome)

    def _cannot(self, server: Server) -> None:
        message = "the vocabulary size is unknown: pass --vocab-size N"
        name = self.planned.arm.name
        self.outcomes.append(
            Outcome(name, "", 0, server.label, FAILED, message, neighbour=True)
        )

    def _status(self, prompt: str, ids: tuple[int, ...]) -> str:
        """DIFFERENT where the tokens are none of the greedy answers to the prompt."""
        cases = [job.case for job in self.planned.jobs if job.case.prompt.id == prompt]
        known = [
            self.references[case.key()].answer.ids
            for case in cases
            if not case.temperature and case.key() in self.references
        ]
        return DIFFERENT if known and ids not in known else EQUAL
