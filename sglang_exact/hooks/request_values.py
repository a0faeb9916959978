# SPDX-License-Identifier: Apache-2.0
"""What a value of a request may be: one small check for each kind of value.

A check takes a value and the server's limits; it returns "" when the value may pass,
else what is expected. `request_fields` says which field has which.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

INT32 = 2**31 - 1
INT63 = 2**63 - 1
FLOAT32 = 3.4028234e38
"""The largest finite float32; past it, logits become NaN beside masked ones."""
MAX_BIAS = 1e20
"""Divided by the smallest penalty and temperature (1e-6 each), still a float32."""
MAX_COPIES = 4096
"""The host makes a request of its own of each copy before it looks at one."""
MAX_STOPS = 32
"""MAX_STOP_COUNT and MAX_STOP_REGEX_COUNT of sampling/sampling_params.py."""
MAX_REGEX_BYTES = 256
"""MAX_STOP_REGEX_LEN of sampling/sampling_params.py."""
HEALTH = "HEALTH_CHECK"
"""HEALTH_CHECK_RID_PREFIX of constants.py: such a request is dropped beside others."""


class Limits(NamedTuple):
    """What the server decides: vocabulary size, and names of metric labels."""

    vocab: int
    labels: frozenset[str] = frozenset()


Check = Callable[[Any, Limits], str]
"""Takes a value; returns "" when it may pass, else what is expected."""


def integer(low: int, high: int | str) -> Check:
    """An int (no bool) from low to high; high may be "vocab" or "last id"."""

    def check(value: Any, limits: Limits) -> str:
        named = {"vocab": limits.vocab, "last id": limits.vocab - 1}
        top = named[high] if isinstance(high, str) else high
        good = type(value) is int and low <= value <= top
        return "" if good else f"an integer from {low} to {top}"

    return check


def number(low: float, high: float) -> Check:
    """An int or a finite float from low to high."""

    def check(value: Any, limits: Limits) -> str:
        good = type(value) is float or (type(value) is int and abs(value) <= INT63)
        good = good and low <= value <= high
        return "" if good else f"a number from {low:g} to {high:g}"

    return check


def flag(value: Any, limits: Limits) -> str:
    """A bool."""
    return "" if type(value) is bool else "true or false"


def string(value: Any, limits: Limits) -> str:
    """Text that UTF-8 can write."""
    good = isinstance(value, str)
    if good:
        try:
            value.encode()
        except UnicodeEncodeError:
            good = False
    return "" if good else "text without lone surrogates"


def some_string(value: Any, limits: Limits) -> str:
    """Text that is not empty."""
    return "" if value and not string(value, limits) else "text that is not empty"


def never(value: Any, limits: Limits) -> str:
    """Nothing but the default: what the field asks for is not served."""
    return "nothing (it is not served)"


def off(value: Any, limits: Limits) -> str:
    """False: what the field asks for is not served."""
    return "" if value is False else never(value, limits)


def no_media(value: Any, limits: Limits) -> str:
    """An empty list, which is how endpoints say that there is none."""
    return "" if value == [] else never(value, limits)


def some(check: Check, most: int | str, kinds: tuple[type, ...] = (list,)) -> Check:
    """A list of at most `most` values, which may be "vocab"; Engines send `kinds`."""

    def look(value: Any, limits: Limits) -> str:
        top = limits.vocab if isinstance(most, str) else most
        if type(value) not in kinds:
            return f"a list of {check(object(), limits)}"
        if len(value) > top:
            return f"at most {top} values"
        wrong = next((wrong for v in value if (wrong := check(v, limits))), "")
        return f"a list of {wrong}" if wrong else ""

    return look


def one_or_some(check: Check, most: int) -> Check:
    """One value or a list of them."""

    def look(value: Any, limits: Limits) -> str:
        if isinstance(value, list):
            return some(check, most)(value, limits)
        wrong = check(value, limits)
        return f"{wrong}, or a list of such values" if wrong else ""

    return look


def mapping(keys: Check, values: Check) -> Check:
    """A dictionary."""

    def look(value: Any, limits: Limits) -> str:
        if not isinstance(value, Mapping):
            return "an object"
        wrong = [f"keys that are {bad}" for k in value if (bad := keys(k, limits))]
        wrong += [bad for v in value.values() if (bad := values(v, limits))]
        return f"an object of {wrong[0]}" if wrong else ""

    return look


def anything(value: Any, limits: Limits) -> str:
    """A value that the host reads for images alone."""
    return ""


def token_key(value: Any, limits: Limits) -> str:
    """A token id as JSON keys write it; "05" would be a second name of "5"."""
    plain = isinstance(value, str) and value.isascii() and value.isdigit()
    good = plain and str(int(value[:20])) == value and int(value) < limits.vocab
    return "" if good else f"token ids from 0 to {limits.vocab - 1} as text"


def label(value: Any, limits: Limits) -> str:
    """A label that the server's metrics know; another ends the metrics' loop."""
    known = ", ".join(sorted(limits.labels)) or "none"
    good = isinstance(value, str) and value in limits.labels
    return "" if good else f"of --tokenizer-metrics-allowed-custom-labels ({known})"


def request_id(value: Any, limits: Limits) -> str:
    """A name of a request."""
    good = not some_string(value, limits) and not value.startswith(HEALTH)
    return "" if good else f"text that is not empty and does not begin with {HEALTH}"


def custom_value(value: Any, limits: Limits) -> str:
    """CustomParamValue of sampling_params.py: what the scheduler can decode."""
    inner: Iterable[Any] = (value,)
    if isinstance(value, list):
        inner = value
    elif isinstance(value, Mapping):
        inner = [*value, *value.values()]
        if not all(isinstance(key, str) for key in value):
            inner = (object(),)
    good = all(
        item is None
        or type(item) is bool
        or (type(item) is int and -INT63 <= item <= INT63)
        or (type(item) is float and math.isfinite(item))
        or (isinstance(item, str) and not string(item, limits))
        for item in inner
    )
    return "" if good else "text, numbers, flags, or a list or an object of them"


def _nested_repeat(part: Any, inside: bool = False) -> bool:
    """Whether a repeat without end stands inside another: time without end.

    part: what `re` parses a pattern into: items (name, value), in lists and tuples.
    """
    if hasattr(part, "data"):
        part = part.data
    if not isinstance(part, (list, tuple)):
        return False
    if len(part) == 2 and str(part[0]) in ("MAX_REPEAT", "MIN_REPEAT"):
        endless = part[1][1] > INT32
        return (endless and inside) or _nested_repeat(part[1][2], inside or endless)
    return any(_nested_repeat(item, inside) for item in part)


def stop_pattern(value: Any, limits: Limits) -> str:
    """A pattern that `re` compiles and that ends on every text."""
    if string(value, limits) or len(value.encode()) > MAX_REGEX_BYTES:
        return f"a regular expression of at most {MAX_REGEX_BYTES} bytes"
    # The parser of `re` itself; it has no public name since Python 3.11.
    parse: Any = vars(re)["_parser"]
    try:
        re.compile(value)
        parsed = parse.parse(value)
    except (re.error, OverflowError, RecursionError) as error:
        return f"a regular expression ({error})"
    if _nested_repeat(parsed):
        return "a regular expression without a repeat inside a repeat (both endless)"
    return ""
