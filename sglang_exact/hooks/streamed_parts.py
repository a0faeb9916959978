# SPDX-License-Identifier: Apache-2.0
"""Reasoning and tool calls of a stream do not depend on where the stream is cut.

Why: the host's parsers see one piece of text per step. Some do one thing per piece:
    they send the name of a tool call and drop its arguments, or the text before it,
    if all of it comes at once (sglang/srt/function_call/base_format_detector.py:125);
    a tool call inside reasoning counts unless the end of the reasoning is in the same
    piece (sglang/srt/parser/reasoning_parser.py:205). A block of accepted tokens is
    one piece, and so are the tokens of several steps that wait for a busy server.
What: the parsers get their text a word or a sign at a time, whatever the blocks.
Scope: streamed chat and responses, plain and speculative, every parser.
Retire when: the host's parsers take any number of events from a piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from sglang_exact.hooks.base import MAIN, Hook

_PIECE = re.compile(r"\w+|\W")
_TOOLS = "sglang.srt.function_call.function_call_parser.FunctionCallParser"
_REASONING = "sglang.srt.parser.reasoning_parser.ReasoningParser"


def reasoning_by_pieces(
    original_fn: Callable[..., tuple[str | None, str | None]],
    self: Any,
    chunk_text: str,
) -> tuple[str, str]:
    """Around ReasoningParser.parse_stream_chunk; returns (reasoning, other text)."""
    parts = [original_fn(self, piece) for piece in _PIECE.findall(chunk_text)]
    return "".join(r or "" for r, _ in parts), "".join(t or "" for _, t in parts)


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


def _same(one: Any, other: Any) -> bool:
    return bool(one.tool_index == other.tool_index)


HOOKS = (
    Hook(
        name="streamed_reasoning",
        target=f"{_REASONING}.parse_stream_chunk",
        kind="AROUND",
        replacement=reasoning_by_pieces,
        roles=(MAIN,),
        relies_on=(
            "sglang.srt.parser.reasoning_parser.BaseReasoningFormatDetector"
            "._parse_streaming_increment_impl",
            f"{_REASONING}.parse_stream_end",
        ),
    ),
    Hook(
        name="streamed_tools",
        target=f"{_TOOLS}.parse_stream_chunk",
        kind="AROUND",
        replacement=tools_by_pieces,
        roles=(MAIN,),
        relies_on=(
            "sglang.srt.function_call.base_format_detector.BaseFormatDetector"
            ".parse_streaming_increment",
            "sglang.srt.function_call.qwen3_coder_detector.Qwen3CoderDetector"
            ".parse_streaming_increment",
            f"{_TOOLS}.parse_stream_end",
        ),
    ),
)
