# SPDX-License-Identifier: Apache-2.0
"""Every field of a request has a type, a range and a length before anything reads it.

Why: the host's scheduler trusts what it is sent. A value that it cannot decode
    (sglang/srt/managers/io_struct.py:1072), an id past the vocabulary or an integer
    past a tensor's type ends it, and with it every other request; other values end
    the handler with a TypeError, which is a 500 (entrypoints/http_server.py:943).
What: one table of every field of GenerateReqInput and of sampling_params. Before the
    host normalizes a request, a walker looks at each value, and at the length of each
    list beside the number of prompts; what does not fit ends the request with status
    400 and every reason. An unknown sampling parameter is a reason, not a TypeError.
Scope: every endpoint that generates, through TokenizerManager.generate_request.
Retire when: the host refuses by itself what its scheduler cannot take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from sglang_exact.hooks.base import MAIN, TOKENIZER_MANAGER, hook
from sglang_exact.hooks.request_values import (
    FLOAT32,
    INT32,
    INT63,
    MAX_BIAS,
    MAX_COPIES,
    MAX_STOPS,
    Check,
    Limits,
    anything,
    custom_value,
    flag,
    integer,
    label,
    mapping,
    never,
    no_media,
    number,
    off,
    one_or_some,
    request_id,
    some,
    stop_pattern,
    string,
    token_key,
)
from sglang_exact.hooks.requests import text_of
from sglang_exact.reasons import Reason


class Rule(NamedTuple):
    """One field. `each`: a batch may give a list with one value per prompt; `gaps`:
    that list may hold None; `lists`: one value is itself a list."""

    check: Check
    each: bool = False
    gaps: bool = False
    lists: bool = False


_id = integer(0, "last id")
_ids = some(_id, "vocab")
_stop_ids = some(_id, "vocab", (list, tuple, set))
TOKENS = some(_id, INT32)
_int32 = integer(0, INT32)
_int63 = integer(-INT63, INT63)

SAMPLING: dict[str, Check] = {
    "max_new_tokens": _int32,
    "min_new_tokens": _int32,
    "n": integer(1, MAX_COPIES),
    "beam_width": integer(1, 1),
    "stop": one_or_some(string, MAX_STOPS),
    "stop_token_ids": _stop_ids,
    "stop_regex": one_or_some(stop_pattern, MAX_STOPS),
    "temperature": number(0, FLOAT32),
    "top_p": number(1e-30, 1),
    "top_k": integer(-1, INT32),
    "min_p": number(0, 1),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "repetition_penalty": number(1e-6, 2),
    "json_schema": string,
    "regex": string,
    "ebnf": string,
    "structural_tag": string,
    "ignore_eos": flag,
    "skip_special_tokens": flag,
    "spaces_between_special_tokens": flag,
    "no_stop_trim": flag,
    "stream_interval": integer(1, INT32),
    "logit_bias": mapping(token_key, number(-MAX_BIAS, MAX_BIAS)),
    "sampling_seed": integer(-(2**63), INT63),
    "custom_params": mapping(string, custom_value),
    "watermark": never,
    "stop_strs": never,
    "stop_regex_strs": never,
    "stop_str_max_len": never,
    "stop_regex_max_len": never,
    "is_normalized": never,
    "ebnf_full_assistant": flag,
}
"""Every field of the host's SamplingParams; None takes the host's default."""

NOT_NULL = frozenset(("n", "ebnf_full_assistant"))
"""The host compares or sends these without a look at None."""

FIELDS: dict[str, Rule] = {
    "rid": Rule(request_id, each=True),
    "session_id": Rule(string),
    "text": Rule(string, each=True),
    "input_ids": Rule(anything),
    "sampling_params": Rule(anything),
    "return_logprob": Rule(flag, each=True),
    "logprob_start_len": Rule(integer(-1, INT32), each=True),
    "top_logprobs_num": Rule(integer(0, "vocab"), each=True),
    "token_ids_logprob": Rule(_ids, each=True, lists=True),
    **dict.fromkeys(
        (
            *("input_embeds", "mm_hashes", "mm_content_hashes", "watermark"),
            *("sampling_logprobs_mode", "session_params", "kv_hints"),
            *("positional_embed_overrides",),
            *("need_wait_for_mm_inputs", "num_items_assigned", "encoder_urls"),
            *("multi_item_delimiter_indices", "token_indices_to_pool"),
            *("return_routed_experts", "return_indexer_topk", "http_worker_ipc"),
        ),
        Rule(never),
    ),
    **dict.fromkeys(
        ("image_data", "modalities"),
        Rule(no_media, each=True, gaps=True),
    ),
    **dict.fromkeys(
        ("return_sampling_mask", "return_hidden_states"), Rule(off, each=True)
    ),
    **dict.fromkeys(
        ("lora_path", "lora_id", "video_data", "audio_data"),
        Rule(never, each=True, gaps=True),
    ),
    **dict.fromkeys(
        (
            *("return_text_in_logprobs", "return_flat_raw_top_logprobs", "stream"),
            *("return_flat_raw_output_top_logprobs", "log_metrics", "background"),
            *("return_flat_raw_top_logprobs_b64", "require_reasoning", "no_logs"),
            *("return_bytes", "return_entropy", "return_prompt_token_ids"),
            "use_audio_in_video",
        ),
        Rule(flag),
    ),
    "routed_experts_start_len": Rule(_int32),
    "custom_logit_processor": Rule(string, each=True, gaps=True),
    "bootstrap_host": Rule(string, each=True, gaps=True),
    "bootstrap_port": Rule(_int32, each=True, gaps=True),
    "bootstrap_room": Rule(integer(0, 2**62), each=True),
    "bootstrap_pair_key": Rule(string, each=True, gaps=True),
    "decode_tp_size": Rule(_int32, each=True, gaps=True),
    "routed_dp_rank": Rule(_int32),
    "data_parallel_rank": Rule(_int32),
    "disagg_prefill_dp_rank": Rule(_int32),
    "routing_key": Rule(string),
    "conversation_id": Rule(string),
    "max_thinking_tokens": Rule(_int32),
    "priority": Rule(_int63),
    "extra_key": Rule(string, each=True),
    "cache_salt": Rule(string, each=True),
    "custom_labels": Rule(mapping(label, string)),
    "external_trace_header": Rule(mapping(string, string)),
    "received_time": Rule(number(0, 1e15)),
    **dict.fromkeys(
        (
            *("video_config", "images_config", "mm_processor_kwargs"),
            *("max_dynamic_patch", "min_dynamic_patch"),
            *("image_max_dynamic_patch", "video_max_dynamic_patch"),
        ),
        Rule(anything),
    ),
}
"""Every field of the host's GenerateReqInput; its default always passes."""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({type(value).__name__})"


