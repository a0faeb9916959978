# SPDX-License-Identifier: Apache-2.0
"""The Ollama endpoints answer what was asked, streamed or not, or say what they cannot.

Why: the host (sglang/srt/entrypoints/ollama/serving.py) hands the scheduler a sampling
    parameter that does not exist for `seed`, takes `num_predict` -1 literally, and
    catches no error: the client gets a 500, or a stream of nothing with status 200.
    `format`, images and most options are dropped without a word. Every answer ends
    with `stop`, and a stream leaves out its last step's text and every count.
What: options become sampling parameters by the table below; `num_predict` below 0 or
    past the context ends with the context; `format` is a grammar. What is not served
    is refused with every reason at once. A stream begins when the first output is
    there, so that a refusal has its status, and ends with the counts and the
    `done_reason` of the answer without streaming. Errors have Ollama's form.
Scope: /api/chat and /api/generate, plain and speculative.
Retire when: the host serves these endpoints by its OpenAI classes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from sglang_exact.hooks.base import HOST_SCHEDULER, MAIN, TOKENIZER_MANAGER, hook
from sglang_exact.hooks.requests import text_of
from sglang_exact.hooks.text_endpoints import NO_TOKENIZER
from sglang_exact.reasons import Reason

_SERVING = "sglang.srt.entrypoints.ollama.serving.OllamaServing"
_FORMAT = "format"
_DEFAULT_NUM_PREDICT = 2048
"""The host's, for a request without `num_predict`."""

_NUMBER, _WHOLE = "a finite number", "a whole number"
_TEXTS = "a string or a list of strings"

SERVED = {
    "temperature": ("temperature", _NUMBER),
    "top_p": ("top_p", _NUMBER),
    "min_p": ("min_p", _NUMBER),
    "presence_penalty": ("presence_penalty", _NUMBER),
    "frequency_penalty": ("frequency_penalty", _NUMBER),
    "top_k": ("top_k", _WHOLE),
    "seed": ("sampling_seed", _WHOLE),
    "num_predict": ("max_new_tokens", _WHOLE),
    "stop": ("stop", _TEXTS),
}
"""Options of Ollama's API: the host's sampling parameter, and what a value is."""

NEUTRAL = {"repeat_penalty": 1, "mirostat": 0, "tfs_z": 1, "typical_p": 1}
"""Options that are not served, and the value at which they do nothing."""

