# SPDX-License-Identifier: Apache-2.0
"""Figures that others published, each with its source; nothing is estimated.

No copy of the DFlash2 model card with a source that can be cited is at hand: a reader
who has the card gives its figures for the accept table as a file, see `load`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import orjson

from sglang_exact.client.typed import typed
from sglang_exact.view.tables import MISSING, TableData, number


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One cell of a published accept table.

    `configuration` is matched with server names without regard to case. `tok_s` is
    output tokens per second, `acceptance` the mean acceptance length over requests.
    """

    dataset: str
    configuration: str
    concurrency: int | None = None
    tok_s: float | None = None
    speed_up: float | None = None
    acceptance: float | None = None
    source: str = ""


class Card(msgspec.Struct):
    """The figures of one source."""

    source: Annotated[str, msgspec.Meta(min_length=1)]
    figures: list[Figure]


class Speed(NamedTuple):
    """A published speed of one set-up, output tokens per second."""

    set_up: str
    in_flight: int
    tok_s: float
    exact: str
    source: str


_RTX6K = "github.com/local-inference-lab/rtx6kpro/issues/81"
_MTP = "github.com/sudoingX/qwen38-mtp/pull/68"
_MLX = "github.com/Blaizzy/mlx-vlm/pull/2140"
REPORTED = (
    Speed("RTX PRO 6000, FP8, DFlash2", 1, 108.75, "not claimed", _RTX6K),
    Speed("RTX PRO 6000, FP8, DFlash2", 4, 390.23, "not claimed", _RTX6K),
    Speed("vLLM, FP8, MTP with 3 drafts", 1, 77.8, "not claimed", _RTX6K),
    Speed("vLLM, FP8, MTP with 3 drafts", 4, 292.7, "not claimed", _RTX6K),
    Speed("RTX 5090, llama.cpp Q4, plain", 1, 71.9, "not claimed", _MTP),
    Speed("RTX 5090, llama.cpp Q4, MTP", 1, 170.3, "not claimed", _MTP),
    Speed("M5 Max, mlx-vlm 4-bit, DFlash2, code", 1, 63.3, "ids equal 200/200", _MLX),
    Speed("M5 Max, mlx-vlm 4-bit, DFlash2, math", 1, 60.7, "ids equal 200/200", _MLX),
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
    card = typed(raw, Card, lambda text: ValueError(f"{path}: {text}; fix: correct it"))
    replace = msgspec.structs.replace
    return tuple(replace(figure, source=card.source) for figure in card.figures)


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
