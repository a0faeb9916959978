# SPDX-License-Identifier: Apache-2.0
"""Stop conditions, checked after every token of an accepted block.

Why: the host checks a block once (sglang/srt/managers/schedule_batch.py:2007):
    stop strings before end tokens, strings in list order, over a tail that is longer
    by the block. An end token followed by a stop string, two stop strings, or a
    string that plain decoding cannot see end the request elsewhere. A request that
    is being aborted is not checked at all, and returns its whole last block, past
    its end token and past max_new_tokens. The reasoning tokens of a block are
    counted before it is checked (scheduler_components/batch_result_processor.py:1048),
    those after the end too. A grammar that ends with a token that does not end the
    request (ignore_eos) ends it one token later in plain decoding, which advances the
    grammar after the check; the host ends a block there. Streaming holds back what may
    begin a stop string, but not the text of a stop regex, nor a character whose bytes
    are not all there: what of it is sent before it is trimmed depends on the blocks.
    An answer that is not streamed is passed on every 50 tokens, and nothing at all is
    held back: its text keeps the piece of a stop string that ends there.
What: the block is taken off and put back one token at a time; the host's own check
    runs after each, exactly as in plain decoding, until it says that the request is
    finished. Then the rest is put back (cache accounting counts it) and
    `finished_len` marks the end. An aborted request is checked too, and stays
    aborted: what it returns is the start of plain decoding's answer. Reasoning
    tokens are counted after the check, up to the end. A grammar that ends inside a
    block is not looked at until the token after its end, which is kept. Streaming
    holds back whatever may be trimmed.
Scope: every request, all drafters; a block of one token goes straight to the host.
Retire when: the host checks accepted tokens one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang_exact.hooks.base import hook

_REQ = "sglang.srt.managers.schedule_batch.Req"
_PROCESSOR = (
    "sglang.srt.managers.scheduler_components.batch_result_processor."
    "SchedulerBatchResultProcessor"
)
_COUNT = "_sglang_exact_count"
_EARLY = "_sglang_exact_grammar_ends"
_PARTIAL = "\N{REPLACEMENT CHARACTER}"


@hook(
    f"{_REQ}.update_finish_state",
    "AROUND",
    name="stop_token_by_token",
    relies_on=(
        f"{_REQ}._check_str_based_finish",
        f"{_REQ}._check_token_based_finish",
        f"{_REQ}._check_vocab_boundary_finish",
        f"{_REQ}._cap_finished_len_at_max_new_tokens",
        f"{_REQ}.tail_str",
    ),
)
def stop_token_by_token(
    original_fn: Callable[..., None], self: Any, new_accepted_len: int = 1
) -> None:
    """Around Req.update_finish_state: one host check per accepted token."""
    early = vars(self).pop(_EARLY, 0)
    if new_accepted_len <= 1 or self.finished():
        _check(original_fn, self, new_accepted_len, blind=bool(early))
        return
    abort, self.to_finish = self.to_finish, None
    block = list(self.output_ids[-new_accepted_len:])
    kept = _check_each(original_fn, self, new_accepted_len, early)
    if abort:
        self.finished_reason = abort
    count = vars(self).pop(_COUNT, None)
    if count is not None:
        count(block[:kept])


@hook(
    f"{_PROCESSOR}._maybe_update_reasoning_tokens",
    "AROUND",
    name="stop_reasoning_count",
    relies_on=(
        f"{_PROCESSOR}.process_batch_result_decode",
        f"{_REQ}.update_reasoning_tokens",
        f"{_REQ}.update_self_opened_reasoning_tokens",
    ),
)
def count_what_is_returned(
    original_fn: Callable[..., None],
    self: Any,
    req: Any,
    next_token_id: int | list[int],
) -> None:
    """Around _maybe_update_reasoning_tokens: a block waits until its end is known."""
    if isinstance(next_token_id, list) and len(next_token_id) > 1:
        setattr(req, _COUNT, partial(original_fn, self, req))
        return
    original_fn(self, req, next_token_id)


@hook(
    f"{_PROCESSOR}.advance_grammar_fsm",
    "AROUND",
    name="stop_grammar",
    relies_on=(
        f"{_PROCESSOR}._resolve_spec_v2_tokens",
        f"{_PROCESSOR}._accept_grammar_tokens",
    ),
)
def note_grammar_ends(
    original_fn: Callable[..., None], self: Any, result: Any, batch: Any
) -> None:
    """Around advance_grammar_fsm, which only speculation calls before the check.

    Notes for the requests whose grammar ends with one of the tokens that are checked
    next, how many come up to its end, and keeps the one after it.
    """
    live = [
        (row, req)
        for row, req in enumerate(batch.reqs)
        if req.grammar is not None and not req.grammar.is_terminated()
    ]
    original_fn(self, result, batch)
    for row, req in live:
        if req.grammar.is_terminated():
            kept = result.grammar_retained_tokens
            setattr(req, _EARLY, 1 if kept is None else len(kept[row]))
            if kept is not None:
                kept[row] = _run(result, row)[: len(kept[row]) + 1]


def _run(result: Any, row: int) -> list[int]:
    """All tokens that a block gave to one request."""
    from sglang.srt.managers.scheduler_components import batch_result_processor

    begin = row * batch_result_processor._get_speculative_output_stride(result)
    length = int(result.accept_lens[row])
    ids: list[int] = result.next_token_ids[begin : begin + length].tolist()
    return ids


@hook(
    f"{_REQ}.check_match_stop_str_prefix",
    "REPLACE",
    name="stop_stream",
    relies_on=(
        "sglang.srt.managers.detokenizer_manager.DetokenizerManager.trim_matched_stop",
    ),
)
def may_begin_a_stop(self: Any) -> bool:
    """Replace check_match_stop_str_prefix: text that may be trimmed is not streamed.

    A stop string is trimmed, and so is the text of a stop regex where it occurs as it
    is written. A character of which only some bytes are there may continue either.
    """
    params = self.sampling_params
    ends = [end for end in (*params.stop_strs, *params.stop_regex_strs) if end]
    tail = self.tail_str() if ends else ""
    return tail.endswith(_PARTIAL) or any(
        end in tail or any(tail.endswith(end[:i]) for i in range(1, len(end)))
        for end in ends
    )


@hook(
    "sglang.srt.managers.scheduler_components.output_streamer."
    "_GenerationStreamAccumulator.accept",
    "AROUND",
    name="stop_passed_on",
    relies_on=(
        "sglang.srt.managers.detokenizer_manager.DetokenizerManager"
        "._decode_batch_token_id_output",
    ),
)
def pass_on(original_fn: Callable[..., None], self: Any, *, req: Any) -> None:
    """Around the streamer's accept: nothing that may be trimmed, streamed or not."""
    if not req.stream and not req.finished():
        interval = self.default_force_stream_interval
        if len(req.output_ids) % interval == 0 and may_begin_a_stop(req):
            return
    original_fn(self, req=req)


def _check(original_fn: Callable[..., None], req: Any, count: int, blind: bool) -> None:
    """The host's check; a blind one does not see that the grammar has ended."""
    grammar = req.grammar
    if blind:
        req.grammar = None
    original_fn(req, count)
    req.grammar = grammar


def _check_each(
    original_fn: Callable[..., None], req: Any, count: int, blind: int
) -> int:
    """Check the last `count` output ids, one at a time, until one is the end.

    The first `blind` of them come up to the end of the grammar. Returns how many the
    answer keeps.
    """
    block = list(req.output_ids[-count:])
    before = len(req.output_ids) - count
    del req.output_ids[before:]
    for seen, token in enumerate(block, start=1):
        req.output_ids.append(token)
        _check(original_fn, req, 1, blind=seen <= blind)
        if req.finished():
            if req.finished_len is None:
                req.finished_len = before + seen
            req.output_ids.extend(block[seen:])
            return seen
    return count
