# SPDX-License-Identifier: Apache-2.0
"""The reference answers: asked once, one at a time, of a server without speculation.

And a closer look at answers that differ: what a suspicion rests on.
"""

from __future__ import annotations

from typing import Protocol

from sglang_exact.client.answer import Case, Options, Sample, ServerInfo
from sglang_exact.client.http import Failed, Refused
from sglang_exact.verify import diagnose
from sglang_exact.verify.compare import compare, not_finite
from sglang_exact.verify.model import Outcome, Reference
from sglang_exact.verify.plan import Job, PlannedCheck
from sglang_exact.verify.record import Writer
from sglang_exact.verify.servers import Server
from sglang_exact.view.console import Display

# After this many failures in a row a server is given up: 1,200 timeouts help nobody.
GIVE_UP = 3
# Of so many diverging cases a closer look is taken.
PROBED_CASES = 2


def _asked_twice(case: Case) -> bool:
    """A sampled answer is a reference only if the reference repeats it."""
    return case.temperature > 0


def drawn_anew(case: Case, info: ServerInfo) -> str:
    """Why a sampled answer is no reference even if it was repeated; "" if it may be.

    The host reads seeds (42 where a request has none) only under deterministic
    inference, so without it a repeated short answer is chance.
    """
    said = info.fields.get("enable_deterministic_inference")
    if not _asked_twice(case) or info.exact or said or said is None:
        return ""
    return (
        "the reference draws sampled answers anew: enable_deterministic_inference is "
        "off there"
    )


class References:
    """Every reference answer of a run, and why some are missing.

    `answers` is keyed by Case.key(); `top` is the number of top logprobs asked for.
    """

    def __init__(
        self,
        answers: dict[str, Reference],
        writer: Writer,
        display: Display,
        top: int,
        reconnect_s: float,
        refusals: dict[str, str],
    ):
        self.answers = dict(answers)
        self.errors = dict(refusals)
        self.refused = set(refusals)
        self.writer, self.display = writer, display
        self.top, self.reconnect_s = top, reconnect_s

    async def record(
        self, server: Server, cases: dict[str, Case], may_speculate: bool
    ) -> None:
        """Ask `server` for every case that is not known yet."""
        missing = {key: case for key, case in cases.items() if key not in self.answers}
        if not missing:
            return
        total = sum(c.max_new_tokens * (1 + _asked_twice(c)) for c in missing.values())
        self.display.begin("reference", total)
        failures = 0
        for key, case in missing.items():
            # A reference is computed: what an arm finds in a cache is compared with it.
            await server.client.flush()
            try:
                found = await self._ask(server, key, case, may_speculate)
            except (Refused, Failed) as error:
                self.errors[key] = str(error)
                unserved = isinstance(error, Refused) and error.unserved
                if unserved:
                    self.refused.add(key)
                    self.writer.refusal(key, str(error))
                # A refusal (a prompt too long, say) is about the case, not the server.
                failures = 0 if unserved else failures + 1
                if failures >= GIVE_UP:
                    server.down = server.down or f"gave up: {error}"
            else:
                failures = 0
                self.answers[key] = found
                self.writer.reference(found)
            self.display.advance(case.max_new_tokens)
        # It may have come back as another between two requests.
        await server.check_identity()

    async def _ask(
        self, server: Server, key: str, case: Case, may_speculate: bool
    ) -> Reference:
        options = Options(top=self.top)
        answer, _ = await server.ask(case, options, self.reconnect_s)
        if server.changed:
            raise Failed(f"the server came back with another set-up: {server.changed}")
        if not_finite(case, answer):
            raise Failed("the reference gave a logprob that is not finite")
        if answer.counters.verify and not may_speculate:
            raise Failed(
                f"the reference speculates ({answer.counters.verify} verify steps); "
                "expected a server started without --speculative-*"
            )
        unstable = drawn_anew(case, server.info)
        if _asked_twice(case) and not unstable:
            again, _ = await server.ask(case, options, self.reconnect_s)
            self.display.advance(case.max_new_tokens)
            if compare(again, answer) is not None:
                unstable = "the reference does not repeat a sampled answer"
        prompt = case.prompt
        return Reference(
            key, prompt.id, prompt.sha256(), case.params(), answer, unstable
        )

    def lacking(self, planned: PlannedCheck) -> list[str]:
        """Why an arm cannot be compared; empty if every case has a usable answer."""
        keys = {job.case.key() for job in planned.jobs}
        known = [self.answers[key] for key in keys if key in self.answers]
        reasons = sorted({found.unstable for found in known} - {""})
        absent = sorted(keys - set(self.answers))
        if absent:
            said = sorted({self.errors[key] for key in absent if key in self.errors})
            hint = "; ".join(said) or (
                "record them with sglang-exact record and the same options"
            )
            reasons.append(
                f"no reference for {len(absent)} of {len(keys)} cases: {hint}"
            )
        return reasons

    def all_refused(self, planned: PlannedCheck) -> bool:
        """Is every missing case one that the reference refused with a 4xx?"""
        missing = {job.case.key() for job in planned.jobs} - set(self.answers)
        return bool(missing) and missing <= self.refused


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

    def __init__(self, references: References, judge: Judge, probes: list[Outcome]):
        self.references, self.judge, self.probes = references, judge, probes
        self._seen: set[tuple[str, str]] = set()

    async def look(
        self,
        planned: PlannedCheck,
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
            self.references.display.say(f"looking closer at {key} on {label}")
            for name in diagnose.PROBES:
                await self._ask(server, jobs[key], name)
            if reference is not None and not reference.down:
                await self._ask(reference, jobs[key], diagnose.REFERENCE_AGAIN)

    async def _ask(self, server: Server, job: Job, name: str) -> None:
        options = Options(top=self.references.top, stream=name == diagnose.SOLO)
        await emptied(server)
        try:
            sample, _ = await server.ask(job.case, options, self.references.reconnect_s)
        except (Refused, Failed):
            return
        outcome = self.judge(server, job, "probe", sample, probe=name)
        self.probes.append(outcome)
        self.references.writer.outcome(outcome)
