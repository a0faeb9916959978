# SPDX-License-Identifier: Apache-2.0
"""Decoded JSON as a type: msgspec checks it, and what is wrong is said in our words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_WORDS = (
    (r"Expected (.+), got (.+)", r"found \2, expected \1"),
    (r"Expected (.+)", r"found another value, expected \1"),
    (r"Object missing required field (.+)", r"found no \1"),
    (r"Object contains unknown field (.+)", r"found an unknown field \1"),
)


def typed(
    value: Any, kind: type[T], wrong: Callable[[str], Exception], *, strict: bool = True
) -> T:
    """`value` as a `kind`; if not `strict`, texts may stand for numbers.

    Raises `wrong` with where it is not one, what was found there and what expected.
    """
    try:
        return msgspec.convert(value, kind, strict=strict)
    except (msgspec.ValidationError, UnicodeError) as error:
        # Lone surrogates, which JSON may hold, are no text.
        raise wrong(_said(str(error))) from error


def _said(text: str) -> str:
    """msgspec's message, which holds types and places and nothing of the value."""
    text, _, place = text.replace("`", "").partition(" - at $")
    for pattern, words in _WORDS:
        if re.fullmatch(pattern, text):
            text = re.sub(pattern, words, text)
            break
    return f"{place.lstrip('.')}: {text}" if place else text
