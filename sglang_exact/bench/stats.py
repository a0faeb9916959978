# SPDX-License-Identifier: Apache-2.0
"""Medians, spread, ratios, and acceptance length."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sglang_exact.client.answer import Sample

Row = Mapping[str, Any]


class Spread(NamedTuple):
    """Of repeated measurements of one thing: all in the unit of the values."""

    n: int
    median: float
    mean: float
    low: float
    high: float

    def to_json(self) -> dict[str, Any]:
        """The spread as JSON types."""
        return self._asdict()


def spread(values: Iterable[float]) -> Spread | None:
    """Median, mean, lowest and highest; None without a value."""
    found = sorted(values)
    if not found:
        return None
    middle, mean = statistics.median(found), statistics.fmean(found)
    return Spread(len(found), middle, mean, found[0], found[-1])


def ratio(value: float | None, base: float | None) -> float | None:
    """`value` / `base`, None where either is missing or the base is 0."""
    return None if value is None or not base else value / base


class Acceptance(NamedTuple):
    """Acceptance length: tokens per verify step, the prefill's token included.

    `macro` is the mean over requests, as model cards give it; `micro` is the sum of
    completion tokens over the sum of verify steps, which does not favour short answers.
    """

    macro: float
    micro: float
    requests: int
    tokens: int
    verify: int

    def to_json(self) -> dict[str, Any]:
        """The acceptance as JSON types."""
        return self._asdict()


def consistent(sample: Sample) -> bool:
    """Whether an answer's counters can be those of its tokens.

    Beyond the prefill's token every verify step gives one and its accepted drafts, the
    last step perhaps fewer; True without counters.
    """
    found, tokens = sample.counters, len(sample.ids)
    if not found.verify:
        return True
    drafts = (n for n in (found.correct, found.proposed) if n is not None)
    return all(tokens - 1 <= found.verify + count for count in drafts)


def contradictions(samples: Sequence[Sample]) -> list[str]:
    """What to say of answers that `consistent` finds wrong; nothing without any."""
    wrong = sum(not consistent(sample) for sample in samples)
    if not wrong:
        return []
    return [
        f"the counters of {wrong} of {len(samples)} answers contradict their number of "
        "tokens: they give no acceptance length"
    ]


def acceptance(samples: Sequence[Sample]) -> Acceptance | None:
    """Acceptance length of the answers that carry `spec_verify_ct`; None without any.

    An answer of one token has no verify step and counts in neither mean, nor does one
    whose counters contradict its tokens.
    """
    good = [sample for sample in samples if consistent(sample)]
    pairs = [(len(s.ids), s.counters.verify) for s in good if s.counters.verify]
    if not pairs:
        return None
    tokens, steps = sum(p[0] for p in pairs), sum(p[1] or 0 for p in pairs)
    macro = statistics.fmean(n / v for n, v in pairs if v)
    return Acceptance(macro, tokens / steps, len(pairs), tokens, steps)


def middle(row: Row, key: str) -> float | None:
    """The median of a spread in a row, None where there is none."""
    found = row.get(key)
    return found.get("median") if isinstance(found, dict) else None


def by(rows: Sequence[Row], key: str) -> dict[str, list[Row]]:
    """Rows by the value of a key, in the order they came."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row.get(key)), []).append(row)
    return found
