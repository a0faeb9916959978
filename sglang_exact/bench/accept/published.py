# SPDX-License-Identifier: Apache-2.0
"""Figures that others published, each with its source; nothing is estimated.

CARD holds the figures of the DFlash2 model card for the accept table. It is empty: no
copy of the card with a source that can be cited is at hand. A reader who has the card
gives its figures as a file, see `load`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from sglang_exact.view.tables import MISSING, TableData, number


class Figure(NamedTuple):
    """One cell of a published accept table.

    `configuration` is matched with server names without regard to case. `tok_s` is
    output tokens per second, `acceptance` the mean acceptance length over requests.
    """

    dataset: str
    concurrency: int | None
    configuration: str
    tok_s: float | None
    speed_up: float | None
    acceptance: float | None
    source: str


CARD: tuple[Figure, ...] = ()


class Speed(NamedTuple):
    """A published speed of one set-up, output tokens per second."""

    set_up: str
    in_flight: int
    tok_s: float
    exact: str
    source: str


REPORTED = (
    Speed(
        "RTX PRO 6000, FP8, DFlash2",
        1,
        108.75,
        "not claimed",
        "github.com/local-inference-lab/rtx6kpro/issues/81",
    ),
    Speed(
        "RTX PRO 6000, FP8, DFlash2",
        4,
        390.23,
        "not claimed",
        "github.com/local-inference-lab/rtx6kpro/issues/81",
    ),
    Speed(
        "vLLM, FP8, MTP with 3 drafts",
        1,
        77.8,
        "not claimed",
        "github.com/local-inference-lab/rtx6kpro/issues/81",
    ),
    Speed(
        "vLLM, FP8, MTP with 3 drafts",
        4,
        292.7,
        "not claimed",
        "github.com/local-inference-lab/rtx6kpro/issues/81",
    ),
    Speed(
        "RTX 5090, llama.cpp Q4, plain",
        1,
        71.9,
        "not claimed",
        "github.com/sudoingX/qwen38-mtp/pull/68",
    ),
    Speed(
        "RTX 5090, llama.cpp Q4, MTP",
        1,
        170.3,
        "not claimed",
        "github.com/sudoingX/qwen38-mtp/pull/68",
    ),
    Speed(
        "M5 Max, mlx-vlm 4-bit, DFlash2, code",
        1,
        63.3,
        "ids equal 200/200",
        "github.com/Blaizzy/mlx-vlm/pull/2140",
    ),
    Speed(
        "M5 Max, mlx-vlm 4-bit, DFlash2, math",
        1,
        60.7,
        "ids equal 200/200",
        "github.com/Blaizzy/mlx-vlm/pull/2140",
    ),
)
"""Qwen3.8-27B as its users report it, on hardware and at precisions of their own."""


def load(path: Path) -> tuple[Figure, ...]:
    """Figures of a card, read from JSON.

    {"source": URL, "figures": [{"dataset": .., "concurrency": .., "configuration": ..,
    "tok_s": .., "speed_up": .., "acceptance": ..}, ...]}; numbers may be left out.

    Raises ValueError for a file of another shape or without a source.
    """
    try:
        raw = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict) or not raw.get("source"):
        raise ValueError(f"{path}: found no source; expected where the figures stand")
    rows = raw.get("figures")
    if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
        raise ValueError(f"{path}: found no figures; expected a list of objects")
    return tuple(_figure(row, str(raw["source"]), path) for row in rows)


def _figure(row: dict[str, Any], source: str, path: Path) -> Figure:
    allowed = set(Figure._fields) - {"source"}
    wrong = [repr(key) for key in sorted(set(row) - allowed)]
    wrong += [
        k for k in ("dataset", "configuration") if not isinstance(row.get(k), str)
    ]
    wrong += [
        key
        for key in ("concurrency", "tok_s", "speed_up", "acceptance")
        if type(row.get(key)) not in (int, float, type(None))
    ]
    if wrong:
        raise ValueError(
            f"{path}: found a figure with a wrong or unknown {', '.join(wrong)}; "
            f"expected {', '.join(sorted(allowed))}"
        )
    return Figure(
        row["dataset"],
        row.get("concurrency"),
        row["configuration"],
        row.get("tok_s"),
        row.get("speed_up"),
        row.get("acceptance"),
        source,
    )


def cell(
    figures: Sequence[Figure], dataset: str, concurrency: int | None, name: str
) -> Figure | None:
    """The figure of one cell. `concurrency` None finds one of any concurrency, which
    is what acceptance length is published for."""
    for figure in figures:
        if (figure.dataset, figure.configuration.lower()) != (dataset, name.lower()):
            continue
        if concurrency is None or figure.concurrency in (None, concurrency):
            return figure
    return None


def table() -> TableData:
    """What others report, as a table of its own."""
    rows: list[tuple[str, ...]] = [
        (s.set_up, s.exact, str(s.in_flight), number(s.tok_s, 2) or MISSING, s.source)
        for s in REPORTED
    ]
    columns = ("published for Qwen3.8-27B", "exactness", "in flight", "tok/s", "source")
    below = ["other hardware, weights and prompts: for orientation only"]
    return TableData("Published elsewhere", columns, rows, below, numbers=2)
