# SPDX-License-Identifier: Apache-2.0
"""A table once, for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

MISSING = "-"


@dataclass(frozen=True, slots=True)
class TableData:
    """A title, column names, rows of cells, and lines below.

    Columns from number `numbers` on hold numbers and are set to the right.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    below: list[str] = field(default_factory=list)
    numbers: int = 1


def number(value: float | None, digits: int = 1, unit: str = "") -> str:
    """A cell: a number with its digits, or the mark of a missing one."""
    return MISSING if value is None else f"{value:,.{digits}f}{unit}"


def markdown(table: TableData) -> str:
    """The table as Markdown; nothing inside a cell is read as markup."""
    rule = ["---" if i < table.numbers else "---:" for i in range(len(table.columns))]
    lines = [f"**{escaped(table.title)}**", "", _line(table.columns), _line(rule)]
    lines += [_line(row) for row in table.rows]
    if table.below:
        lines += ["", *(f"- {escaped(text)}" for text in table.below)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(escaped(cell) for cell in cells)} |"


_MARKS = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def escaped(value: object) -> str:
    """Text that Markdown shows as it is: no HTML, links, images, code or columns.

    What servers and models write gets into tables.
    """
    text = " ".join(str(value).split())
    made = "".join(_MARKS.get(ch, ch) for ch in text)
    return "".join(f"\\{ch}" if ch in "\\`*_[]|#!~" else ch for ch in made)


def show(table: TableData, console: Console) -> None:
    """The table on a terminal; nothing in it is read as markup."""
    console.print(Text(table.title, style="bold"))
    shown = Table(box=None, pad_edge=False)
    for place, name in enumerate(table.columns):
        justify = "left" if place < table.numbers else "right"
        shown.add_column(name, justify=justify, no_wrap=not place)  # type: ignore[arg-type]
    for row in table.rows:
        shown.add_row(*(Text(cell) for cell in row))
    console.print(shown)
    for text in table.below:
        console.print(Text(text))
