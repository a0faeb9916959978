# SPDX-License-Identifier: Apache-2.0
"""Decoded JSON as a type: msgspec checks it, and what is wrong is said in our words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_OTHER_TYPE = re.compile(r"Expected (.+), got (.+)")
_OTHER_VALUE = re.compile(r"Expected (.+)")
_MISSING = re.compile(r"Object missing required field (.+)")
_UNKNOWN = re.compile(r"Object contains unknown field (.+)")


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
    if match := _OTHER_TYPE.fullmatch(text):
        kind, got = match.groups()
        text = f"found {got}, expected {kind}"
    elif match := _OTHER_VALUE.fullmatch(text):
        (kind,) = match.groups()
        text = f"found another value, expected {kind}"
    elif match := _MISSING.fullmatch(text):
        (field,) = match.groups()
        text = f"found no {field}, expected it"
    elif match := _UNKNOWN.fullmatch(text):
        (field,) = match.groups()
        text = f"found an unknown field {field}"
    return f"{place.lstrip('.')}: {text}" if place else text
