# SPDX-License-Identifier: Apache-2.0
"""Prompts that begin like one another: conversations, branches, more than fits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from sglang_exact.client.answer import Case, Prompt
from sglang_exact.verify import prompts

CHUNK = 64
ANSWER_TOKENS = 96
"""Of an earlier answer in a later prompt: more than a chunk."""
SHORT = 32
MOST = 32
"""Prompts of an arm."""
SURE = 100.0
"""A bias that decides every token, so that an answer is known before it is asked."""


class Scale(NamedTuple):
    """What the user cut a run to, in tokens; `most` prompts."""

    vocab_size: int
    seed: int
    longest: int
    tokens: int
    most: int


def _ids(scale: Scale, name: str, length: int) -> tuple[int, ...]:
    length = min(length, scale.longest)
    made = prompts.id_prompt(name, length, scale.vocab_size, scale.seed)
    return made.ids or ()


def _case(name: str, ids: tuple[int, ...], tokens: int) -> Case:
    return Case(Prompt(name, "ids", ids=ids), tokens)


def multi_turn(scale: Scale) -> list[Case]:
    """Two conversations of four turns, or as many as the longest prompt holds.

    Each turn is asked twice: for a short free answer, and for the biased one that
    stands in the next turn's prompt.
    """
    answer = (scale.vocab_size // 2,) * min(ANSWER_TOKENS, scale.tokens)
    bias = prompts.sampling_json({"logit_bias": {str(answer[0]): SURE}})
    found = []
    for talk in range(min(2, scale.most)):
        name = f"multi-turn-{talk}"
        questions = [_ids(scale, f"{name}-{turn}", 160) for turn in range(4)]
        turns = accumulate(questions, lambda before, ids: before + answer + ids)
        for turn, ids in enumerate(turns):
            if len(ids) <= scale.longest:
                found.append(_case(f"{name}-{turn}", ids, min(SHORT, scale.tokens)))
                said = _case(f"{name}-{turn}-said", ids, len(answer))
                found.append(said._replace(sampling=bias))
    return found


def branch(scale: Scale) -> list[Case]:
    """Eight prompts that part behind the same 512 tokens, in and beside a chunk."""
    shared = _ids(scale, "branch", 512)
    tokens = min(SHORT, scale.tokens)
    return [
        _case(f"branch-{i}", shared + _ids(scale, f"branch-{i}", 30 * i + 1), tokens)
        for i in range(min(8, scale.most))
    ]


def evict(scale: Scale) -> list[Case]:
    """One prompt twice, many others, and the first one twice again."""
    tokens = min(SHORT, scale.tokens)
    first, *others = (
        _case(f"evict-{i}", _ids(scale, f"evict-{i}", 1024), tokens)
        for i in range(min(MOST, scale.most))
    )
    return [first, first, *others, first, first]


CASES: dict[str, Callable[[Scale], list[Case]]] = {
    "multi-turn": multi_turn,
    "branch": branch,
    "evict": evict,
}
