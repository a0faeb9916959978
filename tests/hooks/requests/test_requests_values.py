# SPDX-License-Identifier: Apache-2.0
"""Every field of a request against values of every wrong kind.

What the validator refuses is said with the field's name; what it lets pass, the host
normalizes, sends, decodes and makes a batch of, as its scheduler would.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from request_tools import VOCAB, Batch

from sglang_exact.hooks import control_requests, request_fields, requests
from sglang_exact.hooks.control_requests import check_message
from sglang_exact.hooks.request_fields import FIELDS, SAMPLING, Limits, check_tokens
from sglang_exact.hooks.requests import prompt_reasons

NAN, INF = float("nan"), float("inf")
NESTED: list[Any] = [[[[1]]]]
POOL: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, VOCAB - 1, VOCAB, 2**31 - 1, 2**31, 2**40),
    *(2**63 - 1, 2**63, -(2**63) - 1, 2**70, 0.0, 0.5, 1.0, 1.5, -0.5, 1e-40, 1e300),
    *(NAN, INF, -INF, "", "x", "5", "(", "\ud800", "x" * 70_000, b"x", object()),
    *([], [None], [0], [-1], [VOCAB], [True], [1.5], ["x"], [5], [[1]], [[-1]]),
    *([[]], NESTED, [5, [5]], ["x"] * 40, [2**70], {}, {"x": 1}, {"5": 1}, {"5": NAN}),
    *({"05": 1}, {"-1": 1}, {str(VOCAB): 1}, {"x": {"y": 1}}, {"x": {"y": {"z": 1}}}),
    *(
        {"x": [1, "y"]},
        {"x": [[1]]},
        {5: 5},
        {"5": 1e300},
        {"x": 2**70},
        {"x": "\ud800"},
    ),
    *((), (1,), {1, 2}, set(), range(3)),
)
"""Confused types, negative, huge, not finite, empty, too long, nested."""


def _limits() -> Any:
    return Limits(VOCAB, frozenset(("tenant",)))


def _request(sampling: Any = None, count: int | None = None, **given: Any) -> Any:
    from sglang.srt.managers.io_struct import GenerateReqInput

    prompt = [5, 6, 7]
    fields = {
        "input_ids": prompt if count is None else [prompt] * count,
        "sampling_params": {} if sampling is None else sampling,
    }
    return GenerateReqInput(**{**fields, **given})


def _reasons(obj: Any) -> list[str]:
    return [r.found for r in request_fields.field_reasons(obj, _limits())]


def _schedule(obj: Any) -> None:
    """From the tokenizer manager to a batch of the scheduler, as the host does it."""
    from sglang.srt.managers import io_struct, tokenizer_manager
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.sampling.sampling_params import SamplingParams

    obj.normalize_batch_and_arguments()
    tokenizer_manager.get_disagg = lambda: SimpleNamespace(
        disaggregation_transfer_backend="mooncake"
    )
    tokenizer_manager._validate_watermark_request = lambda params: None
    tokenizer = SimpleNamespace(
        encode=lambda text, add_special_tokens: list(text.encode()),
        eos_token_id=2,
        additional_stop_token_ids=None,
    )
    rids = [obj.rid] if obj.is_single else obj.rid
    manager = SimpleNamespace(
        preferred_sampling_params=None,
        sampling_params_class=SamplingParams,
        tokenizer=tokenizer,
        model_config=SimpleNamespace(vocab_size=VOCAB),
        tokenized_generate_req_type=io_struct.TokenizedGenerateReqInput,
        rid_to_state={
            rid: SimpleNamespace(
                time_stats=SimpleNamespace(set_tokenize_finish_time=lambda: None)
            )
            for rid in rids
        },
    )
    reqs = []
    for one in [obj] if obj.is_single else [obj[i] for i in range(len(rids))]:
        if outside := prompt_reasons(one.input_ids or [5], VOCAB):
            raise ValueError(outside)
        sent = tokenizer_manager.TokenizerManager._create_tokenized_object(
            manager, one, one.text, one.input_ids or [5]
        )
        sent.time_stats = None
        got = io_struct.msgpack_decode(io_struct.msgpack_encode(sent))
        req = Req(got.rid, "", array("q", got.input_ids), got.sampling_params)
        req.eos_token_ids, req.tokenizer = {2}, tokenizer
        reqs.append(req)
    info = SamplingBatchInfo.from_schedule_batch(Batch(reqs), VOCAB)
    info.update_regex_vocab_mask = lambda: None
    if info.penalizer_orchestrator.is_required:
        logits = torch.zeros(len(reqs), VOCAB)
        info.penalizer_orchestrator.apply(logits)
        assert not torch.isnan(logits).any()


def _cases() -> Iterator[tuple[str, Any]]:
    """(name, request) for every field and value, of one prompt and of two."""
    for value in POOL:
        for name in SAMPLING:
            yield name, _request({name: value})
        for name in FIELDS:
            yield name, _request(**{name: value})
            yield name, _request(count=2, **{name: value})
            yield name, _request(count=2, **{name: [value]})
            yield name, _request(count=2, **{name: [value, value]})


def test_what_passes_can_be_scheduled() -> None:
    """Every value either has its field's name in the refusal, or makes a batch."""
    passed, refused, faults = set(), set(), []
    for name, obj in _cases():
        reasons, shown = _reasons(obj), repr(getattr(obj, name, obj.sampling_params))
        if reasons:
            refused.add(name)
            if not any(name in reason or "prompt" in reason for reason in reasons):
                faults.append((name, shown, reasons))
            continue
        passed.add(name)
        try:
            _schedule(obj)
        except Exception as error:  # noqa: BLE001
            # The host's own 400 comes before anything is sent.
            if not isinstance(error, ValueError) or "Expected `" in str(error):
                faults.append((name, shown, repr(error)))
    assert not faults, faults
    images = {n for n in FIELDS if FIELDS[n].check.__name__ == "anything"}
    assert refused >= (set(FIELDS) | set(SAMPLING)) - images
    assert passed >= {
        "top_k",
        "stop_token_ids",
        "logit_bias",
        "rid",
        "token_ids_logprob",
    }


