# SPDX-License-Identifier: Apache-2.0
"""Requests that must get an answer in words and nothing else; no server ends of one."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

from traffic import prompt

HUGE = 2**70
MODEL = {"model": "default"}
CHAT = [{"role": "user", "content": "aqbwced"}]
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**40, 2**63, HUGE, 1.5, -0.5, 1e-300, 1e300),
    *("", "x", "(", [], [None], [-1], [2**31], ["x"], [[1]], [[[1]]], {}, {"x": 1}),
    *({"x": {"y": {"z": 1}}}, {"5": 1e300}, {"99999": 1}, ["x"] * 40),
)
"""Confused types, negative, huge, empty, too long, nested; JSON has no NaN."""


class Bad(NamedTuple):
    """A path, a body, and whether it has to be refused (else it may be served)."""

    path: str
    body: Any
    refused: bool = True


def _generate(sampling: Any = None, **body: Any) -> dict[str, Any]:
    given = {"temperature": 0, "max_new_tokens": 2, **(sampling or {})}
    return {"input_ids": prompt(3, 4), "sampling_params": given, **body}


def _of(path: str, base: dict[str, Any], *changes: dict[str, Any]) -> tuple[Bad, ...]:
    return tuple(Bad(path, {**MODEL, **base, **change}) for change in changes)


TWO = {
    "input_ids": [prompt(3, 4), prompt(4, 4)],
    "sampling_params": {"max_new_tokens": 2},
}
NAMED = (
    *(Bad("/generate", {"text": text}) for text in ("", [], ["ab", ""], 5)),
    *(
        Bad("/generate", {"input_ids": ids})
        for ids in ([], [-1], [2**31], [[5], [512]])
    ),
    *(
        Bad("/generate", _generate(sampling))
        for sampling in (
            *({"top_k": 2**40}, {"n": None}, {"n": 10**9}, {"stop_regex": "("}),
            *({"min_new_tokens": 1, "stop_token_ids": [600]}, {"max_tokens": 3}),
            *({"json_schema": {"type": "object"}}, {"stream_interval": 0}),
            *({"is_normalized": True}, {"custom_params": {"a": [[1]]}}),
            *({"repetition_penalty": 1e-300}, {"logit_bias": {"5": 1e300}}),
        )
    ),
    *(
        Bad("/generate", _generate(return_logprob=True, **body))
        for body in (
            *({"top_logprobs_num": 513}, {"token_ids_logprob": [512]}),
            *({"logprob_start_len": -2}, {"logprob_start_len": 99}, {"rid": ["a"]}),
            *({"rid": ""}, {"rid": "HEALTH_CHECK_1"}, {"priority": HUGE}),
            *({"http_worker_ipc": "ipc:///x"}, {"custom_labels": {"a": "b"}}),
            *({"need_wait_for_mm_inputs": True}, {"session_params": {"x": 1}}),
        )
    ),
    *(
        Bad("/generate", {**TWO, **body})
        for body in (
            *({"rid": ["a"]}, {"return_logprob": [True]}, {"top_logprobs_num": [1]}),
            *({"sampling_params": [{}]}, {"sampling_params": [{}, None]}),
        )
    ),
    Bad("/generate", {"input_ids": [5], "sampling_params": [{}]}),
    *_of(
        "/v1/completions",
        {"prompt": "aqbw"},
        *({"prompt": [5, 99999]}, {"prompt": [[5], [-3]]}, {"logprobs": 100_000}),
        *({"n": None}, {"rid": ["a"]}, {"stop_regex": "("}, {"seed": HUGE}),
        *({"top_k": 2**40}, {"top_k": 2**40, "stream": True}),
    ),
    *_of(
        "/v1/chat/completions",
        {"messages": CHAT},
        *({"logprobs": True, "top_logprobs": 10**6}, {"messages": []}),
        *({"seed": HUGE, "stream": True}, {"logit_bias": {"99999": 1}}),
    ),
    *_of("/v1/messages", {"messages": CHAT, "max_tokens": 4}, {"top_k": 2**40}),
    *_of(
        "/detokenize", {}, *({"tokens": ids} for ids in ([-1], [2**40], [[1], [HUGE]]))
    ),
    *_of(
        "/v1/score",
        {"query": "aq", "items": ["bw"]},
        *({"label_token_ids": [99999]}, {"label_token_ids": [-1]}),
    ),
    *(Bad(path, {"text": "aq"}) for path in ("/encode", "/classify")),
    *(
        Bad(f"/{verb}_expert_distribution_record", {})
        for verb in ("start", "stop", "dump")
    ),
    Bad("/resume_memory_occupation", {}),
    Bad("/begin_weight_update", {"selector": "x"}),
    Bad("/start_profile", {"activities": ["RPD"]}),
    Bad("/set_internal_state", {"server_args": {"pp_max_micro_batch_size": "x"}}),
)
"""What a hostile reading found; each has to be a 4xx."""


def sample(seed: int, count: int) -> Iterator[Bad]:
    """Requests with one field of any value, drawn from the tables of the validator.

    A length of None would answer to the end of the context.
    """
    from sglang_exact.hooks.request_fields import FIELDS, SAMPLING

    draw = random.Random(seed)
    sampling = sorted(SAMPLING.keys() - {"max_new_tokens"})
    chat = ("n", "logprobs", "top_logprobs", "seed", "stop", "logit_bias", "min_p")
    for _ in range(count):
        value, way = draw.choice(VALUES), draw.random()
        if way < 0.45:
            body = _generate({draw.choice(sampling): value})
            yield Bad("/generate", body, refused=False)
        elif way < 0.75:
            body = _generate(**{draw.choice(sorted(FIELDS)): value})
            yield Bad("/generate", body, refused=False)
        elif way < 0.85:
            name = draw.choice(sorted(FIELDS))
            yield Bad("/generate", {**TWO, **{name: [value, value]}}, refused=False)
        else:
            path, base = draw.choice(
                (
                    ("/v1/completions", {"prompt": "aqbw"}),
                    ("/v1/chat/completions", {"messages": CHAT}),
                )
            )
            body = {**MODEL, **base, "max_tokens": 2, draw.choice(chat): value}
            yield Bad(path, body, refused=False)


def status_of(url: str, bad: Bad) -> int:
    """The status; that of an error inside a stream, and 0 for no answer at all."""
    request = urllib.request.Request(
        url + bad.path,
        json.dumps(bad.body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b'data: {"error"'):
                    return int(json.loads(line[len(b"data: ") :])["error"]["code"])
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
