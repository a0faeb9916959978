# SPDX-License-Identifier: Apache-2.0
"""Exactness beside every speed: answers compared with those of plain decoding.

The comparison is the verifier's: bits, no tolerance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_exact.client.answer import Sample
from sglang_exact.verify.compare import compare

NOT_COMPARED = "not compared"


@dataclass(slots=True)
class Tally:
    """How many answers were compared with plain decoding and how many were equal.

    `logprobs` counts the answers for which both sides carried logprobs; `first` is the
    first difference found, as JSON types.
    """

    compared: int = 0
    ids_equal: int = 0
    logprobs: int = 0
    logprobs_equal: int = 0
    first: dict[str, Any] | None = None
    missing: list[str] = field(default_factory=list)

    def add(self, key: str, answer: Sample, reference: Sample | None) -> bool | None:
        """Compare one answer; whether ids (and logprobs) are equal, None without a
        reference."""
        if reference is None:
            self.missing.append(key)
            return None
        ids = answer.ids == reference.ids
        both = bool(answer.logprobs) and bool(reference.logprobs)
        bits = both and answer.logprobs == reference.logprobs
        # A logprob that is not a number proves nothing.
        bits = bits and None not in answer.logprobs
        self.logprobs += both
        self.logprobs_equal += bits
        equal = ids and (bits or not both)
        found = None if equal or self.first else compare(answer, reference)
        first = {
            "what": list(found.what) if found else [],
            "position": found.position if found else None,
            "ids": list(found.ids) if found else [],
        }
        self.count(key, ids, None if equal else first)
        return equal

    def count(self, key: str, ids: bool, first: dict[str, Any] | None) -> None:
        """One answer more, whose `ids` are equal; `first` says where it differs."""
        self.compared += 1
        self.ids_equal += ids
        if first is not None and self.first is None:
            self.first = {"request": key, **first}

    def text(self) -> str:
        """For a table: `ids equal n/n`, with logprobs where they were asked for."""
        return show(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The tally as JSON types."""
        return {
            "compared": self.compared,
            "ids_equal": self.ids_equal,
            "logprobs_compared": self.logprobs,
            "logprobs_equal": self.logprobs_equal,
            "first_difference": self.first,
            "without_reference": len(self.missing),
        }


_COUNTS = (
    "compared",
    "ids_equal",
    "logprobs_compared",
    "logprobs_equal",
    "without_reference",
)


def total(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The `exactness` of several rows as that of one; those of the plain server, whose
    `plain` is true, are left out, and those that were compared with nothing."""
    each = [row["exactness"] for row in rows if not row.get("plain")]
    found = [one for one in each if one]
    firsts = (one.get("first_difference") for one in found)
    return {
        **{name: sum(one.get(name, 0) for one in found) for name in _COUNTS},
        "first_difference": next((first for first in firsts if first), None),
    }


def show(found: Mapping[str, Any] | None) -> str:
    """The cell of a table for the `exactness` object of a row."""
    if not found or not found.get("compared"):
        return NOT_COMPARED
    text = f"ids equal {found['ids_equal']}/{found['compared']}"
    if found.get("logprobs_compared"):
        equal, count = found["logprobs_equal"], found["logprobs_compared"]
        text += f", logprobs equal {equal}/{count}"
    if found.get("without_reference"):
        text += f", {found['without_reference']} {NOT_COMPARED}"
    return text
