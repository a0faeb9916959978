# SPDX-License-Identifier: Apache-2.0
"""Request fields: each classified, refused by name, or serial."""

from __future__ import annotations

import json
import os
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dill
import pytest
import request_fields
from request_tools import BAD, Batch, batch_info, make_request

from sglang_exact.hooks import penalties, requests


def test_every_sampling_parameter_is_classified() -> None:
    """A new field of the host turns this red until somebody says what it does."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    groups = (requests.PARALLEL, requests.FOLLOWING, requests.REFUSED)
    known = frozenset().union(*groups)
    assert sum(map(len, groups)) == len(known)
    assert known == set(SamplingParams.__struct_fields__)


def _request_classes() -> list[Any]:
    """Every class of the host that carries a request for tokens, from HTTP inwards."""
    from sglang.srt.entrypoints.anthropic import protocol as anthropic
    from sglang.srt.entrypoints.ollama import protocol as ollama
    from sglang.srt.entrypoints.openai import protocol as openai
    from sglang.srt.managers import io_struct

    return [
        io_struct.GenerateReqInput,
        io_struct.TokenizedGenerateReqInput,
        openai.CompletionRequest,
        openai.ChatCompletionRequest,
        openai.ResponsesRequest,
        openai.ScoringRequest,
        anthropic.AnthropicMessagesRequest,
        ollama.OllamaChatRequest,
        ollama.OllamaGenerateRequest,
    ]


def _fields(kind: Any) -> set[str]:
    """Field names of a dataclass, a msgspec struct or a pydantic model."""
    for name in ("model_fields", "__dataclass_fields__", "__struct_fields__"):
        found = getattr(kind, name, None)
        if found:
            return set(found)
    raise AssertionError(f"{kind} has no fields")


def _unclassified(groups: Any) -> list[str]:
    known = frozenset().union(*groups)
    return [
        f"{kind.__name__}.{name}"
        for kind in _request_classes()
        for name in sorted(_fields(kind) - known)
    ]


def test_every_request_field_is_classified() -> None:
    """A new field of the host turns this red until somebody says what it does."""
    groups = request_fields.GROUPS
    known = frozenset().union(*groups)
    assert sum(map(len, groups)) == len(known), "a field is in two groups"
    assert _unclassified(groups) == []
    stale = known - frozenset().union(*map(_fields, _request_classes()))
    assert stale == frozenset(), stale


def test_control_a_field_left_out_is_found() -> None:
    groups = [g - {"kv_hints"} for g in request_fields.GROUPS]
    assert _unclassified(groups) == [
        "GenerateReqInput.kv_hints",
        "TokenizedGenerateReqInput.kv_hints",
    ]


def test_refused_fields_are_refused_one_by_one() -> None:
    """Each alone is a reason; the others of the group never reach the scheduler."""
    for name in (
        *("return_hidden_states", "return_sampling_mask", "multimodal_inputs"),
        *("input_embeds", "positional_embed_overrides", "token_type_ids", "session"),
        *("lora_id", "token_indices_to_pool", "multi_item_delimiter_indices"),
    ):
        req = make_request()
        assert hasattr(req, name), name
        setattr(req, name, [1])
        assert len(requests.request_reasons(req)) == 1, name


def test_custom_processors_alone_make_a_request_serial() -> None:
    for given in ({"frequency_penalty": 0.5}, {"min_new_tokens": 1}, {"top_p": 0.5}):
        assert not requests.is_serial(make_request(**given)), given
    req = make_request()
    req.grammar = object()
    assert not requests.is_serial(req)
    assert requests.is_serial(make_request(processor="text"))


def test_refusals_name_every_reason() -> None:
    req = make_request(logit_bias={"3": float("inf")})
    req.return_hidden_states = True
    req.lora_id = "adapter"
    req.multimodal_inputs = SimpleNamespace(mm_items=[])
    req.custom_logit_processor = '{"callable": "00"}'
    found = requests.text_of(requests.request_reasons(req))
    words = ("return_hidden_states", "lora_path", "image", "logit_bias")
    for word in (*words, "does not load"):
        assert word in found, word
    assert requests.request_reasons(make_request()) == []


def test_refused_request_ends_no_batch() -> None:
    """The host still forms a batch with it; its processor must not be loaded there."""
    for given in ({"processor": '{"callable": "00"}'}, {"logit_bias": {"3": BAD}}):
        req = make_request(**given)
        assert requests.request_reasons(req)
        requests.check_request(None, req)
        assert req.to_finish is not None
        info, batch = batch_info([req])
        assert not info.has_custom_logit_processor
        assert info.logit_bias is None
        del batch


def test_control_refused_request_ends_the_batch_in_the_host() -> None:
    req = make_request(processor='{"callable": "00"}')
    with pytest.raises(Exception, match="invalid load key"):
        batch_info([req])


def test_no_processor_is_unpickled_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickle may run anything when it is loaded; this one would leave a mark."""
    from sglang.srt.sampling import sampling_batch_info

    mark = tmp_path / "mark"

    class Mark:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(mark),))

    req = make_request()
    req.custom_logit_processor = json.dumps({"callable": dill.dumps(Mark()).hex()})
    off = SimpleNamespace(features=SimpleNamespace(enable_custom_logit_processor=False))
    with monkeypatch.context() as patch:
        patch.setattr(sampling_batch_info, "get_exec", lambda: off)
        assert requests.request_reasons(req) == []
        assert not mark.exists()
    requests.request_reasons(req)
    assert mark.exists()


