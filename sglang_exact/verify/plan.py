# SPDX-License-Identifier: Apache-2.0
"""What will be asked: the arms, their cases, and the reference cases behind them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import orjson

from sglang_exact.verify import arms as arm_table
from sglang_exact.verify import prompts as prompt_sets
from sglang_exact.verify.arms import LONG, SUITES, Arm
from sglang_exact.verify.model import Case, Manner, Prompt

# Tokens generated for each built-in prompt. standard: 24 x 512 = 12,288 in all.
SUITE_TOKENS = {"quick": 128, "standard": 512, "full": 1024}
# The full suite takes a few prompts further: drift has been reported to start between
# tokens 200 and 400, and one state bug only past 1,000.
DEEP_TOKENS = 4096
DEEP_PROMPTS = (
    "chat-cat-tetris-thinking",
    "code-interval-tree",
    "prose-soil-essay",
    "repeat-table",
)
LONG_TOKENS = 64
REPEAT_TOKENS = 64
REPEAT_PROMPTS = 8
SEEDS = (11, 12)
SEED_PROMPTS = 6
SEED_TEMPERATURE = 0.8
STOP_TOKENS = 256
STOP_PROMPTS = 12
# Every 64th id ends the generation, so that it ends somewhere on any model, also on one
# with random weights that never says EOS.
STOP_EVERY = 64


class Settings(NamedTuple):
    """What the user chose. `tokens` None: the suite's own length."""

    suite: str = "standard"
    arms: tuple[str, ...] = ()
    repeats: int = 1200
    tokens: int | None = None
    prompts: Path | None = None
    num_prompts: int | None = None
    seed: int = 20261
    top: int = 5


@dataclass(frozen=True, slots=True)
class Job:
    """One request of an arm."""

    case: Case
    index: int
    manner: Manner


class PlannedArm(NamedTuple):
    """An arm with its requests; `refusal` says why it cannot be asked at all."""

    arm: Arm
    jobs: tuple[Job, ...]
    refusal: str = ""

    def tokens(self) -> int:
        """Upper bound of generated tokens, for the progress display."""
        return sum(job.case.max_new_tokens for job in self.jobs)


class Plan(NamedTuple):
    """Everything that will be asked, a function of Settings and the vocabulary."""

    settings: Settings
    arms: tuple[PlannedArm, ...]
    by_ids: bool
    vocab_size: int | None

    def cases(self) -> dict[str, Case]:
        """Every case that needs a reference answer, by key, in the order of use."""
        found: dict[str, Case] = {}
        for planned in self.arms:
            for job in planned.jobs:
                found.setdefault(job.case.key(), job.case)
        return found

    def digest(self) -> str:
        """Hash of the plan: a run may be resumed only with the same one."""
        blob = orjson.dumps(
            [
                [p.arm.name, [[j.case.key(), j.index, list(j.manner)] for j in p.jobs]]
                for p in self.arms
            ]
        )
        return hashlib.sha256(blob).hexdigest()[:16]


def build(settings: Settings, *, by_ids: bool, vocab_size: int | None) -> Plan:
    """Build the plan.

    `by_ids`: the server has no tokenizer, so every prompt is ids. Raises ValueError for
    an unknown arm or suite, PromptError for a prompt file that cannot be used.
    """
    chosen = (
        arm_table.by_name(list(settings.arms))
        if settings.arms
        else arm_table.of_suite(settings.suite)
    )
    if settings.suite not in SUITES:
        raise ValueError(
            f"found suite {settings.suite!r}; expected one of {', '.join(SUITES)}"
        )
    builder = _Builder(settings, by_ids, vocab_size)
    planned = tuple(builder.arm(arm) for arm in chosen)
    return Plan(settings, planned, by_ids, vocab_size)


class _Builder:
    def __init__(self, settings: Settings, by_ids: bool, vocab_size: int | None):
        self.settings = settings
        self.by_ids = by_ids
        self.vocab_size = vocab_size
        self.prompts, self.refusal = self._prompts()
        self.base = [Case(p, self._length(p)) for p in self.prompts]

    def _prompts(self) -> tuple[list[Prompt], str]:
        settings = self.settings
        if settings.prompts is not None:
            found = prompt_sets.load_jsonl(settings.prompts)
            if self.by_ids and any(p.ids is None for p in found):
                raise prompt_sets.PromptError(
                    f"{settings.prompts}: the server has no tokenizer, so every "
                    "line needs input_ids"
                )
        elif not self.by_ids:
            found = prompt_sets.built_in()
        elif self.vocab_size is None:
            return [], "the server takes ids only and its vocabulary size is " + UNKNOWN
        else:
            found = prompt_sets.seeded_ids(self.vocab_size, settings.seed)
        return found[: settings.num_prompts], ""

    def _length(self, prompt: Prompt) -> int:
        if self.settings.tokens is not None:
            return self.settings.tokens
        if prompt.max_new_tokens is not None:
            return prompt.max_new_tokens
        if self.settings.suite == "full" and prompt.id in DEEP_PROMPTS:
            return DEEP_TOKENS
        return SUITE_TOKENS[self.settings.suite]

    def _short(self, limit: int, prompt: Prompt) -> int:
        """`limit`, or less where the user asked for less."""
        own = self.settings.tokens or prompt.max_new_tokens
        return min(limit, own or limit)

    def cases(self, arm: Arm) -> tuple[list[Case], str]:
        """The cases of an arm, or why there are none."""
        if arm.cases in LONG:
            if self.vocab_size is None:
                return [], "the vocabulary size is " + UNKNOWN
            length, count = LONG[arm.cases]
            made = [
                prompt_sets.id_prompt(
                    f"{arm.cases}-{i}", length, self.vocab_size, self.settings.seed
                )
                for i in range(count)
            ]
            return [Case(p, self._short(LONG_TOKENS, p)) for p in made], ""
        if self.refusal:
            return [], self.refusal
        if arm.cases == "repeats":
            few = self.prompts[:REPEAT_PROMPTS]
            return [Case(p, self._short(REPEAT_TOKENS, p)) for p in few], ""
        if arm.cases == "seeds":
            return [
                Case(p, self._short(128, p), temperature=SEED_TEMPERATURE, seed=seed)
                for p in self.prompts[:SEED_PROMPTS]
                for seed in SEEDS
            ], ""
        if arm.cases == "stops":
            size = self.vocab_size
            stop = None if size is None else (STOP_EVERY - 1, size, STOP_EVERY)
            return [
                Case(p, self._short(STOP_TOKENS, p), ignore_eos=False, stop_ids=stop)
                for p in self.prompts[:STOP_PROMPTS]
            ], ""
        return self.base, ""

    def arm(self, arm: Arm) -> PlannedArm:
        """The requests of one arm."""
        cases, refusal = self.cases(arm)
        if not cases:
            return PlannedArm(arm, (), refusal or "there is no prompt for it")
        manner = Manner(arm.logprobs, self.settings.top, arm.stream)
        total = len(cases) * arm.rounds
        if arm.cases == "repeats":
            total = self.settings.repeats
        elif arm.in_flight > 4:
            total = max(total, 2 * arm.in_flight)
        jobs = tuple(Job(cases[i % len(cases)], i, manner) for i in range(total))
        return PlannedArm(arm, jobs)


UNKNOWN = "unknown: pass --vocab-size N"
