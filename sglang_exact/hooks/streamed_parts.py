# SPDX-License-Identifier: Apache-2.0
"""Reasoning and tool calls of a stream do not depend on where the stream is cut.

Why: the host's parsers see one piece of text per step. Some do one thing per piece:
    they send the name of a tool call and drop its arguments, or the text before it,
    if all of it comes at once (sglang/srt/function_call/base_format_detector.py:125);
    a tool call inside reasoning counts unless the end of the reasoning is in the same
    piece (sglang/srt/parser/reasoning_parser.py:205). What is parsed from one piece
    is sent text first (serving_chat.py:3677): the end of a call's arguments comes
    after the text behind the call, where the Anthropic endpoint drops it
    (entrypoints/anthropic/serving.py:1249). A piece without text has its logprobs
    dropped if no parser is configured (serving_chat.py:1053). /v1/responses makes
    items of what a piece holds, and drops line breaks between calls only if a piece
    holds nothing else (serving_responses.py:161). A block of
    accepted tokens is one piece, and so are the tokens of several steps that wait for
    a busy server.
    Text that may begin a tag is held back, and dropped if the answer ends there.
What: the parsers get their text a word or a sign at a time, and what they make of it
    is sent tag by tag, whatever the blocks. No logprob and no text is dropped.
Scope: streamed chat, Anthropic messages and responses, plain and speculative, every
    parser.
Retire when: the host's parsers take any number of events from a piece.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from typing import Any

from sglang_exact.hooks.base import MAIN, hook

_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_PART = re.compile(r"<[^<]*|[^<]+")
_RESPONSES = "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses"
_LINE_PART = re.compile(r"<[^<\s]*|\s+|[^<\s][^<]*")
_MARKS = (
    *("bot_token", "eot_token", "tool_call_start_token", "tool_call_end_token"),
    *("tool_call_prefix", "function_end_token", "parameter_prefix"),
    "parameter_end_token",
)
_HELD = ("_normal_text_buffer", "_buffer")
_PIECE = re.compile(r"\w+|\W")
_TOOLS = "sglang.srt.function_call.function_call_parser.FunctionCallParser"
_REASONING = "sglang.srt.parser.reasoning_parser.ReasoningParser"


def parts_of(
    text: str, sent: int, incremental: bool, part: re.Pattern[str] = _PART
) -> list[str]:
    """The texts of the steps that `text` after `sent` characters is taken in.

    A step adds one `part`: by default a tag and what follows it; nothing new is one
    step. With `incremental` output each holds what it adds, otherwise all there is
    so far.
    """
    parts = list(part.finditer(text, sent))
    found = [each[0] if incremental else text[: each.end()] for each in parts]
    return found or [text]


def _is_parsed(server: Any, request: Any) -> bool:
    reasoning = server.reasoning_parser and request.separate_reasoning
    return bool(reasoning or server._tool_call_parsing_active(request))


def _is_incremental() -> bool:
    from sglang.srt.runtime_context import get_serving

    return bool(get_serving().incremental_streaming_output)


async def steps_by_parts(
    outputs: AsyncIterator[Any], incremental: bool
) -> AsyncIterator[Any]:
    """Outputs of a streamed request, each made one output per part of its text."""
    sent = 0
    async for output in outputs:
        known = output
        if not isinstance(known, dict):
            known = getattr(output, "last_output", None)
        if not isinstance(known, dict) or not known.get("text"):
            yield output
            continue
        text = known["text"]
        texts = parts_of(text, sent, incremental, _LINE_PART)
        sent = 0 if incremental else len(text)
        going_on = {**(known.get("meta_info") or {}), "finish_reason": None}
        for part in texts[:-1]:
            yield {**known, "text": part, "meta_info": going_on}
        yield {**known, "text": texts[-1]}


@hook(
    f"{_CHAT}.__init__",
    "AFTER",
    name="streamed_responses",
    roles=(MAIN,),
    relies_on=(
        f"{_RESPONSES}._responses_stream_generator_non_harmony",
        f"{_RESPONSES}.responses_stream_generator_non_harmony",
    ),
)
def responses_by_parts(result: None, self: Any, *given: Any, **named: Any) -> None:
    """After OpenAIServingChat.__init__: /v1/responses takes its outputs by parts.

    Its class is a subclass whose module needs packages that not every server has.
    """
    name = "_responses_stream_generator_non_harmony"
    stream = getattr(self, name, None)
    if stream is None or self._encoding_output() is not None:
        return

    def by_parts(
        request: Any, settings: Any, outputs: AsyncIterator[Any], *more: Any, **kw: Any
    ) -> AsyncIterator[str]:
        steps = steps_by_parts(outputs, _is_incremental())
        events: AsyncIterator[str] = stream(request, settings, steps, *more, **kw)
        return events

    setattr(self, name, by_parts)


@hook(
    f"{_CHAT}._generate_stream_content",
    "AROUND",
    name="streamed_chat",
    roles=(MAIN,),
    relies_on=(
        f"{_CHAT}._generate_chat_stream",
        f"{_CHAT}._process_reasoning_stream",
        f"{_CHAT}._process_tool_call_stream",
        f"{_CHAT}._tool_call_parsing_active",
    ),
)
async def chat_by_parts(
    original_fn: Callable[..., AsyncIterator[str]], self: Any, **given: Any
) -> AsyncIterator[str]:
    """Around OpenAIServingChat._generate_stream_content: events in their order.

    Yields server-sent events, and one of its own for logprobs that have no other.
    """
    content, index = given["content"], given["index"]
    logprobs, finish = given["choice_logprobs"], given["finish_reason_type"]
    texts = [content["text"]]
    if self._encoding_output() is None and _is_parsed(self, given["request"]):
        known = given["stream_offsets"].get(index, 0)
        texts = parts_of(texts[0], known, _is_incremental())
    sent = False
    for i, text in enumerate(texts):
        step = {
            **given,
            "content": {**content, "text": text},
            "choice_logprobs": logprobs if i == 0 else None,
            "finish_reason_type": finish if i == len(texts) - 1 else None,
        }
        async for event in original_fn(self, **step):
            sent = True
            yield event
    if logprobs is not None and not sent:
        from sglang.srt.entrypoints.openai.sse_utils import build_sse_content

        yield build_sse_content(
            chunk_id=content["meta_info"]["id"],
            created=given["created"],
            model=given["request"].model,
            index=index,
            logprobs=logprobs,
        )


@hook(
    f"{_REASONING}.parse_stream_chunk",
    "AROUND",
    name="streamed_reasoning",
    roles=(MAIN,),
    relies_on=(
        "sglang.srt.parser.reasoning_parser.BaseReasoningFormatDetector"
        "._parse_streaming_increment_impl",
        f"{_REASONING}.parse_stream_end",
    ),
)
def reasoning_by_pieces(
    original_fn: Callable[..., tuple[str | None, str | None]],
    self: Any,
    chunk_text: str,
) -> tuple[str, str]:
    """Around ReasoningParser.parse_stream_chunk; returns (reasoning, other text)."""
    parts = [original_fn(self, piece) for piece in _PIECE.findall(chunk_text)]
    return "".join(r or "" for r, _ in parts), "".join(t or "" for _, t in parts)


@hook(
    f"{_TOOLS}.parse_stream_chunk",
    "AROUND",
    name="streamed_tools",
    roles=(MAIN,),
    relies_on=(
        "sglang.srt.function_call.base_format_detector.BaseFormatDetector"
        ".parse_streaming_increment",
        "sglang.srt.function_call.qwen3_coder_detector.Qwen3CoderDetector"
        ".parse_streaming_increment",
        f"{_TOOLS}.parse_stream_end",
    ),
)
def tools_by_pieces(
    original_fn: Callable[..., tuple[str, list[Any]]], self: Any, chunk_text: str
) -> tuple[str, list[Any]]:
    """Around FunctionCallParser.parse_stream_chunk; returns (other text, calls).

    Arguments of one call that follow each other are sent as one piece.
    """
    text = ""
    calls: list[Any] = []
    for piece in _PIECE.findall(chunk_text):
        more, found = original_fn(self, piece)
        text += more or ""
        for call in found:
            last = calls[-1] if calls else None
            if last is None or call.name or last.name or not _same(last, call):
                calls.append(call)
            else:
                calls[-1] = last.model_copy(
                    update={"parameters": last.parameters + call.parameters}
                )
    return text, calls


@hook(
    f"{_TOOLS}.parse_stream_end",
    "AFTER",
    name="streamed_tools_end",
    roles=(MAIN,),
    relies_on=(
        "sglang.srt.function_call.hermes_detector.HermesDetector"
        ".parse_streaming_increment",
        "sglang.srt.function_call.qwen25_detector.Qwen25Detector"
        ".parse_streaming_increment",
    ),
)
def release_held_text(
    result: tuple[str, list[Any]], self: Any
) -> tuple[str, list[Any]] | None:
    """After FunctionCallParser.parse_stream_end: what began a mark, and was none.

    Text that may begin a mark is held back. When the stream ends without a call it
    is text, as in a whole answer, which drops what follows a call.
    """
    text, calls = result
    if text or calls or getattr(self.detector, "current_tool_id", 0) >= 0:
        return None
    marks = [mark.strip() for mark in _texts(self.detector, _MARKS)]
    held = _texts(self.detector, _HELD)
    text = "".join(t for t in held if any(m.startswith(t) and m != t for m in marks))
    return (text, calls) if text else None


def _texts(detector: Any, names: tuple[str, ...]) -> list[str]:
    found = [getattr(detector, name, None) for name in names]
    return [text for text in found if isinstance(text, str)]


def _same(one: Any, other: Any) -> bool:
    return bool(one.tool_index == other.tool_index)
