# SPDX-License-Identifier: Apache-2.0
"""Decode speed and time to first token at a few prompt lengths, server by server.

Every round asks every server the same prompt, one request in flight, so that what
changes on the machine over time changes for all of them: ratios are taken inside a
round. Times come from the arrival of streamed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_exact.bench import exactness, prompts, stats
from sglang_exact.bench import servers as serving
from sglang_exact.bench.drive import CannotRun, shorter
from sglang_exact.bench.exactness import Tally
from sglang_exact.bench.run import Recorder
from sglang_exact.bench.servers import Served
from sglang_exact.client.answer import (
    STREAMED,
    STREAMED_LOGPROBS,
    Answer,
    Request,
    Sample,
)
from sglang_exact.view.console import Display

LENGTHS = (64, 2048, 131072)
"""Short, 2k and 128k."""

WARM_UP_TOKENS = 8
IN_TURN = "every round asks every server in turn"
ONE_BY_ONE = "server by server"
"""Of a record whose servers did not take turns: its ratios are of medians."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask.

    Attributes:
        lengths: prompt tokens.
        rounds: requests to every server at every length.
        max_new_tokens: of every answer; the end token is ignored.
        prompt_file: text to make the prompts of; None for `prompts.text_of_length`'s.
        flush: empty the prefix cache before every request, so that the time to first
            token is that of the whole prompt.
    """

    lengths: Sequence[int] = LENGTHS
    rounds: int = 5
    max_new_tokens: int = 256
    prompt_file: Path | None = None
    seed: int = 42
    logprobs: bool = False
    flush: bool = True

    def settings(self) -> dict[str, Any]:
        """What a record keeps of the plan."""
        return {
            "prompt_lengths": list(self.lengths),
            "rounds": self.rounds,
            "max_new_tokens": self.max_new_tokens,
            "prompt_file": self.prompt_file.name if self.prompt_file else None,
            "logprobs": self.logprobs,
            "flush": self.flush,
            "temperature": 0,
            "ignore_eos": True,
            "in_flight": 1,
            "order": IN_TURN,
        }

    def tokens(self, servers: int) -> int:
        """At most so many tokens will be generated."""
        asked = self.rounds * self.max_new_tokens + WARM_UP_TOKENS
        return asked * len(self.lengths) * servers


@dataclass(slots=True)
class _Cell:
    """One server at one prompt length."""

    served: Served
    answers: dict[int, Answer] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    not_flushed: str = ""

    def values(self, name: str) -> dict[int, float]:
        """`decode_tok_s` or `ttft_s` by round."""
        pairs = ((n, getattr(a.sample, name)) for n, a in self.answers.items())
        return {n: value for n, value in pairs if value is not None}


def check(servers: Sequence[Served], plan: Plan) -> None:
    """Raise CannotRun with every server whose context is too short for the plan."""
    need = max(plan.lengths) + plan.max_new_tokens
    problems = []
    for served in servers:
        limit = served.info.fields.get("context_length")
        if type(limit) is int and limit < need:
            problems.append(
                f"server {served.name}: found a context of {limit} tokens, expected "
                f"{need}; fix: shorter --prompt-lengths, or --context-length"
            )
    if problems:
        raise CannotRun("; ".join(problems))


@dataclass(slots=True)
class Part:
    """All servers at one prompt length; servers that fail the warm-up are left out."""

    length: int
    made_of: str
    ids: tuple[int, ...]
    plan: Plan
    plain: str | None
    base: str
    display: Display
    cells: dict[str, _Cell] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    reference: Sample | None = None

    async def warm_up(self, servers: Sequence[Served]) -> None:
        """One short request to every server, not timed."""
        tokens = self.plan.rounds * self.plan.max_new_tokens + WARM_UP_TOKENS
        self.display.begin(f"{self.length} prompt tokens", len(servers) * tokens)
        for served in servers:
            answer = await served.client.ask(self._request(WARM_UP_TOKENS), STREAMED)
            self.display.advance(WARM_UP_TOKENS)
            if answer.sample is None:
                self._failed(served.name, answer.error)
                continue
            steps = [answer.sample.counters.verify]
            try:
                serving.needs_counters(served, steps)
                if served.name == self.plain:
                    serving.needs_no_counters(served, steps)
            except CannotRun as error:
                self._failed(served.name, str(error))
                continue
            self.cells[served.name] = _Cell(served)
        if self.base not in self.cells:
            self._failed(self.base, "no ratios without it")

    async def round(self, index: int) -> None:
        """One request to every server."""
        options = STREAMED_LOGPROBS if self.plan.logprobs else STREAMED
        for name, cell in self.cells.items():
            if self.plan.flush:
                flushed = await cell.served.client.flush()
                cell.not_flushed = flushed or cell.not_flushed
            request = self._request(self.plan.max_new_tokens)
            answer = await cell.served.client.ask(request, options)
            self.display.advance(self.plan.max_new_tokens)
            wrong = answer.error or shorter(answer, self.plan.max_new_tokens)
            if answer.sample is None or wrong:
                self._failed(f"{name}, round {index + 1}", wrong)
                continue
            for text in stats.contradictions([answer.sample]):
                self._failed(f"{name}, round {index + 1}", text)
            cell.answers[index] = answer
            if name == self.plain and self.reference is None:
                self.reference = answer.sample
            else:
                cell.tally.add(f"round {index + 1}", answer.sample, self.reference)

    def _request(self, tokens: int) -> Request:
        return Request("decode", tokens, ids=self.ids, ignore_eos=True)

    def _failed(self, what: str, why: str) -> None:
        self.problems.append(f"{self.length} prompt tokens, {what}: {why}")

    def rows(self) -> list[dict[str, Any]]:
        """One row per server that answered."""
        base = self.cells.get(self.base)
        return [self._row(cell, base) for cell in self.cells.values() if cell.answers]

    def _row(self, cell: _Cell, base: _Cell | None) -> dict[str, Any]:
        speed, ttft = cell.values("decode_tok_s"), cell.values("ttft_s")
        samples = [a.sample for a in cell.answers.values() if a.sample is not None]
        accepted = stats.acceptance(samples)
        return {
            "prompt_tokens": self.length,
            "prompt": self.made_of,
            "prompt_sha256": prompts.digest(self.ids),
            "server": cell.served.name,
            "plain": cell.served.name == self.plain,
            "exact": bool(cell.served.info.exact),
            "draft_tokens": cell.served.draft_tokens,
            "rounds": len(samples),
            "decode_tok_s": _json(stats.spread(speed.values())),
            "ttft_s": _json(stats.spread(ttft.values())),
            "speed_ratio": _paired(speed, base.values("decode_tok_s") if base else {}),
            "ttft_ratio": _paired(ttft, base.values("ttft_s") if base else {}),
            "acceptance": accepted.to_json() if accepted else None,
            "cached_tokens": max((s.cached_tokens or 0 for s in samples), default=0),
            "exactness": cell.tally.to_json(),
            "cache_flush_error": cell.not_flushed or None,
        }


async def measure(
    servers: Sequence[Served],
    plain: str | None,
    base: str,
    plan: Plan,
    recorder: Recorder,
    display: Display,
) -> list[str]:
    """Ask everything; the rows of a length are saved after each of its rounds.

    `base` names the server that ratios are against. Returns what went wrong on the
    way. Raises CannotRun where nothing can be measured.
    """
    problems: list[str] = []
    # Plain first in every round: its answer is what the others are compared with.
    ordered = sorted(servers, key=lambda served: served.name != plain)
    for length in plan.lengths:
        made_of, ids = await _prompt(ordered[0], length, plan)
        part = Part(length, made_of, ids, plan, plain, base, display)
        await part.warm_up(ordered)
        kept = list(recorder.run.rows)
        for index in range(plan.rounds):
            try:
                await part.round(index)
            finally:
                # Also a round that is cut off: its answers count.
                recorder.run.rows = kept + part.rows()
                recorder.run.exactness = exactness.total(recorder.run.rows)
                recorder.save()
        problems += part.problems
    if not recorder.run.rows:
        raise CannotRun("; ".join(problems))
    return problems


async def _prompt(
    served: Served, length: int, plan: Plan
) -> tuple[str, tuple[int, ...]]:
    text = None
    if plan.prompt_file is not None:
        found = prompts.read(plan.prompt_file)
        if isinstance(found, tuple):
            times = -(-length // len(found))
            return f"ids of {plan.prompt_file.name}", (found * times)[:length]
        text = found
    return await prompts.text_of_length(served, length, plan.seed, text)


def _json(found: stats.Spread | None) -> dict[str, Any] | None:
    return found.to_json() if found else None


def _paired(mine: dict[int, float], base: dict[int, float]) -> dict[str, Any] | None:
    """Spread of the ratios round by round."""
    both = sorted(set(mine) & set(base))
    return _json(stats.spread(mine[n] / base[n] for n in both if base[n]))