GOOD_SAMPLING: dict[str, tuple[Any, ...]] = {
    "max_new_tokens": (None, 0, 1, 2**31 - 1),
    "min_new_tokens": (0, 5),
    "n": (1, 2, 128),
    "stop": (None, "x", ["x", "y"], []),
    "stop_token_ids": (None, [], [0, VOCAB - 1], {3}),
    "stop_regex": ("[a-z]+x", ["a.*b", "(foo|bar)+"], r"\d{1,3}(,\d{3})?"),
    "temperature": (0, 0.0, 1, 0.7, 100.0),
    "top_p": (1, 0.1),
    "top_k": (-1, 1, 20, 2**30),
    "min_p": (0, 0.5, 1),
    "frequency_penalty": (-2, 0.5),
    "presence_penalty": (2.0,),
    "repetition_penalty": (0.5, 2),
    "logit_bias": ({}, {"0": -1e9, str(VOCAB - 1): 100}),
    "sampling_seed": (None, 0, -(2**63), 2**63 - 1),
    "custom_params": ({}, {"a": 1, "b": [1, "x", None], "c": {"d": True}}),
    "ignore_eos": (True, False, None),
    "stream_interval": (None, 1),
    "json_schema": ('{"type": "object"}',),
    "beam_width": (None, 1),
}
GOOD: dict[str, tuple[Any, ...]] = {
    "rid": ("a", None),
    "return_logprob": (True, False, None),
    "logprob_start_len": (-1, 0, 3),
    "top_logprobs_num": (0, VOCAB),
    "token_ids_logprob": ([0, VOCAB - 1], [], None),
    "priority": (-1, 2**63 - 1),
    "custom_labels": ({"tenant": "x"}, {}, None),
    "image_data": (None, []),
    "stream": (True,),
    "received_time": (12.5,),
    "mm_processor_kwargs": ({}, None),
}
GOOD_LISTS: dict[str, Any] = {
    "rid": ["a", "b"],
    "sampling_params": [{"top_k": 3}, {}],
    "return_logprob": [True, False],
    "top_logprobs_num": [0, 3],
    "token_ids_logprob": [[1], [2]],
    "lora_path": [None, None],
    "custom_logit_processor": [None, "x"],
    "extra_key": ["a", "b"],
    "return_hidden_states": [False, False],
}


