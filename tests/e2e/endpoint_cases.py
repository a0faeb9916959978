# SPDX-License-Identifier: Apache-2.0
"""One request for every way in: native, OpenAI, Anthropic and Ollama endpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from traffic import prompt

CONTEXT = 192
MODEL = {"model": "default"}
TEXT = "aqbwcedrftgyhu"
CHAT = [{"role": "user", "content": TEXT}]
GREEDY = {"temperature": 0, "ignore_eos": True}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


class Endpoint(NamedTuple):
    """One request: a name, a path and a JSON body."""

    name: str
    path: str
    body: Mapping[str, Any]


def _generate(name: str, seed: int, length: int, **body: Any) -> Endpoint:
    sampling = {**GREEDY, "max_new_tokens": 5, **body.pop("sampling_params", {})}
    ids = {"input_ids": prompt(seed, length)}
    return Endpoint(name, "/generate", {**ids, "sampling_params": sampling, **body})


SERVED = (
    _generate("n", 1, 9, sampling_params={"n": 2, "max_new_tokens": 3}),
    # The drafts are the second copy's answer: accepted there, rejected in the others.
    _generate(
        "n_sampled",
        14,
        9,
        sampling_params={"n": 3, "temperature": 0.9, "max_new_tokens": 5},
        return_logprob=True,
    ),
    Endpoint(
        "n_in_a_batch",
        "/generate",
        {
            "text": [TEXT, TEXT[:6]],
            "sampling_params": [
                {"temperature": 0.9, "sampling_seed": s, "max_new_tokens": 4, "n": 2}
                for s in (-3, 5)
            ],
            "return_logprob": True,
        },
    ),
    _generate("nothing_new", 2, 9, sampling_params={"max_new_tokens": 0}),
    _generate(
        "nothing_new_logprobs",
        3,
        9,
        sampling_params={"max_new_tokens": 0, "temperature": 0.7},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        token_ids_logprob=[5, 6],
    ),
    _generate(
        "flat_top_logprobs",
        4,
        9,
        return_logprob=True,
        top_logprobs_num=2,
        logprob_start_len=3,
        return_flat_raw_top_logprobs=True,
        return_flat_raw_output_top_logprobs=True,
    ),
    _generate(
        "labels",
        5,
        9,
        session_id="s",
        priority=None,
        extra_key="e",
        cache_salt="c",
        routing_key="r",
        conversation_id="k",
        no_logs=True,
        return_logprob=True,
        return_text_in_logprobs=True,
        return_prompt_token_ids=True,
    ),
    _generate("context_end", 6, CONTEXT - 12, sampling_params={"max_new_tokens": None}),
    _generate(
        "json_schema",
        11,
        9,
        sampling_params={"json_schema": json.dumps(SCHEMA), "max_new_tokens": 12},
        return_logprob=True,
    ),
    # The grammar ends before the request, which ignores end tokens.
    _generate(
        "regex_past_its_end",
        13,
        9,
        sampling_params={"regex": "[a-c][a-c]", "max_new_tokens": 6},
        return_logprob=True,
    ),
    _generate(
        "token_ids_of_nothing",
        12,
        9,
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        token_ids_logprob=[5, 6],
    ),
    Endpoint(
        "batch",
        "/generate",
        {
            "text": [TEXT, TEXT[:6]],
            "sampling_params": [
                {**GREEDY, "max_new_tokens": 4},
                {"temperature": 0.9, "sampling_seed": 4, "max_new_tokens": 5},
            ],
            "return_logprob": True,
        },
    ),
    Endpoint(
        "completions",
        "/v1/completions",
        {**MODEL, "prompt": TEXT, "max_tokens": 4, "temperature": 0, "n": 2,
         "logprobs": 2, "echo": True, "frequency_penalty": 0.5, "seed": 3},
    ),
    Endpoint(
        "completions_sampled",
        "/v1/completions",
        {**MODEL, "prompt": [TEXT, TEXT[2:]], "max_tokens": 4, "temperature": 0.8,
         "n": 2, "top_p": 0.9, "seed": 3, "stop": ["zz"], "min_tokens": 2},
    ),
    Endpoint(
        "chat",
        "/v1/chat/completions",
        {**MODEL, "messages": CHAT, "max_completion_tokens": 4, "temperature": 0,
         "logprobs": True, "top_logprobs": 2, "presence_penalty": 0.4},
    ),
    Endpoint(
        "chat_sampled",
        "/v1/chat/completions",
        {**MODEL, "messages": CHAT, "max_tokens": 4, "temperature": 1.0, "seed": 9,
         "n": 2, "logit_bias": {"40": 2.0}},
    ),
    Endpoint(
        "chat_schema",
        "/v1/chat/completions",
        {**MODEL, "messages": CHAT, "max_tokens": 8, "temperature": 0,
         "response_format": {
             "type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    ),
    Endpoint(
        "messages",
        "/v1/messages",
        {**MODEL, "messages": CHAT, "max_tokens": 4, "temperature": 0},
    ),
    Endpoint(
        "ollama_generate",
        "/api/generate",
        {**MODEL, "prompt": TEXT, "stream": False,
         "options": {"temperature": 0, "num_predict": 4}},
    ),
    Endpoint(
        "ollama_chat",
        "/api/chat",
        {**MODEL, "messages": CHAT, "stream": False,
         "options": {"temperature": 0, "num_predict": 4}},
    ),
    Endpoint(
        "ollama_sampled",
        "/api/generate",
        {**MODEL, "prompt": TEXT, "stream": False,
         "options": {"temperature": 0.9, "seed": 4, "top_k": 0, "num_predict": 4}},
    ),
    Endpoint(
        "ollama_context_end",
        "/api/generate",
        {**MODEL, "prompt": TEXT * 26, "stream": False,
         "options": {"temperature": 0, "num_predict": -1}},
    ),
    Endpoint(
        "ollama_past_the_context",
        "/api/chat",
        {**MODEL, "messages": [{"role": "user", "content": TEXT * 26}],
         "stream": False, "options": {"temperature": 0}},
    ),
    Endpoint(
        "ollama_schema",
        "/api/chat",
        {**MODEL, "messages": CHAT, "stream": False, "format": SCHEMA,
         "options": {"temperature": 0, "num_predict": 60}},
    ),
    Endpoint(
        "responses",
        "/v1/responses",
        {**MODEL, "input": TEXT, "temperature": 0, "max_output_tokens": 8},
    ),
    # The host keeps two of max_output_tokens to itself.
    Endpoint(
        "responses_sampled",
        "/v1/responses",
        {**MODEL, "input": CHAT, "instructions": "ab", "max_output_tokens": 8,
         "include": ["message.output_text.logprobs"], "top_logprobs": 3},
    ),
    Endpoint(
        "responses_schema",
        "/v1/responses",
        {**MODEL, "input": TEXT, "temperature": 0, "max_output_tokens": 80,
         "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    ),
    Endpoint(
        "score",
        "/v1/score",
        {**MODEL, "query": prompt(8, 5), "items": [prompt(9, 3), prompt(10, 4)],
         "label_token_ids": [7, 8], "apply_softmax": False},
    ),
)  # fmt: skip
"""What is served; each has to be answered as in plain decoding."""

STREAMED = tuple(
    case._replace(body={**case.body, "stream": True})
    for case in SERVED
    if case.name
    in ("chat", "ollama_generate", "ollama_chat", "ollama_schema", "responses")
)
"""Streams; what a client puts together of them is the answer without streaming."""


def put_together(lines: Iterable[bytes]) -> tuple[str, list[Any], Any]:
    """Text, logprobs and end of a chat, Ollama or responses stream, line by line."""
    text, logprobs, end = "", [], None
    for line in lines:
        data = line.strip().removeprefix(b"data: ")
        if not data.startswith(b"{"):
            continue
        found = json.loads(data)
        if found.get("object") == "response":
            parts = [part for item in found["output"] for part in item["content"]]
            text, end = "".join(part["text"] for part in parts), found
            continue
        if str(found.get("type")).startswith("response."):
            text += found["delta"] if found["type"].endswith("text.delta") else ""
            end = found.get("response", end)
            continue
        choice = (found.get("choices") or [found])[0]
        delta = choice.get("delta") or choice.get("message") or choice
        text += delta.get("content") or delta.get("response") or ""
        logprobs += (choice.get("logprobs") or {}).get("content") or []
        if found.get("done"):
            end = {k: v for k, v in found.items() if k not in ("message", "response")}
        end = choice.get("finish_reason") or end
    return text, logprobs, end


def _refused(name: str, **body: Any) -> Endpoint:
    return _generate(name, 1, 9, **body)


REFUSED = (
    _refused("return_hidden_states", return_hidden_states=True),
    _refused("return_sampling_mask", return_sampling_mask=True),
    _refused("token_indices_to_pool", token_indices_to_pool=[1]),
    _refused("multi_item_delimiter_indices", multi_item_delimiter_indices=[2]),
    _refused("positional_embed_overrides", positional_embed_overrides={"a": 1}),
    _refused("image", image_data="aGFsbG8="),
    _refused("session", session_params={"id": "a"}),
    _refused("lora_path", lora_path="a"),
    _refused("watermark", watermark={"key": "00"}),
    _refused("beam_width", sampling_params={"beam_width": 2}),
    _refused("input_embeds", input_ids=None, input_embeds=[[0.0] * 64] * 3),
    _refused("custom_logit_processor", custom_logit_processor='{"callable": "00"}'),
    _refused("JSON", sampling_params={"logit_bias": {"5": float("inf")}}),
    _refused("rank", routed_dp_rank=1),
    Endpoint("best_of", "/v1/completions", {**MODEL, "prompt": TEXT, "best_of": 2}),
    *(
        Endpoint(name, path, {**MODEL, "prompt": TEXT, "messages": CHAT, **body})
        for path in ("/api/generate", "/api/chat")
        for name, body in (
            ("seed", {"options": {"seed": "x"}}),
            ("top_p", {"options": {"top_p": 7}, "stream": False}),
            ("top_p", {"options": {"top_p": 7}}),
            ("repeat_penalty", {"options": {"repeat_penalty": 1.1}}),
            ("images", {"images": ["aGk="]}),
            ("think", {"think": True}),
        )
    ),
    Endpoint("context length", "/api/generate", {**MODEL, "prompt": TEXT * 30}),
    *(
        Endpoint(name, "/v1/responses", {**MODEL, "input": TEXT, **body})
        for name, body in (
            ("prompt", {"input": ""}),
            ("max_output_tokens", {"max_output_tokens": "a"}),
            ("max_new_tokens", {"max_output_tokens": 0}),
            ("top_k", {"top_k": 2**40}),
            ("min_p", {"min_p": 7}),
            ("repetition_penalty", {"repetition_penalty": 0}),
            (
                "top_logprobs",
                {"top_logprobs": 2**40, "include": ["message.output_text.logprobs"]},
            ),
            ("rid", {"request_id": ""}),
            ("response", {"previous_response_id": "resp_none"}),
            ("store", {"background": True}),
        )
    ),
    _refused("thinking", require_reasoning=True, max_thinking_tokens=2),
)
"""What gets a status 4xx; the name is a word of the answer."""

_VOLATILE = re.compile(
    r"^(id|rid|created(_at)?|completed_at|spec_.*|.*latency.*|.*_time|.*_ts|.*duration"
    r"|dp_rank|weight_version|cached_tokens.*|metadata|.*throughput.*)$"
)


def steady(value: Any) -> Any:
    """An answer without what differs from one request to the next: ids, times."""
    if isinstance(value, Mapping):
        return {k: steady(v) for k, v in value.items() if not _VOLATILE.match(k)}
    if isinstance(value, list):
        return [steady(entry) for entry in value]
    return value