IGNORED = frozenset(
    (
        *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread"),
        *("numa", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap"),
        *("use_mlock", "repeat_last_n", "mirostat_tau", "mirostat_eta"),
        "penalize_newline",
    )
)
"""Options about the machine, which is the server's, or of a method that is off."""

REFUSED = ("images", "suffix", "template", "context", "tools", "logprobs", "think")
"""Fields of a request that the host drops: an answer without them is another one."""

REFUSED_IN_MESSAGES = ("images", "tool_calls", "thinking")


class Sampling(dict[str, Any]):
    """Sampling parameters of an Ollama request, whose length the context may end."""


def _value(kind: str, value: Any) -> Any:
    """The value as the host takes it; None if it is not of this kind."""
    if kind == _TEXTS:
        texts = [value] if isinstance(value, str) else value
        good = isinstance(texts, list) and all(isinstance(t, str) for t in texts)
        return texts if good else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if kind == _WHOLE:
        # Ollama's clients may send any JSON number.
        return int(value) if value == value // 1 else None
    return value if math.isfinite(value) else None


def option_reasons(options: Mapping[str, Any]) -> list[Reason]:
    """Reasons against the options of a request; an option of None is not given."""
    reasons = []
    for name, value in options.items():
        if value is None or name in IGNORED:
            continue
        if name in SERVED:
            kind = SERVED[name][1]
            if _value(kind, value) is None:
                reasons.append(Reason(f"option {name}: {value!r}", kind, "correct it"))
        elif name not in NEUTRAL or value != NEUTRAL[name]:
            reasons.append(
                Reason(
                    f"option {name}: {value!r}",
                    "some of " + ", ".join(sorted(SERVED)),
                    "leave it out",
                )
            )
    new = _value(_WHOLE, options.get("num_predict"))
    if new is not None and new < -2:
        reasons.append(
            Reason(f"option num_predict: {new}", "-2 or more", "send -1 for no limit")
        )
    return reasons


def request_reasons(body: Mapping[str, Any]) -> list[Reason]:
    """Reasons against a request, from its JSON as it came."""
    found = [name for name in REFUSED if body.get(name) not in (None, "", [], {})]
    for message in body.get("messages") or ():
        found += [f"{n} of a message" for n in REFUSED_IN_MESSAGES if message.get(n)]
    reasons = [
        Reason(
            name,
            "text alone",
            "leave it out, or ask /v1/chat/completions if it is about tools, "
            "logprobs or thinking",
        )
        for name in dict.fromkeys(found)
    ]
    return reasons + option_reasons(body.get("options") or {})


def _error(text: str, status: int = 400) -> Any:
    from fastapi.responses import JSONResponse

    return JSONResponse({"error": text}, status_code=status)


def _answer(serving: Any, kind: str, model: str, text: str, **given: Any) -> Any:
    from sglang.srt.entrypoints.ollama import protocol

    given = {"model": model, "created_at": serving._get_timestamp(), **given}
    if kind == "chat":
        message = protocol.OllamaMessage(role="assistant", content=text)
        return protocol.OllamaChatResponse(message=message, **given)
    return protocol.OllamaGenerateResponse(response=text, **given)


def _end(output: Mapping[str, Any], started: int) -> dict[str, Any]:
    """What an answer says of its end, streamed or not."""
    meta = output["meta_info"]
    return {
        "done_reason": meta["finish_reason"]["type"],
        "total_duration": time.time_ns() - started,
        "prompt_eval_count": meta["prompt_tokens"],
        "eval_count": meta["completion_tokens"],
    }


def _refusal(output: Mapping[str, Any]) -> tuple[int, str] | None:
    """Status and text of a request that the scheduler ended, or None."""
    finish = output["meta_info"].get("finish_reason") or {}
    if finish.get("type") != "abort" or not finish.get("status_code"):
        return None
    return int(finish["status_code"]), str(finish.get("message"))


@hook(f"{_SERVING}.handle_generate", "AROUND", name="ollama_generate", roles=(MAIN,))
@hook(f"{_SERVING}.handle_chat", "AROUND", name="ollama_chat", roles=(MAIN,))
async def checked(
    original_fn: Callable[..., Awaitable[Any]],
    self: Any,
    request: Any,
    raw_request: Any,
) -> Any:
    """Around OllamaServing.handle_chat and handle_generate: every error has a status.

    Returns the host's response, or a JSON response with the reasons.
    """
    from fastapi import HTTPException
    from jinja2 import TemplateError

    reasons = request_reasons(await raw_request.json())
    if self.tokenizer_manager.tokenizer is None:
        reasons.append(NO_TOKENIZER)
    if reasons:
        return _error(text_of(reasons))
    if getattr(request, "messages", None) == []:
        end = {"done": True, "done_reason": "load"}
        return _answer(
            self, "chat", self.tokenizer_manager.served_model_name, "", **end
        )
    if request.format is not None:
        options = {**(request.options or {}), _FORMAT: request.format}
        request = request.model_copy(update={"options": options})
    try:
        return await original_fn(self, request, raw_request)
    except HTTPException as error:
        return _error(str(error.detail), error.status_code)
    except (ValueError, TemplateError) as error:
        return _error(str(error))


def _outputs(
    serving: Any, gen_request: Any, raw_request: Any
) -> AsyncGenerator[Any, None]:
    if gen_request.input_ids is not None and not gen_request.input_ids:
        raise ValueError(
            text_of([Reason("a prompt of no tokens", "one or more", "send some text")])
        )
    outputs: AsyncGenerator[Any, None] = serving.tokenizer_manager.generate_request(
        gen_request, raw_request
    )
    return outputs


def _whole(kind: str) -> None:
    @hook(
        f"{_SERVING}._generate_{kind}_response",
        "REPLACE",
        name=f"ollama_whole_{kind}",
        roles=(MAIN,),
    )
    async def whole(
        self: Any, gen_request: Any, raw_request: Any, model_name: str
    ) -> Any:
        """Replace OllamaServing._generate_..._response."""
        started = time.time_ns()
        output = await anext(_outputs(self, gen_request, raw_request))
        end = _end(output, started)
        return _answer(self, kind, model_name, output.get("text") or "", **end)


async def added_text(
    outputs: AsyncIterator[Any], incremental: bool
) -> AsyncIterator[tuple[str, Any]]:
    """What each output adds, and the output."""
    sent = 0
    async for output in outputs:
        text = output.get("text") or ""
        yield (text if incremental else text[sent:]), output
        sent = len(text)


def _streamed(kind: str) -> None:
    @hook(
        f"{_SERVING}._stream_{kind}_response",
        "REPLACE",
        name=f"ollama_stream_{kind}",
        roles=(MAIN,),
    )
    async def streamed(
        self: Any, gen_request: Any, raw_request: Any, model_name: str
    ) -> Any:
        """Replace OllamaServing._stream_..._response.

        Raises what ends the request before its first output, HTTPException included.
        """
        from fastapi import HTTPException
        from fastapi.responses import StreamingResponse
        from sglang.srt.runtime_context import get_serving

        started = time.time_ns()
        incremental = bool(get_serving().incremental_streaming_output)
        steps = added_text(_outputs(self, gen_request, raw_request), incremental)
        first = await anext(steps)
        refusal = _refusal(first[1])
        if refusal is not None:
            raise HTTPException(*refusal)

        def part(text: str) -> dict[str, Any]:
            made = _answer(self, kind, model_name, text, done=False, done_reason=None)
            parts: dict[str, Any] = made.model_dump(exclude_none=True)
            return parts

        async def lines() -> AsyncIterator[bytes]:
            step: tuple[str, Any] | None = first
            while step is not None:
                text, output = step
                refusal = _refusal(output)
                if refusal is not None:
                    yield _line({"error": refusal[1]})
                    return
                if text:
                    yield _line(part(text))
                if output["meta_info"].get("finish_reason") is not None:
                    end = _end(output, started)
                    yield _line(_answer(self, kind, model_name, "", **end).model_dump())
                    return
                step = await anext(steps, None)

        return StreamingResponse(lines(), media_type="application/x-ndjson")


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False).encode() + b"\n"


