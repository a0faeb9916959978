# SPDX-License-Identifier: Apache-2.0
"""Speed of one prompt against draft length, for every drafter configuration.

Ten runs of 1,500 tokens for every draft length from 1 to 15. The draft length is a
setting of the server: either each length has a running server of its own, or a command
line is started for each.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from sglang_exact.bench import prompts, provenance, stats
from sglang_exact.bench import servers as serving
from sglang_exact.bench.drive import CannotRun, shorter
from sglang_exact.bench.leaderboard import launch
from sglang_exact.bench.leaderboard.run_log import Line, RunLog
from sglang_exact.bench.leaderboard.tables import summarize
from sglang_exact.bench.run import BenchRun, Recorder, RunError, load
from sglang_exact.bench.servers import Address, Served
from sglang_exact.client.answer import STREAMED, Request, Sample
from sglang_exact.view.console import Display
from sglang_exact.view.output import now

WARM_UP_TOKENS = 64
# What --draft-lengths changes, and so may differ inside one configuration.
BY_LENGTH = (
    "speculative_num_steps",
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
    # A drafter may have a folder for every block size.
    "speculative_draft_model_path",
)
GIVE_UP = 2
"""Failed runs in a row after which a server is left."""


@dataclass(frozen=True, slots=True)
class Target:
    """One configuration at one draft length: a running server, or a template.

    `length` is None for a running server that has not been asked yet.
    """

    configuration: str
    length: int | None
    address: Address | None = None
    template: launch.Template | None = None

    @property
    def name(self) -> str:
        """For people."""
        if self.length is None:
            return self.configuration
        return f"{self.configuration}, {self.length} drafts"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. `prompt_file` and `prompt` as in `prompts.one`."""

    runs: int = 10
    max_new_tokens: int = 1500
    prompt_file: Path | None = None
    prompt: str | None = None
    seed: int = 42

    def setup(self, ids: Sequence[int], machine: Sequence[str] = ()) -> str:
        """Hash of what decides whether two runs may be compared: the prompt, the
        number of tokens, and the GPUs of `machine` where they are known."""
        what = [list(ids), self.max_new_tokens, "greedy", "ignore_eos", *machine]
        blob = orjson.dumps(what)
        return hashlib.sha256(blob).hexdigest()[:32]


def targets(
    addresses: Sequence[Address],
    templates: Sequence[launch.Template],
    lengths: Sequence[int],
    plain: str,
) -> list[Target]:
    """Everything to measure, plain decoding first.

    A running server named NAME@TEXT belongs to the configuration NAME.
    """
    found = []
    for address in addresses:
        name = address.name.partition("@")[0]
        length = 0 if name == plain else None
        found.append(Target(name, length, address=address))
    for template in templates:
        if template.name == plain:
            found.append(Target(plain, 0, template=template))
            continue
        found += [Target(template.name, n, template=template) for n in lengths]
    return sorted(found, key=lambda target: target.configuration != plain)