def _reason(name: str, value: Any, expected: str) -> Reason:
    return Reason(f"{name} = {_shown(value)}", expected, f"correct {name}")


def prompt_count(obj: Any) -> int | None:
    """How many prompts a batch has; None for one prompt that stands alone."""
    given = obj.text if obj.text is not None else obj.input_ids
    if isinstance(given, list) and not (given and isinstance(given[0], int)):
        return len(given)
    return None


def _prompt_reasons(obj: Any, count: int | None) -> list[Reason]:
    if obj.text is not None and obj.input_ids is not None:
        return [Reason("text and input_ids", "one of them", "leave one out")]
    if obj.text is None and obj.input_ids is None:
        return [Reason("neither text nor input_ids", "one of them", "send a prompt")]
    if count == 0 or obj.input_ids == []:
        return [Reason("no prompt", "at least one", "send a prompt")]
    ids = obj.input_ids
    if ids is None:
        return []
    rows = ids if count is not None else [ids]
    if all(isinstance(row, list) and set(map(type, row)) <= {int} for row in rows):
        return []
    return [_reason("input_ids", ids, "a list of integers, or a list of such lists")]


def sampling_reasons(params: Any, limits: Limits) -> list[Reason]:
    """Every reason against one set of sampling parameters."""
    if not isinstance(params, Mapping):
        return [_reason("sampling_params", params, "an object")]
    reasons = []
    for name, value in params.items():
        if name not in SAMPLING:
            known = ", ".join(n for n, check in SAMPLING.items() if check is not never)
            reasons.append(
                Reason(
                    f"sampling_params with {_shown(name)}",
                    f"some of {known}",
                    "rename it",
                )
            )
        elif value is None and name not in NOT_NULL:
            continue
        elif wrong := SAMPLING[name](value, limits):
            reasons.append(_reason(name, value, wrong))
    return reasons


