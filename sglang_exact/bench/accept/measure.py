# SPDX-License-Identifier: Apache-2.0
"""Speed-up and acceptance length on the usual data sets, with exactness.

The protocol is that of the public reference script of the DFlash drafters
(github.com/z-lab/dflash, dflash/benchmark.py): prompts in order, first turn only,
greedy, one flush, the first `concurrency` prompts as warm-up, then the timed ones;
tok/s is completion tokens over wall time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_exact.bench import servers as serving
from sglang_exact.bench import stats
from sglang_exact.bench.accept.answers import AnswerFile
from sglang_exact.bench.datasets import Dataset
from sglang_exact.bench.drive import CannotRun, Load, drive
from sglang_exact.bench.exactness import Tally, total
from sglang_exact.bench.run import Recorder
from sglang_exact.bench.servers import Served
from sglang_exact.client.answer import IDS_ONLY, WITH_LOGPROBS, Answer, Request, Sample
from sglang_exact.view.console import Display


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask.

    `thinking` is the chat template's switch, None for the template's own choice.
    """

    datasets: Sequence[Dataset]
    concurrency: Sequence[int] = (1, 8, 32)
    num_prompts: int = 128
    max_new_tokens: int = 2048
    thinking: bool | None = False
    logprobs: bool = False
    ignore_eos: bool = False

    def settings(self) -> dict[str, Any]:
        """What a record keeps of the plan."""
        return {
            "datasets": [d.to_json() for d in self.datasets],
            "concurrency": list(self.concurrency),
            "num_prompts": self.num_prompts,
            "max_new_tokens": self.max_new_tokens,
            "enable_thinking": self.thinking,
            "logprobs": self.logprobs,
            "ignore_eos": self.ignore_eos,
            "temperature": 0,
            "warm_up": "the first `concurrency` prompts, not timed",
        }


@dataclass(slots=True)
class Book:
    """The plain server's answers to one data set by request, and its speed, output
    tokens per second, by concurrency."""

    answers: dict[str, Sample] = field(default_factory=dict)
    tok_s: dict[int, float | None] = field(default_factory=dict)


def check(servers: Sequence[Served], plan: Plan) -> None:
    """Raise CannotRun with everything that will not work, before anything is asked."""
    problems = []
    for served in servers:
        texts = [d.name for d in plan.datasets if not d.by_ids]
        if served.by_ids and texts:
            problems.append(
                f"server {served.name}: found --skip-tokenizer-init and prompts as "
                f"text ({', '.join(texts)}); expected rows with input_ids; fix: serve "
                "with a tokenizer, or give --dataset-path NAME=FILE with input_ids"
            )
    if problems:
        raise CannotRun("; ".join(problems))


async def measure(
    servers: Sequence[Served],
    plain: str | None,
    plan: Plan,
    recorder: Recorder,
    answers: AnswerFile,
    display: Display,
) -> list[str]:
    """Ask everything that the record has no row of; rows go to it one by one.

    `answers` keeps those of the plain server. A server that stops answering is left
    out from then on. Returns what went wrong on the way. Raises CannotRun where nothing
    more can be measured: without the plain server, or without any.
    """
    # The plain server first: speed-up and exactness are against it.
    ordered = sorted(servers, key=lambda s: s.name != plain)
    problems: list[str] = []
    gone: set[str] = set()
    for dataset in plan.datasets:
        book = Book(
            dict(answers.of(dataset.name)), _speeds(recorder.run.rows, dataset.name)
        )
        for concurrency in plan.concurrency:
            for served in ordered:
                unit = Unit(served, served.name == plain, dataset, concurrency, plan)
                if unit.is_in(recorder.run.rows):
                    display.say(f"{unit.name}: is in {recorder.path}")
                    continue
                if served.name in gone:
                    problems.append(f"{unit.name}: left out")
                    continue
                before = dict(book.answers)
                try:
                    problems += await unit.run(book, recorder, display)
                except CannotRun as error:
                    gone.add(served.name)
                    if served.name == plain or len(gone) == len(ordered):
                        raise CannotRun("; ".join([*problems, str(error)])) from error
                    problems.append(f"{unit.name}: {error}")
                    display.say(problems[-1])
                    continue
                new = {k: s for k, s in book.answers.items() if before.get(k) is not s}
                answers.add(dataset.name, new)
    return problems


def _speeds(rows: Sequence[dict[str, Any]], dataset: str) -> dict[int, float | None]:
    """The plain server's by concurrency, of an earlier call."""
    return {
        row["concurrency"]: row["tok_s"]
        for row in rows
        if row["plain"] and row["dataset"] == dataset and not row["partial"]
    }


def failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Failed requests of rows that an earlier call measured: they stay failed."""
    return [
        f"{row['title']}, {row['concurrency']} in flight, {row['server']}: "
        f"{row['failed']} requests failed in an earlier call"
        for row in rows
        if row["failed"] and not row["partial"]
    ]


def repeats(plan: Plan) -> list[str]:
    """The sets that are too small for the plan, so that prompts are asked twice."""
    asked = plan.num_prompts + max(plan.concurrency)
    return [
        f"{data.title}: {asked} prompts are asked at {max(plan.concurrency)} in "
        f"flight, the set has {len(data.prompts)}: it starts over, and what is asked "
        "twice may be served from the prefix cache"
        for data in plan.datasets
        if len(data.prompts) < asked
    ]


def left_over(rows: Sequence[dict[str, Any]], plan: Plan, names: Sequence[str]) -> int:
    """At most so many tokens are still to be generated."""
    done = {
        (row["dataset"], row["concurrency"], row["server"])
        for row in rows
        if not row["partial"]
    }
    asked = [
        plan.num_prompts + concurrency
        for dataset in plan.datasets
        for concurrency in plan.concurrency
        for name in names
        if (dataset.name, concurrency, name) not in done
    ]
    return sum(asked) * plan.max_new_tokens


@dataclass(slots=True)
class Unit:
    """One data set at one concurrency on one server."""

    served: Served
    is_plain: bool
    dataset: Dataset
    concurrency: int
    plan: Plan

    @property
    def name(self) -> str:
        return f"{self.dataset.title}, {self.concurrency} in flight, {self.served.name}"

    def is_in(self, rows: Sequence[dict[str, Any]]) -> bool:
        """Whether this was measured before."""
        key = (self.dataset.name, self.concurrency, self.served.name)
        return any(
            (row["dataset"], row["concurrency"], row["server"]) == key
            for row in rows
            if not row["partial"]
        )

    def _requests(self) -> list[Request]:
        asked = self.dataset.take(self.plan.num_prompts + self.concurrency)
        return [
            replace(
                request,
                max_new_tokens=self.plan.max_new_tokens,
                ignore_eos=self.plan.ignore_eos,
                thinking=self.plan.thinking,
            )
            for request in asked
        ]

    async def run(self, book: Book, recorder: Recorder, display: Display) -> list[str]:
        """Warm up, measure, append a row; an interrupted one says so."""
        requests, plan = self._requests(), self.plan
        display.begin(self.name, len(requests) * plan.max_new_tokens)
        options = WITH_LOGPROBS if plan.logprobs else IDS_ONLY

        def advance(answer: Answer) -> None:
            display.advance(plan.max_new_tokens)

        flushed = await serving.flush(self.served, self.served.name, recorder.note)
        warm = requests[: self.concurrency]
        load = await drive(
            self.served.client, warm, self.concurrency, options=options, done=advance
        )
        steps = [s.counters.verify for s in load.samples]
        serving.needs_counters(self.served, steps)
        if self.is_plain:
            serving.needs_no_counters(self.served, steps)
        answers: list[Answer] = []

        def keep(answer: Answer) -> None:
            answers.append(answer)
            advance(answer)

        began = time.monotonic()
        try:
            load = await drive(
                self.served.client,
                requests[self.concurrency :],
                self.concurrency,
                options=options,
                done=keep,
            )
        except (asyncio.CancelledError, CannotRun):
            cut = Load(tuple(answers), time.monotonic() - began)
            if cut.samples:
                _keep(recorder, self._row(cut, book, flushed) | {"partial": True})
            raise
        for text in stats.contradictions(load.samples):
            recorder.note(f"{self.name}: {text}")
        _keep(recorder, self._row(load, book, flushed))
        if self.is_plain:
            book.tok_s[self.concurrency] = load.tok_s
            book.answers |= {a.request: a.sample for a in load.answers if a.sample}
        return [f"{self.name}: {text}" for text in load.errors]

    def _row(self, load: Load, book: Book, flushed: str | None) -> dict[str, Any]:
        tally = Tally()
        for answer in load.answers:
            if answer.sample is None:
                continue
            tally.add(answer.request, answer.sample, book.answers.get(answer.request))
        accepted = stats.acceptance(load.samples)
        latency = stats.spread(s.latency_s for s in load.samples)
        return {
            "dataset": self.dataset.name,
            "title": self.dataset.title,
            "concurrency": self.concurrency,
            "server": self.served.name,
            "plain": self.is_plain,
            "draft_tokens": self.served.draft_tokens,
            "requests": len(load.answers),
            "failed": len(load.answers) - len(load.samples),
            "errors": load.errors[:5],
            "output_tokens": load.tokens,
            "wall_s": load.wall_s,
            "tok_s": load.tok_s,
            "speed_up": None
            if self.is_plain
            else stats.ratio(load.tok_s, book.tok_s.get(self.concurrency)),
            "latency_s": latency.to_json() if latency else None,
            "acceptance": accepted.to_json() if accepted else None,
            "exactness": tally.to_json(),
            "cache_flushed": flushed is None,
            "cache_flush_error": flushed,
            "partial": False,
        }


_KEY = ("dataset", "concurrency", "server")


def _keep(recorder: Recorder, row: dict[str, Any]) -> None:
    """Add a row; what an earlier call cut off makes way for it, if it is not less."""
    cut = [r for r in recorder.run.rows if all(r[k] == row[k] for k in _KEY)]
    if row["partial"] and any(r["requests"] > row["requests"] for r in cut):
        return
    others = [r for r in recorder.run.rows if r not in cut]
    recorder.run.exactness = total([*others, row])
    recorder.add(row, *_KEY)