for _declare in (_whole, _streamed):
    _declare("chat")
    _declare("generate")


@hook(
    f"{_SERVING}._convert_options_to_sampling_params",
    "REPLACE",
    name="ollama_options",
    roles=(MAIN,),
)
def sampling_params(self: Any, options: Mapping[str, Any] | None = None) -> Sampling:
    """Replace OllamaServing._convert_options_to_sampling_params.

    `options` have passed `option_reasons`; `format` may be among them.
    """
    given = {k: v for k, v in (options or {}).items() if v is not None}
    params = Sampling(max_new_tokens=_DEFAULT_NUM_PREDICT)
    for name, (parameter, kind) in SERVED.items():
        if name in given:
            params[parameter] = _value(kind, given[name])
    if params["max_new_tokens"] < 0:
        params["max_new_tokens"] = None
    if params.get("top_k") is not None and params["top_k"] <= 0:
        params["top_k"] = -1
    if _FORMAT in given:
        schema = {"type": "object"} if given[_FORMAT] == "json" else given[_FORMAT]
        params["json_schema"] = json.dumps(schema)
    return params


@hook(
    f"{TOKENIZER_MANAGER}._validate_one_request",
    "BEFORE",
    name="ollama_length",
    roles=(MAIN,),
    relies_on=(
        f"{TOKENIZER_MANAGER}._handle_abort_finish_reason",
        f"{HOST_SCHEDULER}.init_req_max_new_tokens",
    ),
)
def end_with_the_context(self: Any, obj: Any, input_ids: Any) -> None:
    """Before TokenizerManager._validate_one_request: no more than the context holds.

    Without a number the scheduler ends a request there.
    """
    params = obj.sampling_params
    if isinstance(params, Sampling) and params["max_new_tokens"] is not None:
        total = len(input_ids or ()) + params["max_new_tokens"]
        if total + self.num_reserved_tokens > self.context_len:
            params["max_new_tokens"] = None
