# SPDX-License-Identifier: Apache-2.0
"""Rows of result files, of older ones as well, in one form.

A row has `arm`, `title`, `tally` and `acceptance_length`. Older files say `ids_equal`
of `prompts`, `differ` of `answers`, `accept_length` or `tokens_per_verify`, and leave
the title to the arm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tools import ROOT

Row = dict[str, Any]


def load(name: str) -> list[Row]:
    """The files of a pattern under results/, their rows in one form."""
    found = [json.loads(p.read_text()) for p in sorted(ROOT.glob(f"results/{name}"))]
    return [
        one | {"rows": [read(row) for row in one["rows"]]} if "rows" in one else one
        for one in found
    ]


def read(row: Row) -> Row:
    """A row in one form; what it says itself stays."""
    return {**row, "tally": _tally(row), "acceptance_length": acceptance_length(row)}


def acceptance_length(row: Mapping[str, Any]) -> float | None:
    """Tokens per verify step, whatever a file calls it; None without."""
    names = ("acceptance_length", "accept_length", "tokens_per_verify")
    return next((row[name] for name in names if name in row), None)


def _tally(row: Mapping[str, Any]) -> Row | None:
    """How many answers were compared and equal; None where nothing was compared."""
    if "tally" in row:
        found: Row | None = row["tally"]
        return found
    if "differ" in row:
        return {"compared": row["answers"], "different": len(row["differ"])}
    if row.get("ids_equal") is None:
        return None
    first = row["first_difference"]
    return {
        "compared": row["prompts"],
        "ids_equal": row["ids_equal"],
        "logprobs_equal": row["logprobs_equal"],
        "first_difference": None if first is None else {"position": first},
    }


def different(row: Mapping[str, Any]) -> int:
    """Answers of which any bit that was compared differs, each time it was asked for.

    Other ids come with other logprobs, so the larger of the two counts is that of both.
    """
    tally = row["tally"]
    if "different" in tally:
        return int(tally["different"])
    ids = tally["compared"] - tally["ids_equal"]
    if tally["logprobs_equal"] is None:
        return int(ids)
    compared = tally.get("logprobs_compared", tally["compared"])
    return int(max(ids, compared - tally["logprobs_equal"]))


def title(row: Mapping[str, Any], known: Mapping[str, str]) -> str:
    """What a row's arm is called: as its file says, or as older ones mean it.

    Raises:
        ValueError: a file without titles holds an arm that nobody knows.
    """
    name = row["arm"]
    if "title" not in row and name not in known:
        raise ValueError(
            f"found a row of the arm {name!r} without a title, expected one or an arm "
            f"of {', '.join(known)}; fix: run the arm again, or give its rows a title"
        )
    return str(row.get("title") or known[name])


def place(row: Mapping[str, Any], known: Mapping[str, str]) -> tuple[int, str]:
    """Order of arms: as they are run, then the ones that are no longer."""
    name, names = row["arm"], list(known)
    return (names.index(name), "") if name in names else (len(names), name)
