# SPDX-License-Identifier: Apache-2.0
"""Rows of data sets as requests.

The functions named like sets make the user message of a row in the set's own fields,
and give None for a row that has other fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_exact.client.answer import Request

OwnFields = Callable[[Mapping[str, Any]], str | None]

MATH_INSTRUCTION = (
    "\nPlease reason step by step, and put your final answer within \\boxed{}."
)
CODE_INSTRUCTION = (
    "Write a solution to the following problem and make sure that it passes the "
    "tests:\n```python\n{prompt}\n```"
)


def gsm8k(row: Mapping[str, Any]) -> str | None:
    """The question, with the instruction to reason."""
    # The shipped copy calls the question a prompt and says where it is from.
    raw = row.get("prompt") if row.get("source") == "gsm8k" else row.get("question")
    return raw + MATH_INSTRUCTION if isinstance(raw, str) else None


def math500(row: Mapping[str, Any]) -> str | None:
    """The problem, with the instruction to reason."""
    raw = row.get("problem")
    return raw + MATH_INSTRUCTION if isinstance(raw, str) else None


def humaneval(row: Mapping[str, Any]) -> str | None:
    """The function to be written, fenced."""
    if not isinstance(row.get("prompt"), str) or "entry_point" not in row:
        return None
    return CODE_INSTRUCTION.replace("{prompt}", row["prompt"])


def mbpp(row: Mapping[str, Any]) -> str | None:
    """The task as it stands."""
    raw = row.get("prompt")
    return raw if isinstance(raw, str) else None


def mt_bench(row: Mapping[str, Any]) -> str | None:
    """The first turn."""
    turns = row.get("turns", row.get("prompt"))
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return turns[0]
    return None


def request_of(name: str, own: OwnFields | None, row: Any) -> Request:
    """One row as a request, whose max_new_tokens is set by who asks.

    `own` reads the fields of a known set; a row without them has one of input_ids,
    messages, turns, prompt and text. Raises ValueError for any other.
    """
    if not isinstance(row, dict):
        raise ValueError("found no object")
    content = own(row) if own is not None else None
    if content is not None:
        return _user(name, content)
    kinds = [
        k for k in ("input_ids", "messages", "turns", "prompt", "text") if k in row
    ]
    if not kinds:
        raise ValueError(
            "found none of input_ids, messages, turns, prompt, text; expected one"
        )
    return _BY_KIND[kinds[0]](name, row[kinds[0]])


def _ids(name: str, value: Any) -> Request:
    if not (
        isinstance(value, list)
        and value
        and all(type(item) is int and item >= 0 for item in value)
    ):
        raise ValueError("input_ids must be a list of token ids that is not empty")
    return Request(name, 1, ids=tuple(value))


def _messages(name: str, value: Any) -> Request:
    if not (
        isinstance(value, list)
        and value
        and all(
            isinstance(m, dict)
            and isinstance(m.get("role"), str)
            and isinstance(m.get("content"), str)
            for m in value
        )
    ):
        raise ValueError("messages must be a list of objects with role and content")
    parts = tuple({"role": m["role"], "content": m["content"]} for m in value)
    return Request(name, 1, messages=parts)


def _turns(name: str, value: Any) -> Request:
    if isinstance(value, list) and value:
        value = value[0]
    return _user(name, value)


def _user(name: str, value: Any) -> Request:
    if not isinstance(value, str) or not value:
        raise ValueError("a prompt must be a string that is not empty")
    return Request(name, 1, messages=({"role": "user", "content": value},))


def _text(name: str, value: Any) -> Request:
    if not isinstance(value, str) or not value:
        raise ValueError("text must be a string that is not empty")
    return Request(name, 1, text=value)


_BY_KIND: dict[str, Callable[[str, Any], Request]] = {
    "input_ids": _ids,
    "messages": _messages,
    "turns": _turns,
    "prompt": _user,
    "text": _text,
}
