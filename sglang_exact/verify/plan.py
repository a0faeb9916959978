# SPDX-License-Identifier: Apache-2.0
"""What will be asked: the arms, their cases, and the reference cases behind them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from sglang_exact.client.answer import Case, Options, Prompt
from sglang_exact.verify import arms as arm_table
from sglang_exact.verify import prefixes
from sglang_exact.verify import prompts as prompt_sets
from sglang_exact.verify.arms import LONG, SUITES, Check

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
SEED_TOKENS = 128
STOP_TOKENS = 256
STOP_PROMPTS = 12
# Every 64th id ends the generation, so that it ends somewhere on any model, also on one
# with random weights that never says EOS.
STOP_EVERY = 64
# Rare letters, in another order for every prompt: where one block brings two of them,
# the order of the list must not decide.
STOP_STRINGS = ("z", "q", "x", "j", "k", "v", "w")
PENALTY_TOKENS = 64
PENALTY_PROMPTS = 4
# Makes two tokens repeat, so that penalties bite within a few tokens on any model.
LIKELY = {"17": 20.0, "23": 19.5}
PENALTIES: tuple[dict[str, Any], ...] = (
    {"logit_bias": LIKELY},
    {"frequency_penalty": 0.6, "presence_penalty": 0.3},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4, "logit_bias": LIKELY},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": LIKELY},
)
LONG_REPEATS = 8


class Settings(NamedTuple):
    """What the user chose. `tokens` None: the suite's own length.

    `max_prompt_tokens` cuts the long prompts; an arm that claims more tokens than it
    then has is "not exercised".
    """

    suite: str = "standard"
    arms: tuple[str, ...] = ()
    repeats: int = 1200
    tokens: int | None = None
    prompts: Path | None = None
    num_prompts: int | None = None
    seed: int = 20261
    top: int = 5
    long_repeats: int = LONG_REPEATS
    max_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One request of an arm."""

    case: Case
    index: int
    options: Options


class PlannedCheck(NamedTuple):
    """An arm with its requests; `refusal` says why it cannot be asked at all."""

    arm: Check
    jobs: tuple[Job, ...]
    refusal: str = ""

    def tokens(self) -> int:
        """Upper bound of generated tokens, for the progress display."""
        return sum(job.case.max_new_tokens for job in self.jobs)


class Plan(NamedTuple):
    """Everything that will be asked, a function of Settings and the vocabulary."""

    settings: Settings
    arms: tuple[PlannedCheck, ...]
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
                [p.arm.name, [[j.case.key(), j.index, list(j.options)] for j in p.jobs]]
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


def user_case(prompt: Prompt, length: int) -> Case:
    """A prompt with the sampling parameters of its own."""
    own = orjson.loads(prompt.sampling) if prompt.sampling else {}
    return Case(
        prompt,
        length,
        ignore_eos=own.pop("ignore_eos", True),
        temperature=float(own.pop("temperature", 0.0)),
        seed=own.pop("sampling_seed", None),
        sampling=prompt_sets.sampling_json(own),
    )


def with_sampling(case: Case, **more: Any) -> Case:
    """The case with further sampling parameters."""
    own = orjson.loads(case.sampling) if case.sampling else {}
    return case._replace(sampling=prompt_sets.sampling_json(own | more))


