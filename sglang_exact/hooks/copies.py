# SPDX-License-Identifier: Apache-2.0
"""The `n` answers to one request are drawn with seeds of their own.

Why: the host sends the same request `n` times (tokenizer_manager.py:2164). Seeded
    noise is a function of seed, position and token (layers/sampler.py:950), so that
    every copy has the same answer: best-of-n and pass@k are then those of one.
    `best_of` of /v1/completions is read by nobody (openai/protocol.py:373).
What: copy 0 keeps the request's seed, or the default seed, 42: its answer is that of
    the request with `n` 1. Copy i from 1 on has the seed `seed_of_copy(seed, i)`,
    which can also be asked for as `sampling_seed` of a request of its own. Greedy
    copies draw nothing and stay equal. `best_of` other than `n` gets a 400.
Scope: every endpoint with `n`, streamed or not, one prompt or many, plain and
    speculative: the copies are numbered before they reach the scheduler.
Retire when: the host gives every copy a seed of its own.
"""

from __future__ import annotations

import copy
from typing import Any

from sglang_exact.hooks.base import MAIN, TOKENIZER_MANAGER, hook
from sglang_exact.reasons import Reason

_COPIES = "_sglang_exact_copies"
_DEFAULT_SEED = 42
"""sglang/srt/sampling/sampling_batch_info.py:164."""
_MASK = 2**64 - 1


def seed_of_copy(seed: int | None, index: int) -> int | None:
    """The seed of copy `index`; copy 0 has `seed`.

    From 1 on: output `index` of splitmix64 started at `seed` (Steele, Lea and Flood,
    2014), without its last bit, so that the host takes it: 0 to 2**63 - 1. None
    counts as the host's default seed, 42.
    """
    if index == 0:
        return seed
    start = _DEFAULT_SEED if seed is None else seed
    mixed = (start + index * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) >> 1


class Copies:
    """How many copies of one prompt have been sent, and what all of them share."""

    def __init__(self, params: Any) -> None:
        self.params, self.sent = params, 0

    def next_params(self) -> Any:
        """Sampling parameters of the next copy."""
        index, self.sent = self.sent, self.sent + 1
        if index == 0:
            return self.params
        params = copy.copy(self.params)
        params.sampling_seed = seed_of_copy(params.sampling_seed, index)
        return params


@hook(
    f"{TOKENIZER_MANAGER}._create_tokenized_object",
    "AFTER",
    name="copies_count",
    roles=(MAIN,),
    relies_on=(
        f"{TOKENIZER_MANAGER}._handle_batch_request",
        "sglang.srt.managers.io_struct.GenerateReqInput.__getitem__",
    ),
)
def count_copies(result: Any, self: Any, obj: Any, *given: Any, **named: Any) -> None:
    """After TokenizerManager._create_tokenized_object; the copies of `obj` share it."""
    if result.sampling_params.n > 1:
        setattr(obj, _COPIES, Copies(result.sampling_params))


@hook(
    f"{TOKENIZER_MANAGER}._send_one_request",
    "BEFORE",
    name="copies_seed",
    roles=(MAIN,),
    relies_on=(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
    ),
)
def seed_the_copy(self: Any, tokenized_obj: Any) -> None:
    """Before TokenizerManager._send_one_request.

    The request that goes ahead of the copies has sampling parameters of its own.
    """
    state = self.rid_to_state.get(tokenized_obj.rid)
    copies = getattr(getattr(state, "obj", None), _COPIES, None)
    if copies is not None and tokenized_obj.sampling_params is copies.params:
        tokenized_obj.sampling_params = copies.next_params()


@hook(
    "sglang.srt.entrypoints.openai.serving_completions"
    ".OpenAIServingCompletion._validate_request",
    "AFTER",
    name="copies_best_of",
    roles=(MAIN,),
)
def refuse_best_of(result: str | None, self: Any, request: Any) -> str | None:
    """After OpenAIServingCompletion._validate_request: the text of a 400, or None."""
    if result is None and request.best_of not in (None, request.n):
        return str(
            Reason(
                f"best_of {request.best_of} with n {request.n}",
                "best_of equal to n: every answer is returned",
                "ask for n answers and choose by their logprobs",
            )
        )
    return result