@dataclass(slots=True)
class Board:
    """A leaderboard being measured."""

    plan: Plan
    log: RunLog
    recorder: Recorder
    display: Display
    plain: str
    key: str | None = None
    timeout: float = 1800.0
    start_timeout: float = 1800.0
    problems: list[str] = field(default_factory=list)
    _ids: tuple[int, ...] = ()
    _setup: str = ""

    async def measure(self, everything: Sequence[Target]) -> list[str]:
        """Run what is not in the log yet; returns what went wrong on the way.

        A configuration that does not start is reported and left out; the others go on.
        """
        for target in everything:
            if self._is_done(target):
                self.display.say(f"{target.name}: all runs are in {self.log.path}")
                continue
            try:
                async with self._open(target) as served:
                    await self._target(target, served)
            except CannotRun as error:
                self.problems.append(f"{target.name}: {error}")
                self.display.say(f"{target.name}: {error}")
            finally:
                # Also when the run is interrupted: the log has more than the record.
                self._summarize()
        self._summarize()
        return self.problems

    def _summarize(self) -> None:
        rows, exactness = summarize(self.log.lines, self.plain)
        self.recorder.run.rows = rows
        self.recorder.run.exactness = exactness
        self.recorder.save()

    def _is_done(self, target: Target) -> bool:
        if target.length is None:
            return False
        done = self.log.done(target.configuration, target.length)
        return done >= set(range(1, self.plan.runs + 1))

    @asynccontextmanager
    async def _open(self, target: Target) -> AsyncIterator[Served]:
        async with AsyncExitStack() as stack:
            address = target.address
            if target.template is not None:
                log = self.log.path.with_suffix(f".{target.configuration}.log")
                self.display.say(f"{target.name}: starting, log in {log}")
                started = await stack.enter_async_context(
                    launch.Launched(
                        target.template,
                        target.length or 0,
                        log,
                        key=self.key,
                        timeout=self.start_timeout,
                    )
                )
                address = Address(target.configuration, started.url, self.key)
            if address is None:
                raise ValueError("a target has neither an address nor a template")
            (served,) = await serving.open_all(stack, [address], timeout=self.timeout)
            yield served

    async def _target(self, target: Target, served: Served) -> None:
        length = await self._prepare(target, served)
        known = self.log.done(target.configuration, length)
        todo = [n for n in range(1, self.plan.runs + 1) if n not in known]
        tokens = self.plan.max_new_tokens
        self.display.begin(
            f"{target.configuration}, {length} drafts", len(todo) * tokens
        )
        failed = 0
        for number in todo:
            await serving.flush(served, target.name, self.recorder.note)
            answer = await served.client.ask(self._request(tokens), STREAMED)
            self.display.advance(tokens)
            wrong = answer.error or shorter(answer, tokens)
            if answer.sample is None or wrong:
                failed += 1
                text = f"{target.name}, run {number}: {wrong}"
                self.problems.append(text)
                # A later call asks again: that it failed once stays known.
                self.recorder.note(f"failed: {text}")
                if failed >= GIVE_UP:
                    return
                continue
            failed = 0
            steps = [answer.sample.counters.verify]
            serving.needs_counters(served, steps)
            if target.configuration == self.plain:
                serving.needs_no_counters(served, steps)
            line = _line(target.configuration, length, number, answer.sample)
            self.log.append(
                line._replace(setup_sha256=self._setup, server=served.info.identity)
            )

    async def _prepare(self, target: Target, served: Served) -> int:
        """The prompt, a warm-up, and the draft length the server really has."""
        if not self._ids:
            plan = self.plan
            name, self._ids = await prompts.one(
                served, plan.prompt_file, plan.prompt, plan.seed
            )
            here = provenance.machine({"gpu": provenance.gpus()})
            self._setup = plan.setup(self._ids, here)
            self.log.check(self._setup)
            self.recorder.run.settings |= {
                "prompt": name,
                "prompt_tokens": len(self._ids),
                "prompt_sha256": prompts.digest(self._ids),
            }
        if target.configuration == self.plain:
            serving.check_plain(served)
        self._remember(served)
        warm = min(WARM_UP_TOKENS, self.plan.max_new_tokens)
        answer = await served.client.ask(self._request(warm), STREAMED)
        if answer.sample is None:
            raise CannotRun(f"server {served.name}: {answer.error}")
        if target.configuration == self.plain:
            return 0
        wrong = stats.contradictions([answer.sample])
        if wrong:
            raise CannotRun(f"server {served.name}: {wrong[0]}, nor a draft length")
        draft_tokens = answer.sample.counters.draft_tokens() or served.draft_tokens
        if draft_tokens is None:
            raise CannotRun(
                f"server {served.name}: found neither spec_verify_ct in its answers "
                "nor a number of draft tokens in /server_info; expected a server that "
                "speculates"
            )
        if target.length is not None and draft_tokens - 1 != target.length:
            raise CannotRun(
                f"server {served.name}: found {draft_tokens - 1} drafts per verify "
                f"step, expected {target.length}; fix: use {{draft_tokens}} for "
                "--speculative-num-draft-tokens, which counts the committed token"
            )
        return draft_tokens - 1

    def _remember(self, served: Served) -> None:
        run = self.recorder.run
        if not run.provenance:
            run.provenance = provenance.collect([], {"prompt": self.plan.seed})
        name, draft_tokens = served.name.partition("@")[0], served.draft_tokens
        for known in run.provenance["servers"]:
            if known["name"].partition("@")[0] != name:
                continue
            tokens = known["speculative"].get("speculative_num_draft_tokens")
            free = BY_LENGTH if tokens != draft_tokens else ()
            lines = provenance.apart(known, served.facts, free)
            if lines:
                raise CannotRun(
                    f"server {served.name}: found another set-up than in earlier runs "
                    f"of {name} ({'; '.join(lines)}); expected one for one "
                    "configuration; fix: give it another name"
                )
        if served.facts not in run.provenance["servers"]:
            run.provenance["servers"].append(served.facts)
        for text in serving.setup_notes([served]):
            self.recorder.note(text)

    def _request(self, tokens: int) -> Request:
        return Request("leaderboard", tokens, ids=self._ids, ignore_eos=True)


def _line(configuration: str, length: int, number: int, sample: Sample) -> Line:
    wall, counters = sample.latency_s, sample.counters
    tokens = len(sample.ids)
    verify = counters.verify if stats.consistent(sample) else None
    accepted = None
    if verify and counters.correct is not None:
        accepted = counters.correct / verify
    return Line(
        created=now(),
        configuration=configuration,
        draft_length=length,
        run=number,
        tokens=tokens,
        wall_s=wall,
        tok_s=tokens / wall,
        ttft_s=sample.ttft_s,
        decode_tok_s=sample.decode_tok_s,
        verify=verify,
        acceptance_length=tokens / verify if verify else None,
        accepted_per_verify=accepted,
        ids_sha256=prompts.digest(sample.ids),
        setup_sha256="",
        server="",
    )


def go_on(run: BenchRun, path: Path, log: RunLog) -> None:
    """Keep what an earlier record at `path` says of the runs that are in the log.

    Raises RunError if there is a file of another kind, or a record of runs that the log
    does not hold.
    """
    if not path.exists() or not path.stat().st_size:
        return
    old = load(path)
    here = {(r["configuration"], r["draft_length"]): r["runs"] for r in run.rows}
    if old.verb != run.verb or any(
        here.get((row.get("configuration"), row.get("draft_length")), 0)
        < row.get("runs", 0)
        for row in old.rows
    ):
        raise RunError(
            f"{path}: found a record of {old.verb} with measurements that {log.path} "
            "does not hold; expected the record of that run log; fix: name another "
            "--output-file, or the --csv of that record"
        )
    run.provenance = old.provenance
    run.settings = {**old.settings, **run.settings}
    run.notes = list(dict.fromkeys(old.notes + run.notes))
    run.created = old.created


def planned_tokens(plan: Plan, log: RunLog, everything: Sequence[Target]) -> int:
    """At most so many tokens are still to be generated."""
    known: dict[Any, int] = {}
    for target in everything:
        if target.length is not None:
            known[target] = len(log.done(target.configuration, target.length))
    left = sum(max(plan.runs - known.get(t, 0), 0) for t in everything)
    return left * plan.max_new_tokens