class _Builder:
    def __init__(self, settings: Settings, by_ids: bool, vocab_size: int | None):
        self.settings = settings
        self.by_ids = by_ids
        self.vocab_size = vocab_size
        self.prompts, self.refusal = self._prompts()
        self.base = [user_case(p, self._length(p)) for p in self.prompts]

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

    def cases(self, arm: Check) -> tuple[list[Case], str]:
        """The cases of an arm, or why there are none."""
        if arm.cases in LONG:
            return self._long(arm)
        if arm.cases in prefixes.CASES:
            return self._prefixes(arm)
        if self.refusal:
            return [], self.refusal
        made = {
            "repeats": self._repeats,
            "seeds": self._seeds,
            "stops": self._stops,
            "penalties": self._penalties,
        }
        return made[arm.cases]() if arm.cases in made else self.base, ""

    def _long(self, arm: Check) -> tuple[list[Case], str]:
        if self.vocab_size is None:
            return [], "the vocabulary size is " + UNKNOWN
        length, count = LONG[arm.cases]
        length = min(length, self.settings.max_prompt_tokens or length)
        count = min(count, self.settings.num_prompts or count)
        made = [
            prompt_sets.id_prompt(
                f"{arm.cases}-{i}", length, self.vocab_size, self.settings.seed
            )
            for i in range(count)
        ]
        return [Case(p, self._short(LONG_TOKENS, p)) for p in made], ""

    def _prefixes(self, arm: Check) -> tuple[list[Case], str]:
        if self.vocab_size is None:
            return [], "the vocabulary size is " + UNKNOWN
        settings = self.settings
        scale = prefixes.Scale(
            self.vocab_size,
            settings.seed,
            settings.max_prompt_tokens or max(n for n, _ in LONG.values()),
            settings.tokens or prefixes.ANSWER_TOKENS,
            settings.num_prompts or prefixes.MOST,
        )
        return prefixes.CASES[arm.cases](scale), ""

    def _few(self, prompts: int, tokens: int) -> list[Case]:
        """The first prompts with short answers."""
        return [user_case(p, self._short(tokens, p)) for p in self.prompts[:prompts]]

    def _repeats(self) -> list[Case]:
        return self._few(REPEAT_PROMPTS, REPEAT_TOKENS)

    def _seeds(self) -> list[Case]:
        found = []
        for case in self._few(SEED_PROMPTS, SEED_TOKENS):
            hot = case._replace(temperature=SEED_TEMPERATURE)
            found += [hot._replace(seed=seed) for seed in SEEDS]
            found.append(with_sampling(found[-1], top_p=0.9, top_k=40))
        return found

    def _stops(self) -> list[Case]:
        size = self.vocab_size
        stop = None if size is None else (STOP_EVERY - 1, size, STOP_EVERY)
        few = self._few(STOP_PROMPTS, STOP_TOKENS)
        ends = [case._replace(ignore_eos=False, stop_ids=stop) for case in few]
        if self.by_ids:
            return ends
        # Without a tokenizer the server knows no strings.
        for number, case in enumerate(few):
            start = number % len(STOP_STRINGS)
            strings = [*STOP_STRINGS[start:], *STOP_STRINGS[:start]]
            ends.append(with_sampling(case._replace(ignore_eos=False), stop=strings))
        return ends

    def _penalties(self) -> list[Case]:
        found = []
        for case in self._few(PENALTY_PROMPTS, PENALTY_TOKENS):
            found += [case, *(with_sampling(case, **more) for more in PENALTIES)]
            half = max(case.max_new_tokens // 2, 1)
            held = with_sampling(case, min_new_tokens=half, logit_bias=LIKELY)
            ends = (int(min(LIKELY)), int(max(LIKELY)) + 1, 1)
            found.append(held._replace(ignore_eos=False, stop_ids=ends))
        return found

    def arm(self, arm: Check) -> PlannedCheck:
        """The requests of one arm."""
        cases, refusal = self.cases(arm)
        if not cases:
            return PlannedCheck(arm, (), refusal or "there is no prompt for it")
        options = Options(arm.logprobs, self.settings.top, arm.stream)
        total = len(cases) * arm.rounds
        if arm.cases == "repeats":
            total = self.settings.repeats
        elif arm.name == "long-repeat":
            total = self.settings.long_repeats
        elif arm.in_flight > 4:
            total = max(total, 2 * arm.in_flight)
        jobs = tuple(Job(cases[i % len(cases)], i, options) for i in range(total))
        return PlannedCheck(arm, jobs)


UNKNOWN = "unknown: pass --vocab-size N"