def _values(rule: Rule, value: Any, count: int | None) -> list[Any] | None:
    """The values to look at one by one; None when a list has another length."""
    nested = isinstance(value, list) and (
        not rule.lists or any(isinstance(v, (list, type(None))) for v in value)
    )
    if count is None or not rule.each or not nested:
        return [value]
    return value if len(value) == count else None


def field_reasons(obj: Any, limits: Limits, health: bool = False) -> list[Reason]:
    """Every reason why the host must not see this GenerateReqInput."""
    count = prompt_count(obj)
    reasons = _prompt_reasons(obj, count)
    given = obj.sampling_params
    params = given if isinstance(given, list) else [{} if given is None else given]
    if isinstance(given, list) and len(given) != count:
        wanted = "an object" if count is None else f"an object or a list of {count}"
        reasons.append(_reason("sampling_params", given, wanted))
    for each in params:
        reasons += [r for r in sampling_reasons(each, limits) if r not in reasons]
    for field in dataclasses.fields(obj):
        name, value = field.name, getattr(obj, field.name)
        if value is field.default or (name == "rid" and health):
            continue
        rule = FIELDS[name]
        values = _values(rule, value, count)
        if values is None:
            reasons.append(_reason(name, value, f"one value, or a list of {count}"))
            continue
        wrong = [
            expected
            for v in values
            if not (v is None and v is not value and rule.gaps)
            and (expected := rule.check(v, limits))
        ]
        reasons += [_reason(name, value, expected) for expected in wrong[:1]]
    return reasons


def _limits(manager: Any) -> Limits:
    from sglang.srt.runtime_context import get_observability

    labels = get_observability().tokenizer_metrics_allowed_custom_labels
    return Limits(manager.model_config.vocab_size, frozenset(labels or ()))


@hook(
    "sglang.srt.entrypoints.openai.serving_tokenize.OpenAIServingDetokenize."
    "_convert_to_internal_request",
    "BEFORE",
    name="request_fields_detokenize",
    roles=(MAIN,),
    relies_on=(
        "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request",
    ),
)
def check_tokens(self: Any, request: Any, raw_request: Any = None) -> None:
    """Before OpenAIServingDetokenize._convert_to_internal_request.

    Raises ValueError, a 400, for an id that no token has.
    """
    rows = request.tokens
    rows = rows if rows and isinstance(rows[0], list) else [rows]
    limits = Limits(self.tokenizer_manager.model_config.vocab_size)
    wrong = [bad for row in rows if (bad := TOKENS(row, limits))]
    if wrong:
        raise ValueError(text_of([_reason("tokens", request.tokens, wrong[0])]))


@hook(
    f"{TOKENIZER_MANAGER}.generate_request",
    "BEFORE",
    name="request_fields",
    roles=(MAIN,),
    relies_on=(
        "sglang.srt.managers.io_struct.GenerateReqInput",
        "sglang.srt.sampling.sampling_params.SamplingParams",
    ),
)
def check_fields(self: Any, obj: Any, request: Any = None) -> None:
    """Before TokenizerManager.generate_request: every endpoint answers with a 400.

    Raises ValueError with every reason.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    if not isinstance(obj, GenerateReqInput):
        reasons = [
            Reason("an embedding request", "a request for text", "ask another model")
        ]
    else:
        path = getattr(getattr(request, "url", None), "path", "")
        reasons = field_reasons(obj, _limits(self), path.startswith("/health"))
    if reasons:
        raise ValueError(text_of(reasons))
