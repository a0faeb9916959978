# SPDX-License-Identifier: Apache-2.0
"""A closer look at answers that differ: what a suspicion rests on."""

from __future__ import annotations

from typing import Protocol

from sglang_exact.verify import diagnose
from sglang_exact.verify.client import Failed, Refused
from sglang_exact.verify.fleet import Server
from sglang_exact.verify.model import Manner, Outcome, Sample
from sglang_exact.verify.plan import Job, PlannedArm
from sglang_exact.verify.reference import ReferenceBook

PROBED_CASES = 2


class Judge(Protocol):
    """Compares an answer with its reference."""

    def __call__(
        self, server: Server, job: Job, name: str, sample: Sample, probe: str = ""
    ) -> Outcome: ...


async def emptied(server: Server) -> str | None:
    """Empty the prefix cache; a note if the server did not."""
    problem = await server.client.flush()
    return f"the prefix cache was not emptied: {problem}" if problem else None


class Prober:
    """Asks a few diverging cases again, alone; what came of it goes to `probes`."""

    def __init__(self, book: ReferenceBook, judge: Judge, probes: list[Outcome]):
        self.book, self.judge, self.probes = book, judge, probes
        self._seen: set[tuple[str, str]] = set()

    async def look(
        self,
        planned: PlannedArm,
        different: list[Outcome],
        servers: list[Server],
        reference: Server | None,
    ) -> None:
        """Twice the server that differed, then the reference if it can be asked.

        The earliest differences: the report is about the first.
        """
        by_label = {server.label: server for server in servers}
        jobs = {job.case.key(): job for job in planned.jobs}
        ordered = diagnose.earliest_first(different)
        cases = dict.fromkeys((o.server, o.case) for o in ordered)
        for label, key in list(cases)[:PROBED_CASES]:
            server = by_label[label]
            if (label, key) in self._seen or server.down:
                continue
            self._seen.add((label, key))
            self.book.display.say(f"looking closer at {key} on {label}")
            for name in diagnose.PROBES:
                await self._ask(server, jobs[key], name)
            if reference is not None and not reference.down:
                await self._ask(reference, jobs[key], diagnose.REFERENCE_AGAIN)

    async def _ask(self, server: Server, job: Job, name: str) -> None:
        manner = Manner(top=self.book.top, stream=name == diagnose.SOLO)
        await emptied(server)
        try:
            sample, _ = await server.ask(job.case, manner, self.book.reconnect_s)
        except (Refused, Failed):
            return
        outcome = self.judge(server, job, "probe", sample, probe=name)
        self.probes.append(outcome)
        self.book.writer.outcome(outcome)
