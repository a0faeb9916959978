# SPDX-License-Identifier: Apache-2.0
"""The seeds of a request's copies."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from request_tools import Bytes, stock

from sglang_exact.hooks.copies import seed_of_copy

SEEDS = (None, 0, 42, 7, -1, -(2**63), 2**63 - 1)


def test_seeds_of_copies_are_those_of_splitmix64() -> None:
    """The published outputs of splitmix64 for the seed 1234567, without a bit."""
    published = (
        *(6457827717110365317, 3203168211198807973, 9817491932198370423),
        *(4593380528125082431, 16408922859458223821),
    )
    found = [seed_of_copy(1234567, i) for i in range(6)]
    assert found == [1234567, *(value >> 1 for value in published)]
    for seed in SEEDS:
        seeds = [seed_of_copy(seed, i) for i in range(1, 300)]
        assert len(set(seeds)) == len(seeds)
        assert all(0 <= value < 2**63 for value in seeds if value is not None)
        assert seed_of_copy(seed, 0) == seed
    assert seed_of_copy(None, 3) == seed_of_copy(42, 3)


def _manager(sent: list[Any]) -> Any:
    """The host's manager, which hands what it would send to a list."""
    from sglang.srt.managers import io_struct, tokenizer_manager
    from sglang.srt.sampling.sampling_params import SamplingParams

    tokenizer_manager.get_disagg = lambda: SimpleNamespace(
        disaggregation_transfer_backend=None
    )
    manager = object.__new__(tokenizer_manager.TokenizerManager)
    tokenizer_manager._validate_watermark_request = lambda params: None
    tokenizer_manager.wrap_shm_features = lambda obj: obj
    embeds = SimpleNamespace(prepare_for_dispatch=lambda given: [])

    async def prepared(given: Any) -> list[Any]:
        await asyncio.sleep(0)
        return []

    async def tokenize(obj: Any) -> Any:
        return manager._create_tokenized_object(obj, None, list(obj.input_ids))

    async def answered(obj: Any, request: Any = None) -> Any:
        yield {"meta_info": {"id": obj.rid}}

    vars(manager).update(
        rid_to_state={},
        enable_trace=False,
        disaggregation_mode=None,
        preferred_sampling_params=None,
        sampling_params_class=SamplingParams,
        tokenized_generate_req_type=io_struct.TokenizedGenerateReqInput,
        tokenizer=Bytes(),
        model_config=SimpleNamespace(vocab_size=256),
        cuda_vmm_feature_transport=SimpleNamespace(prepare_for_dispatch_async=prepared),
        positional_embeds_transport=embeds,
        encoder_dispatch_ready={},
        _dispatch_to_scheduler=sent.append,
        _tokenize_one_request=tokenize,
        _wait_one_response=answered,
    )
    return manager


def sent_for(prompts: list[list[int]], sampling: Any, stream: bool = False) -> Any:
    """[prompt, seed] of each copy that reaches the scheduler, in order."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    sent: list[Any] = []
    manager = _manager(sent)
    obj = GenerateReqInput(input_ids=prompts, sampling_params=sampling, stream=stream)
    obj.normalize_batch_and_arguments()
    manager._init_req_state(obj)
    states = dict(manager.rid_to_state)

    async def run() -> None:
        async for _ in manager._handle_batch_request(obj, None, states):
            pass

    asyncio.run(run())
    warm = [s for s in sent if s.sampling_params.max_new_tokens == 0]
    assert len(warm) == len(prompts)
    assert [s.sampling_params.sampling_seed for s in warm] == [
        each.get("sampling_seed")
        for each in (
            sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        )
    ]
    return [
        [list(s.input_ids), s.sampling_params.sampling_seed]
        for s in sent
        if s not in warm
    ]


def test_copies_are_sent_with_seeds_of_their_own() -> None:
    one, other = [65, 66], [67]
    for stream in (False, True):
        for seed in SEEDS:
            given = {"n": 3, "sampling_seed": seed, "max_new_tokens": 4}
            seeds = [seed_of_copy(seed, i) for i in range(3)]
            expected = [[p, s] for p in (one, other) for s in seeds]
            assert sent_for([one, other], given, stream) == expected
        lists = [{"n": 2, "sampling_seed": s, "max_new_tokens": 4} for s in (3, 3)]
        seeds = [seed_of_copy(3, i) for i in range(2)]
        assert sent_for([one, other], lists, stream) == [
            [p, s] for p in (one, other) for s in seeds
        ]


def test_control_host_sends_one_seed_for_all_copies() -> None:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    for name in ("_send_one_request", "_create_tokenized_object"):
        with stock(TokenizerManager, name):
            found = sent_for([[65]], {"n": 3, "sampling_seed": 5, "max_new_tokens": 4})
            assert found == [[[65], 5]] * 3


def _said(**given: Any) -> str | None:
    from sglang.srt.entrypoints.openai.protocol import CompletionRequest
    from sglang.srt.entrypoints.openai.serving_completions import (
        OpenAIServingCompletion,
    )

    server = object.__new__(OpenAIServingCompletion)
    request = CompletionRequest(**{"model": "m", "prompt": "a", **given})
    said: str | None = server._validate_request(request)
    return said


def test_best_of_is_not_ignored() -> None:
    for given in ({}, {"best_of": 1}, {"n": 2, "best_of": 2}, {"best_of": None}):
        assert _said(**given) is None
    for given in ({"best_of": 3}, {"n": 2, "best_of": 1}, {"best_of": 0}):
        assert "best_of" in str(_said(**given))
    assert "empty" in str(_said(prompt="", best_of=3))


def test_control_host_ignores_best_of() -> None:
    from sglang.srt.entrypoints.openai.serving_completions import (
        OpenAIServingCompletion,
    )

    with stock(OpenAIServingCompletion, "_validate_request"):
        assert _said(best_of=3) is None
