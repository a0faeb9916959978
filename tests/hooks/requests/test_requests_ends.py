# SPDX-License-Identifier: Apache-2.0
"""What a block of tokens changes around the end of an answer."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from request_tools import byte_request, cuts_of, stock

THINK_END = 90


def _processor() -> Any:
    from sglang.srt.managers.scheduler_components import batch_result_processor

    return batch_result_processor.SchedulerBatchResultProcessor


REASONING: tuple[tuple[dict[str, Any], list[int]], ...] = (
    ({"max_new_tokens": 3}, [70, 71, 72, 73, 74]),
    ({"stop": ["GH"]}, [70, 71, 72, 73, 74]),
    ({}, [70, 71, 2, 73, THINK_END]),
    ({}, [70, THINK_END, 72, 2, 74]),
)


def _reasoning_tokens(
    case: dict[str, Any], stream: list[int], blocks: list[int], asked: bool
) -> int:
    """What the host counts; it counts a block, then checks it."""
    req = byte_request(**case)
    req.require_reasoning = asked
    model = SimpleNamespace(think_end_ids=[THINK_END], self_opened_think_start_ids=[70])
    count = _processor()._maybe_update_reasoning_tokens
    left = list(stream)
    while left and not req.finished():
        block, left = left[: blocks[0]], left[blocks[0] :]
        blocks = blocks[1:]
        req.output_ids.extend(block)
        count(SimpleNamespace(model_config=model), req, block)
        req.update_finish_state(len(block))
    assert req.finished()
    return int(req.reasoning_tokens)


def _reasoning_differences() -> list[int]:
    wrong = []
    for i, (case, stream) in enumerate(REASONING):
        for asked in (True, False):
            plain = _reasoning_tokens(case, stream, [1] * 5, asked)
            cuts = cuts_of(5, 5)
            if any(_reasoning_tokens(case, stream, c, asked) != plain for c in cuts):
                wrong.append(i)
    return sorted(set(wrong))


def test_reasoning_tokens_are_those_returned() -> None:
    assert _reasoning_differences() == []


def test_control_host_counts_reasoning_past_the_end() -> None:
    with stock(_processor(), "_maybe_update_reasoning_tokens"):
        assert _reasoning_differences() == [0, 1, 2]


class UntilEnd:
    """A grammar that takes any token and ends with id 2."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def accept_token(self, token: int) -> None:
        if not self.is_terminated():
            self.seen.append(token)

    def is_terminated(self) -> bool:
        return 2 in self.seen


def _under_a_grammar(blocks: list[list[int]], early: bool) -> Any:
    """Ids and reason of a request that ignores end tokens, `blocks` at a time.

    Speculation advances the grammar first, with `early` already for the token of the
    prefill, which is a block of its own.
    """
    req = byte_request(ignore_eos=True)
    req.grammar = UntilEnd()
    processor = SimpleNamespace()
    processor._accept_grammar_tokens = lambda *a: _processor()._accept_grammar_tokens(
        processor, *a
    )
    for i, block in enumerate(blocks):
        first = i > 0 or early
        if first:
            mode = SimpleNamespace(
                is_decode=lambda i=i: i > 0, is_extend=lambda i=i: i == 0
            )
            result = SimpleNamespace(
                grammar_advanced=False,
                grammar_retained_tokens=None,
                copy_done=None,
                next_token_ids=torch.tensor(block),
                accept_lens=torch.tensor([len(block)]),
                speculative_output_stride=len(block),
            )
            batch = SimpleNamespace(reqs=[req], has_grammar=True, forward_mode=mode)
            _processor().advance_grammar_fsm(processor, result, batch)
            block = (result.grammar_retained_tokens or [block])[0]
        req.output_ids.extend(block)
        req.update_finish_state(len(block))
        if not first:
            req.grammar.accept_token(block[0])
        if req.finished():
            break
    return _answer(req)


def _plain_under_a_grammar(stream: list[int]) -> Any:
    """Plain decoding checks a token, then advances the grammar."""
    req = byte_request(ignore_eos=True)
    req.grammar = UntilEnd()
    for token in stream:
        req.output_ids.append(token)
        req.update_finish_state()
        req.grammar.accept_token(token)
        if req.finished():
            break
    return _answer(req)


def _answer(req: Any) -> Any:
    reason = req.finished_reason and json.dumps(req.finished_reason.to_json())
    length = len(req.output_ids) if req.finished_len is None else req.finished_len
    return list(req.output_ids)[:length], reason


def _grammar_differences(width: int) -> list[Any]:
    """Streams, cut into blocks in every way, that do not end as in plain decoding."""
    streams = (
        *([70, 2, 71, 72], [2, 70, 71, 72], [70, 2, 2, 72], [70] * 9),
        *([70, 71, 72, 2, 73, 74], [70, 71, 2], [70, 71, 72, 73, 74, 75, 2, 76, 77]),
    )
    return [
        (stream, sizes, early)
        for stream in streams
        for sizes in cuts_of(len(stream) - 1, width)
        for early in (False, True)
        if _under_a_grammar(_blocks(stream, sizes), early)
        != _plain_under_a_grammar(stream)
    ]


def _blocks(stream: list[int], sizes: list[int]) -> list[list[int]]:
    rest = iter(stream)
    return [[next(rest) for _ in range(size)] for size in (1, *sizes)]


def test_a_grammar_ends_where_it_does_in_plain_decoding() -> None:
    assert _grammar_differences(4) == []


def test_control_host_ends_a_grammar_one_token_early() -> None:
    with stock(_processor(), "advance_grammar_fsm"):
        assert len(_grammar_differences(1)) >= 3
        assert len(_grammar_differences(4)) >= 20