def test_good_values_pass() -> None:
    for name, values in GOOD_SAMPLING.items():
        for value in values:
            assert _reasons(_request({name: value})) == [], (name, value)
    for name, values in GOOD.items():
        for value in values:
            assert _reasons(_request(**{name: value})) == [], (name, value)
    for name, value in GOOD_LISTS.items():
        assert _reasons(_request(count=2, **{name: value})) == [], (name, value)
    text = _request(input_ids=None, text=["a", "b"], rid="a", sampling_params=None)
    assert _reasons(text) == []


NAMED = (
    ({"stop_regex": "("}, {}, "stop_regex"),
    ({"stop_regex": "(a*)*b"}, {}, "stop_regex"),
    ({"top_k": 2**40}, {}, "top_k"),
    ({"n": None}, {}, "n = None"),
    ({"min_new_tokens": 1, "stop_token_ids": [VOCAB]}, {}, "stop_token_ids"),
    ({"max_tokens": 5}, {}, "max_tokens"),
    ({"is_normalized": True}, {}, "is_normalized"),
    ({"repetition_penalty": 1e-300}, {}, "repetition_penalty"),
    ([{}], {}, "sampling_params"),
    ("x", {}, "sampling_params"),
    (None, {"top_logprobs_num": VOCAB + 1}, "top_logprobs_num"),
    (None, {"rid": ["a"]}, "rid"),
    (None, {"rid": "HEALTH_CHECK_1"}, "rid"),
    (None, {"text": "a"}, "text and input_ids"),
    (None, {"input_ids": []}, "no prompt"),
    (None, {"input_ids": [[1], 5]}, "input_ids"),
    (None, {"custom_labels": {"other": "x"}}, "custom_labels"),
    (None, {"http_worker_ipc": "ipc:///x"}, "http_worker_ipc"),
)


def test_named_cases_are_refused_by_name() -> None:
    for sampling, given, word in NAMED:
        found = _reasons(_request(sampling, **given))
        assert any(word in reason for reason in found), (word, found)
    short = _reasons(_request([{}], count=2, return_logprob=[True]))
    assert len(short) == 2, short
    both = _reasons(_request({"top_k": 2**40, "n": None}, rid=["a"]))
    assert len(both) == 3, "every reason at once"


def test_control_the_host_alone_sends_what_its_scheduler_cannot_decode() -> None:
    """Each passes the host's own checks before the scheduler, and fails there."""
    for sampling in (
        {"json_schema": {"type": "object"}},
        {"custom_params": {"x": {"y": {"z": 1}}}},
        {"min_new_tokens": True},
        {"top_k": 2**40},
    ):
        assert _reasons(_request(sampling)) != []
        with pytest.raises((msgspec.ValidationError, RuntimeError, OverflowError)):
            _schedule(_request(sampling))


def test_prompts_without_tokens_or_outside_the_vocabulary() -> None:
    for ids in ([], None, [-1, 5], [5, VOCAB], [2**62]):
        assert len(requests.prompt_reasons(ids, VOCAB)) == 1, ids
    assert requests.prompt_reasons([0, VOCAB - 1], VOCAB) == []


