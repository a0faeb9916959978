# SPDX-License-Identifier: Apache-2.0
"""What the tests of the request hooks share: requests, batches, a decode step."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

VOCAB, WIDTH = 96, 4
BAD = float("inf")


def make_settings(**given: Any) -> Any:
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(**{"temperature": 1.0, **given})
    params.normalize(SimpleNamespace(eos_token_id=2))
    return params


def make_request(**given: Any) -> Any:
    from sglang.srt.managers.schedule_batch import Req

    processor = given.pop("processor", None)
    req = Req("r", "", array("q", [5, 6, 7]), make_settings(**given))
    req.custom_logit_processor = processor
    req.eos_token_ids = {2}
    req.tokenizer = SimpleNamespace(eos_token_id=2, additional_stop_token_ids=None)
    return req


class Batch:
    """What SamplingBatchInfo and the penalizers need of a ScheduleBatch."""

    device = "cpu"

    def __init__(self, reqs: list[Any]) -> None:
        self.reqs = reqs


def batch_info(reqs: list[Any]) -> tuple[Any, Batch]:
    """Sampling settings of a batch, as the scheduler makes them."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    batch = Batch(reqs)
    return SamplingBatchInfo.from_schedule_batch(batch, VOCAB), batch


def make_sampler() -> Any:
    from sglang.srt.layers.sampler import Sampler

    sampler = object.__new__(Sampler)
    vars(sampler).update(
        rl_on_policy_target=None,
        enable_deterministic=True,
        use_log_softmax_logprob=False,
        use_ascend_backend=False,
    )
    return sampler


def decode_step(info: Any, logits: Any, positions: Any) -> Any:
    """The host's decode step on adjusted copies of the logits: ids, logits."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    logits = logits.clone()
    info.apply_logits_bias(logits)
    adjusted = make_sampler()._preprocess_logits(logits.clone(), info)
    count = logits.shape[0]
    ids = make_sampler().forward(
        LogitsProcessorOutput(next_token_logits=logits),
        info,
        False,
        [0] * count,
        [None] * count,
        positions,
    )
    return ids.long(), adjusted


SAMPLED = (
    {"temperature": 0.0},
    {"temperature": 1.0, "sampling_seed": 3},
    {"temperature": 1.4, "sampling_seed": 4, "top_p": 0.7},
    {"temperature": 1.7, "sampling_seed": 5, "top_k": 9},
    {"temperature": 2.0, "sampling_seed": 6, "min_p": 0.2},
    {"temperature": 1.3, "top_p": 0.9, "top_k": 30},
)


def serve(reqs: list[Any], emitted: list[list[int]]) -> Any:
    """Settings of a batch whose requests have emitted tokens before."""
    info, batch = batch_info(reqs)
    for ids in zip(*emitted, strict=True):
        if info.penalizer_orchestrator.is_required:
            info.penalizer_orchestrator.cumulate_output_tokens(torch.tensor(ids))
    return info, batch


class Bytes:
    """A tokenizer whose ids are bytes; id 2 ends."""

    eos_token_id = 2
    additional_stop_token_ids = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Any, **unused: object) -> str:
        return bytes(i for i in ids if i > 2).decode(errors="replace")


def byte_request(**given: Any) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(**{"max_new_tokens": 8, **given})
    params.normalize(Bytes())
    req = Req("r", "", array("q", [65]), params, vocab_size=256)
    req.tokenizer = Bytes()
    return req


@contextmanager
def stock(owner: Any, name: str) -> Iterator[None]:
    """The host's own function, without the hook."""
    hooked = getattr(owner, name)
    setattr(owner, name, hooked.__wrapped__)
    try:
        yield
    finally:
        setattr(owner, name, hooked)


def cuts_of(total: int, width: int) -> list[list[int]]:
    """Every way to cut a stream into blocks of 1 to `width` tokens."""
    if total == 0:
        return [[]]
    return [
        [size, *rest]
        for size in range(1, min(width, total) + 1)
        for rest in cuts_of(total - size, width)
    ]