def test_greedy_request_has_temperature_one() -> None:
    req = make_request(temperature=0.3, top_k=1)
    requests.check_request(None, req)
    assert req.sampling_params.temperature == 1.0
    req = make_request(temperature=0.3, top_k=2)
    requests.check_request(None, req)
    assert req.sampling_params.temperature == 0.3


def test_requests_that_must_not_arrive() -> None:
    """Refused before the scheduler sees them, with every reason at once."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    def arrive(cut: bool, count: int, **fields: Any) -> str:
        manager = SimpleNamespace(
            allow_auto_truncate=cut,
            context_len=64,
            model_config=SimpleNamespace(vocab_size=96),
        )
        sampling = {"max_new_tokens": fields.pop("new", 8)}
        obj = GenerateReqInput(
            input_ids=[5] * count, sampling_params=sampling, **fields
        )
        try:
            requests.check_arrival(manager, obj, obj.input_ids)
        except ValueError as error:
            return str(error)
        return ""

    assert arrive(False, 60) == "", "the host refuses it itself"
    assert arrive(True, 56) == arrive(True, 56, new=None) == ""
    assert "68 tokens" in arrive(True, 60)
    assert "context length" in arrive(True, 64, new=None)
    both = arrive(False, 4, image_data="a", positional_embed_overrides={"a": 1})
    assert "image" in both and "positional_embed_overrides" in both


def test_requests_that_generate_nothing() -> None:
    batch = SimpleNamespace(is_prefill_only=True)
    assert requests.take_the_sampler(None, batch) is None
    assert batch.is_prefill_only is False
    for new, start, expected in ((0, -1, 3), (0, 1, 1), (4, -1, -1)):
        req = make_request(max_new_tokens=new)
        req.logprob_start_len = start
        requests.check_request(None, req)
        assert req.logprob_start_len == expected


def test_images_are_not_said_to_be_understood() -> None:
    config = SimpleNamespace(
        is_image_understandable_model=True, is_audio_understandable_model=True
    )
    requests.say_what_is_understood(None, SimpleNamespace(model_config=config))
    assert not any(vars(config).values())


def test_last_result_is_taken_for_counted_requests() -> None:
    def scheduler(*reqs: Any) -> Any:
        taken: list[Any] = []
        return SimpleNamespace(
            enable_overlap=True,
            result_queue=deque([(Batch(list(reqs)), "result")]),
            last_batch="batch",
            taken=taken,
            process_batch_result=lambda batch, result: taken.append(result),
        )

    counted = scheduler(make_request(), make_request(presence_penalty=1.0))
    penalties.take_last_result(counted, None, None)
    assert counted.taken == ["result"] and counted.last_batch is None
    free = scheduler(make_request(), make_request(logit_bias={"3": 1.0}))
    penalties.take_last_result(free, None, None)
    assert free.taken == [] and len(free.result_queue) == 1
