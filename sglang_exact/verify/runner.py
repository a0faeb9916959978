# SPDX-License-Identifier: Apache-2.0
"""Ask everything in the plan, compare each answer, and judge each arm."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import NamedTuple

from sglang_exact.client import facts as server_facts
from sglang_exact.client.answer import Sample
from sglang_exact.verify import claims
from sglang_exact.verify.arms import (
    REFERENCE,
    RESTARTED,
    START_HINTS,
    WIDTH,
)
from sglang_exact.verify.compare import compare, not_finite
from sglang_exact.verify.in_flight import InFlight, Neighbours, Workers
from sglang_exact.verify.model import (
    COULD_NOT_RUN,
    DIFFERENT,
    DIVERGED,
    EQUAL,
    FAILED,
    NOT_EXERCISED,
    NOT_OFFERED,
    NOT_REACHED,
    REFUSED,
    VERIFIED,
    CheckResult,
    Outcome,
    Reference,
)
from sglang_exact.verify.plan import Job, Plan, PlannedCheck
from sglang_exact.verify.record import RecordLost, Writer
from sglang_exact.verify.reference import Prober, References, emptied
from sglang_exact.verify.servers import Server, Servers
from sglang_exact.view.console import Display

# A resumed run does not ask again what came out like this.
FINAL = (VERIFIED, DIVERGED, NOT_OFFERED)
# How long a restart command may return ahead of the restart, in seconds.
RESTART_GRACE_S = 60.0
SELF_REFERENCE = (
    "compared with this server's own answers one at a time: no plain reference was "
    "given (--reference URL or FILE)"
)


class RunOptions(NamedTuple):
    """How to run. Times are in seconds."""

    reconnect_s: float = 120.0
    restart_command: str | None = None
    restart_timeout_s: float = 1800.0
    self_reference: bool = False
    frozen_reference: bool = False
    hooks_off: tuple[str, ...] = ()


class Runner:
    """Runs a plan against servers; `references` and `done` come from a record."""

    def __init__(
        self,
        plan: Plan,
        servers: Servers,
        writer: Writer,
        display: Display,
        options: RunOptions,
        references: dict[str, Reference] | None = None,
        refusals: dict[str, str] | None = None,
        done: dict[str, CheckResult] | None = None,
    ):
        self.plan, self.servers, self.writer = plan, servers, writer
        self.display, self.options = display, options
        self.references = References(
            references or {},
            writer,
            display,
            plan.settings.top,
            options.reconnect_s,
            refusals or {},
        )
        self.done = dict(done or {})
        self.results: list[CheckResult] = []
        self.probes: list[Outcome] = []
        self.interrupted = False
        self.broken = ""
        self._prober = Prober(self.references, self.outcome, self.probes)

    async def run(self) -> None:
        """Record what the reference lacks, then run every arm in order.

        An interruption keeps what is there: `interrupted` is set and the rest of the
        arms is "not reached". So does a record that cannot be written: `broken`.
        """
        try:
            await self.record_references()
            for planned in self.plan.arms:
                await self._arm(planned)
        except RecordLost as error:
            self.broken = str(error)
        except asyncio.CancelledError:
            self.interrupted = True
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
        reached = {result.name for result in self.results}
        for planned in self.plan.arms:
            if planned.arm.name not in reached:
                arm = planned.arm
                self.results.append(CheckResult(arm.name, arm.title, NOT_REACHED))

    async def record_references(self) -> None:
        """Ask the reference for every case that the record does not hold yet."""
        if self.options.frozen_reference:
            return
        server = self.servers.reference or self.servers.tested
        await self.references.record(
            server, self.plan.cases(), self.options.self_reference
        )

    async def _arm(self, planned: PlannedCheck) -> None:
        arm = planned.arm
        before = self.done.get(arm.name)
        if before is not None and before.state in FINAL:
            self.results.append(before)
            return
        result = CheckResult(arm.name, arm.title, NOT_REACHED)
        self.results.append(result)
        servers = self._servers(planned)
        blocked = self._blocked(planned, servers)
        if blocked:
            off = self._not_offered(planned, servers)
            result.state = NOT_OFFERED if off else NOT_EXERCISED
            result.reasons = blocked
            self.writer.arm(result)
            return
        result.outcomes = self._keep(planned, before)
        neighbours = Neighbours(planned, self.plan, self.references.answers)
        restarted = None
        if arm.role == RESTARTED:
            restarted = await restart(
                servers[0], self.servers.tested, self.options, result, self.display
            )
        for server in servers:
            await self._drive(server, planned, result, neighbours)
        await self._judge(planned, result, servers, neighbours, restarted)
        self.writer.arm(result)

    def _servers(self, planned: PlannedCheck) -> list[Server]:
        found = self.servers.role(planned.arm.role)
        if planned.arm.role == RESTARTED and not found and self.options.restart_command:
            return [self.servers.tested]
        if planned.arm.role == REFERENCE:
            if self.options.self_reference:
                return []
            # A plain server that is tested against a record of a plain server.
            tested = self.servers.tested
            if not found and tested.info.speculative() is False:
                return [tested]
        return found

    def _blocked(self, planned: PlannedCheck, servers: list[Server]) -> list[str]:
        if planned.refusal:
            return [planned.refusal]
        if not servers:
            if planned.arm.role == REFERENCE and self.options.frozen_reference:
                return [
                    "the reference is a record; no plain server is there to be asked"
                ]
            return [START_HINTS[planned.arm.role]]
        return self.references.lacking(planned)

    def _not_offered(self, planned: PlannedCheck, servers: list[Server]) -> bool:
        """Is what blocks the arm something that nobody offers, rather than a lack?"""
        if planned.arm.role == REFERENCE and not servers:
            return self.options.frozen_reference
        optional = planned.arm.cases in claims.OPTIONAL
        return optional and self.references.all_refused(planned)

    def _keep(self, planned: PlannedCheck, before: CheckResult | None) -> list[Outcome]:
        """Answers of an interrupted run that still count.

        In an arm about neighbours the traffic is the point, so it starts afresh; one
        at a time and the long row of repeats go on where they stopped.
        """
        if before is None:
            return []
        arm = planned.arm
        if before.state not in (NOT_REACHED, COULD_NOT_RUN):
            self.writer.arm_restart(arm.name)
            return []
        if arm.in_flight > 1 and arm.cases != "repeats":
            self.writer.arm_restart(arm.name)
            return []
        return [o for o in before.outcomes if o.status in (EQUAL, DIFFERENT)]

    async def _drive(
        self,
        server: Server,
        planned: PlannedCheck,
        result: CheckResult,
        neighbours: Neighbours,
    ) -> None:
        arm = planned.arm
        kept = {(o.server, o.index) for o in result.outcomes}
        todo = deque(j for j in planned.jobs if (server.label, j.index) not in kept)
        tokens = sum(job.case.max_new_tokens for job in todo)
        self.display.begin(arm.name, tokens)
        if arm.flush and (problem := await emptied(server)):
            result.notes.append(problem)
        seen, counter = len(server.returns), InFlight()
        run = Workers(
            self.references, self.outcome, server, planned, result, todo, counter
        )
        started = neighbours.start(server, counter, self.options.reconnect_s)
        try:
            async with asyncio.TaskGroup() as group:
                pause = self._stagger(planned)
                for number in range(min(arm.in_flight, len(todo))):
                    group.create_task(run.worker(number * pause))
        except* RecordLost as lost:
            raise RecordLost(str(lost.exceptions[0])) from lost
        finally:
            await neighbours.stop(started)
        result.notes += server.returns[seen:]
        if note := await server.check_identity():
            result.notes.append(note)

    def _stagger(self, planned: PlannedCheck) -> float:
        """Seconds between arrivals, short enough that all of them overlap.

        Speculation may be several times as fast as the reference was, hence the 8.
        """
        arm = planned.arm
        known = [self.references.answers[job.case.key()].answer for job in planned.jobs]
        fastest = min((answer.latency_s for answer in known), default=0.0)
        return min(arm.stagger_s, fastest / (8 * arm.in_flight))

    def outcome(
        self, server: Server, job: Job, name: str, sample: Sample, probe: str = ""
    ) -> Outcome:
        """Compare one answer with its reference."""
        key = job.case.key()
        difference = compare(sample, self.references.answers[key].answer)
        return Outcome(
            arm=name,
            case=key,
            index=job.index,
            server=server.label,
            status=EQUAL if difference is None else DIFFERENT,
            difference=difference,
            answer=None if difference is None and not probe else sample,
            digest=sample.digest(),
            tokens=len(sample.ids),
            prompt_tokens=sample.prompt_tokens,
            cached_tokens=sample.cached_tokens,
            counters=sample.counters,
            chunks=len(sample.chunks),
            not_finite=not_finite(job.case, sample),
            has_logprobs=bool(sample.logprobs),
            finish=sample.finish,
            latency_s=sample.latency_s,
            rid=sample.rid,
            probe=probe,
        )

    async def _judge(
        self,
        planned: PlannedCheck,
        result: CheckResult,
        servers: list[Server],
        neighbours: Neighbours,
        restarted: str | None,
    ) -> None:
        different = [o for o in result.outcomes if o.status == DIFFERENT]
        evidence = claims.Evidence(
            planned.arm,
            result.outcomes,
            neighbours.outcomes,
            [server.info for server in servers],
            self.references.answers,
            restarted,
            len(planned.jobs) * len(servers),
            self._other_widths(planned),
            {o.rid for r in self.results if r is not result for o in r.outcomes},
        )
        unmet = claims.unmet(evidence)
        taint = self._not_the_release(planned, servers)
        unmet += taint
        failed = [o for o in result.outcomes if o.status == FAILED]
        refused = [o for o in result.outcomes if o.status == REFUSED]
        said = list(dict.fromkeys(o.message for o in (*failed, *refused)))[:3]
        if different:
            result.state, result.reasons = DIVERGED, unmet
            await self._prober.look(planned, different, servers, self.servers.reference)
        elif failed:
            result.state = COULD_NOT_RUN
            result.reasons = [f"{len(failed)} requests failed", *said]
        elif unmet and (off := claims.not_offered(evidence)) and not taint:
            result.state, result.reasons = NOT_OFFERED, [off]
        elif unmet:
            result.state, result.reasons = NOT_EXERCISED, [*said, *unmet]
        elif self.options.self_reference:
            result.state, result.reasons = NOT_EXERCISED, [SELF_REFERENCE]
        else:
            result.state = VERIFIED
        result.notes += neighbours.notes()

    def _not_the_release(
        self, planned: PlannedCheck, servers: list[Server]
    ) -> list[str]:
        """Why equal answers would not be evidence, from what the servers say."""
        reference = self.servers.reference
        asked = [*servers, *([reference] if reference else [])]
        first = self.servers.tested.info
        others = servers if planned.arm.role == RESTARTED else []
        return [
            *self.options.hooks_off,
            *(
                f"the {server.label} server is another one than the tested: {change}"
                for server in others
                for change in server_facts.changes(first, server.info)
            ),
            *(
                f"the {server.label} server came back with another set-up: {change}"
                for server in {s.label: s for s in asked}.values()
                for change in server.changed
            ),
        ]

    def _other_widths(self, planned: PlannedCheck) -> set[int]:
        if planned.arm.role != WIDTH:
            return set()
        tested = self.servers.tested.label
        return {
            width
            for result in self.results
            for o in result.outcomes
            if o.server == tested and (width := o.counters.draft_tokens())
        }


async def restart(
    server: Server,
    tested: Server,
    options: RunOptions,
    result: CheckResult,
    shown: Display,
) -> str | None:
    """Restart `server` if there is a command for it.

    Returns what shows that another process answers now, None if nothing does. What went
    wrong on the way is noted in `result`.
    """
    command, limit = options.restart_command, options.restart_timeout_s
    if server is not tested or command is None:
        both = {server.info.identity, tested.info.identity}
        other = len(both) == 2 and "" not in both
        return "a second process of the server" if other else None
    shown.say("running the restart command")
    if problem := await _run(command, limit):
        result.notes.append(problem)
    until = time.monotonic() + min(limit, RESTART_GRACE_S)
    # The command may return before the old process has gone.
    while True:
        if not await server.client.wait_ready(limit):
            server.down = "the server did not answer after the restart command"
            return None
        changed = await server.check_identity()
        if changed or time.monotonic() > until:
            return changed
        await asyncio.sleep(0.2)


async def _run(command: str, limit: float) -> str | None:
    """Run a shell command; what is to be said about its end, if anything."""
    try:
        # stdout belongs to the result.
        process = await asyncio.create_subprocess_shell(command, stdout=2)
    except OSError as error:
        return f"the restart command cannot be run: {error.strerror}"
    try:
        status = await asyncio.wait_for(process.wait(), limit)
    except TimeoutError:
        # It may be the server itself, in the foreground: left alone.
        return f"the restart command did not end within {limit:g} s and still runs"
    return f"the restart command ended with status {status}" if status else None
