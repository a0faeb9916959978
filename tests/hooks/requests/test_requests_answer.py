# SPDX-License-Identifier: Apache-2.0
"""What shapes an answer: penalties, stops, custom processors."""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace
from typing import Any

import torch
from request_tools import VOCAB, cuts_of, make_request, serve, stock


def _penalised(logits: Any, order: list[int]) -> tuple[Any, Any]:
    """Copies of the logits after the penalizers in a given order: live, overlapped."""
    given = {"frequency_penalty": 1.1, "presence_penalty": 0.7}
    info, batch = serve(
        [make_request(repetition_penalty=1.3, **given)], [[3, 3, 4, 5, 5, 5]]
    )
    orchestrator = info.penalizer_orchestrator
    items = sorted(orchestrator.penalizers.items(), key=lambda item: item[0].__name__)
    orchestrator.penalizers = dict(items[i] for i in order)
    live, overlapped = logits.clone(), logits.clone()
    info._apply_pre_grammar_logits_transforms(live)
    info.copy_for_forward()._apply_pre_grammar_logits_transforms(overlapped)
    del batch
    return live, overlapped


def _orders() -> tuple[int, int]:
    """Distinct results over orders, without and with overlap."""
    torch.manual_seed(3)
    logits = torch.randn(1, VOCAB) * 3
    live, copied = set(), set()
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 3, 0, 1], [1, 3, 2, 0]):
        without, with_overlap = _penalised(logits, order)
        live.add(tuple(without.view(torch.int32)[0].tolist()))
        copied.add(tuple(with_overlap.view(torch.int32)[0].tolist()))
    return len(live | copied), len(live)


def test_penalties_have_one_order() -> None:
    assert _orders() == (1, 1)


def test_control_penalties_have_many_orders_in_the_host() -> None:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    with stock(SamplingBatchInfo, "_apply_pre_grammar_logits_transforms"):
        everything, live = _orders()
    assert live > 1 and everything > live


class Letters:
    """A tokenizer whose pieces are letters; id 2 ends."""

    eos_token_id = 2
    additional_stop_token_ids = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Any) -> str:
        return "".join(chr(i) for i in ids if i > 2)


STOPS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"stop": ["cd"]}, "ab\x02cdef"),
    ({"stop": ["ef", "bc"]}, "abcdefgh"),
    ({"stop": ["de"]}, "abcdefgh"),
    ({"stop": ["cd"], "max_new_tokens": 3}, "abcdefgh"),
    ({"stop_token_ids": {100}, "stop": ["ef"]}, "abcdefgh"),
    ({"stop_token_ids": {103}, "stop": ["fg"], "ignore_eos": True}, "ab\x02defgh"),
    ({"stop_regex": ["d.f"], "stop": ["gh"]}, "abcdefgh"),
    ({"stop_regex": ["b$"]}, "abcdefgh"),
    ({"max_new_tokens": 5}, "abcdefgh"),
    ({}, "abc\x02efgh"),
    ({"stop": ["bc"]}, "ab" + chr(5000) + "cdefg"),
)


def _stopped(
    case: dict[str, Any],
    stream: str,
    blocks: list[int],
    stock: bool,
    abort_from: int | None = None,
) -> Any:
    """Ids and reason; an abort arrives before the block with token `abort_from`."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(**{"max_new_tokens": 8, **case})
    params.normalize(Letters())
    req = Req("r", "", array("q", [5]), params, vocab_size=4096)
    req.tokenizer = Letters()
    check = Req.update_finish_state
    if stock:
        check = check.__wrapped__
    left = [ord(c) for c in stream]
    while left and not req.finished():
        size = min(blocks[0], len(left)) if blocks else 1
        blocks = blocks[1:]
        req.output_ids.extend(left[:size])
        left = left[size:]
        if abort_from is not None and len(req.output_ids) > abort_from:
            req.to_finish = FINISH_ABORT()
        check(req, size)
    end = len(req.output_ids) if req.finished_len is None else req.finished_len
    reason = req.finished_reason
    return list(req.output_ids[:end]), reason and json.dumps(reason.to_json())


def _stop_differences(stock: bool) -> list[int]:
    wrong = []
    for i, (case, stream) in enumerate(STOPS):
        plain = _stopped(case, stream, [1] * len(stream), stock=True)
        cuts = cuts_of(len(stream), 4)
        if any(_stopped(case, stream, cut, stock) != plain for cut in cuts):
            wrong.append(i)
    return wrong


def test_blocks_stop_where_single_tokens_do() -> None:
    assert _stop_differences(stock=False) == []


def test_control_host_stops_elsewhere() -> None:
    wrong = _stop_differences(stock=True)
    assert {0, 1} <= set(wrong), wrong


def _abort_differences(stock: bool) -> list[int]:
    """Cases in which an aborted request returns what plain decoding never would."""
    wrong = []
    for i, (case, stream) in enumerate(STOPS):
        plain, _ = _stopped(case, stream, [1] * len(stream), stock=True)
        for at in range(len(plain)):
            for cut in cuts_of(len(stream), 4):
                ids, reason = _stopped(case, stream, cut, stock, abort_from=at)
                ended = json.loads(reason)["type"]
                if ids != plain[: len(ids)] or ended != "abort" or len(ids) <= at:
                    wrong.append(i)
    return sorted(set(wrong))


def test_an_abort_ends_no_later_than_plain_decoding() -> None:
    assert _abort_differences(stock=False) == []


def test_control_host_returns_the_whole_block_of_an_abort() -> None:
    # The length bound, an end token, a stop string.
    assert {0, 2, 8} <= set(_abort_differences(stock=True))


def test_custom_processor_sees_one_row() -> None:
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.sampling_batch_info import ProcessorEntry

    def centre(logits: Any, params: Any) -> Any:
        assert logits.shape[0] == len(params) == 1
        return logits - logits.max()

    info = SimpleNamespace(
        custom_logit_processor={
            1: ProcessorEntry(centre, [0, 2], torch.tensor([0, 2]))
        },
        custom_params=[{"a": 1}, None, {"b": 2}],
    )
    logits = torch.randn(3, VOCAB)
    expected = logits.clone()
    for row in (0, 2):
        expected[row] -= logits[row].max()
    sampler.apply_custom_logit_processor(logits, info)
    assert torch.equal(logits, expected)