def _table_faults() -> list[str]:
    """Fields of the host that the tables do not name, and the other way round."""
    from sglang.srt.managers import io_struct, scheduler
    from sglang.srt.sampling.sampling_params import SamplingParams

    fields = {f.name for f in dataclasses.fields(io_struct.GenerateReqInput)}
    source = inspect.getsource(scheduler.Scheduler.init_request_dispatcher)
    sent = set(re.findall(r"\(\s*(\w*Req\w*),", source))
    return sorted(
        (fields ^ set(request_fields.FIELDS))
        | (set(SamplingParams.__struct_fields__) ^ set(request_fields.SAMPLING))
        | (sent ^ set(control_requests.CONTROL))
    )


def test_every_field_and_message_has_a_rule() -> None:
    assert _table_faults() == []


def test_control_a_field_without_a_rule_is_found() -> None:
    for table in (
        request_fields.FIELDS,
        request_fields.SAMPLING,
        control_requests.CONTROL,
    ):
        name = next(reversed(table))
        with pytest.MonkeyPatch.context() as patch:
            patch.delitem(table, name)
            assert _table_faults() == [name]


def test_hook_raises_what_endpoints_answer_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt import runtime_context
    from sglang.srt.managers.io_struct import EmbeddingReqInput

    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCAB))
    labels = SimpleNamespace(tokenizer_metrics_allowed_custom_labels=None)
    monkeypatch.setattr(runtime_context, "get_observability", lambda: labels)
    health = SimpleNamespace(url=SimpleNamespace(path="/health"))
    request_fields.check_fields(manager, _request())
    request_fields.check_fields(manager, _request(rid="HEALTH_CHECK_1"), health)
    for bad in (_request({"top_k": "x"}), EmbeddingReqInput(text="a")):
        with pytest.raises(ValueError, match="found"):
            request_fields.check_fields(manager, bad)


def test_tokens_of_detokenize() -> None:
    def ask(tokens: Any) -> str:
        manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCAB))
        request = SimpleNamespace(tokens=tokens)
        try:
            check_tokens(SimpleNamespace(tokenizer_manager=manager), request)
        except ValueError as error:
            return str(error)
        return ""

    for good in ([], [0], [VOCAB - 1], [[1], []], [[]]):
        assert ask(good) == "", good
    for bad in ([-1], [VOCAB], [2**70], [[1], [VOCAB]]):
        assert "tokens" in ask(bad), bad


def test_control_messages_that_would_end_the_scheduler() -> None:
    from fastapi import HTTPException
    from sglang.srt.managers import io_struct as io

    manager = SimpleNamespace(rid_to_state={})

    def refused(sent: Any) -> bool:
        try:
            check_message(manager, sent)
        except HTTPException as error:
            assert error.status_code == 400 and "fix:" in error.detail
            return True
        return False

    start = io.ExpertDistributionReqType.START_RECORD
    release = io.ReleaseMemoryOccupationReqInput
    resume = io.ResumeMemoryOccupationReqInput
    assert refused(io.ExpertDistributionReq(action=start))
    assert refused(io.BeginWeightUpdateReqInput(selector="zz"))
    assert not refused(io.BeginWeightUpdateReqInput(selector="all"))
    assert refused(resume()) and refused(release(tags=["zz"]))
    manager.rid_to_state["a"] = None
    assert refused(release())
    manager.rid_to_state.clear()
    assert not refused(release()) and refused(release())
    assert not refused(resume()) and refused(resume())
    assert refused(io.ProfileReq(activities=["RPD"]))
    assert refused(io.ProfileReq(num_steps=-1))
    assert refused(io.ProfileReq(output_dir=__file__))
    assert not refused(io.ProfileReq(activities=["CPU"], output_dir="/tmp"))
    assert refused(io.SlowDownReqInput(forward_sleep_time=1e9))
    assert not refused(io.SlowDownReqInput(forward_sleep_time=None))
    assert refused(io.SetInternalStateReq(server_args={"a": "x"}))
    assert not refused(io.SetInternalStateReq(server_args={"a": 1.5}))
    assert not refused(io.AbortReq(rid="a"))
