# SPDX-License-Identifier: Apache-2.0
"""The accept record as the tables of a drafter's model card, exactness included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang_exact.bench import exactness
from sglang_exact.bench import runs as report_runs
from sglang_exact.bench.accept import published
from sglang_exact.bench.accept.published import Figure
from sglang_exact.bench.run import BenchRun
from sglang_exact.view import charts
from sglang_exact.view.tables import MISSING, TableData, number

Row = dict[str, Any]
Cell = Callable[[Row | None], str]
CardCell = Callable[[str, int, str], str]
NO_CARD = (
    "card: no published figure with a source at hand; give those of the card with "
    "--published FILE"
)


def tables(run: BenchRun, figures: Sequence[Figure] = ()) -> list[TableData]:
    """Speed and acceptance length, one row per data set and concurrency."""
    names = list(dict.fromkeys(row["server"] for row in run.rows))
    plain = {row["server"] for row in run.rows if row["plain"]}
    names.sort(key=lambda name: name not in plain)
    cells = list(dict.fromkeys((r["title"], r["concurrency"]) for r in run.rows))
    found = {(r["title"], r["concurrency"], r["server"]): r for r in run.rows}
    drafting = [name for name in names if name not in plain]

    def filled(title: str, of: list[str], cell: Cell, card: CardCell) -> TableData:
        columns = ["Task", "In flight"]
        for name in of:
            columns += [name] if name in plain else [name, "card"]
        table = TableData(title, tuple(columns))
        for task, flight in cells:
            line = [task, str(flight)]
            for name in of:
                row = found.get((task, flight, name))
                line.append(cell(row))
                if name not in plain:
                    line.append(card(row["dataset"] if row else task, flight, name))
            table.rows.append(tuple(line))
        return table

    speed = filled(
        "Throughput, output tok/s (speed-up over plain)",
        names,
        _tok_s,
        lambda *place: _card_speed(published.cell(figures, *place)),
    )
    speed.below.extend(_below(run, figures))
    lengths = filled(
        "Acceptance length: mean over requests (all tokens / all verify steps)",
        drafting,
        _length,
        lambda data, _, name: _card_length(published.cell(figures, data, None, name)),
    )
    return [speed, lengths]


def _below(run: BenchRun, figures: Sequence[Figure]) -> list[str]:
    lines = []
    for data in run.settings.get("datasets", []):
        lines.append(
            f"{data['title']}: {data['rows']} rows, {data['source']}, "
            f"sha256 {data['sha256'][:16]}"
        )
    sources = dict.fromkeys(f.source for f in figures)
    lines += [f"card: {source}" for source in sources] or [NO_CARD]
    return lines + report_runs.remarks(run)


def _tok_s(row: Row | None) -> str:
    """Speed and exactness in one cell, so that neither is ever shown alone."""
    if row is None:
        return MISSING
    parts = [number(row["tok_s"], 1)]
    if row["speed_up"] is not None:
        parts[0] += f" ({row['speed_up']:.2f}x)"
    reference = row["plain"] and not row["exactness"]["compared"]
    parts.append("reference" if reference else exactness.show(row["exactness"]))
    if row["failed"]:
        parts.append(f"{row['failed']} failed")
    if row["partial"]:
        parts.append("partial")
    return ", ".join(parts)


def _card_speed(figure: Figure | None) -> str:
    if figure is None or figure.tok_s is None:
        return MISSING
    speed_up = "" if figure.speed_up is None else f" ({figure.speed_up:.2f}x)"
    return f"{figure.tok_s:,.1f}{speed_up}"


def _card_length(figure: Figure | None) -> str:
    return number(figure.acceptance if figure else None, 2)


def _length(row: Row | None) -> str:
    """Macro (micro), and of how many answers where some carried no counters."""
    got = row["acceptance"] if row else None
    if row is None or not got:
        return MISSING
    text = f"{got['macro']:.2f} ({got['micro']:.2f})"
    answered = row["requests"] - row["failed"]
    if got["requests"] < answered:
        text += f", of {got['requests']} of {answered} answers"
    return text


def speed_plot(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Output speed, by set and concurrency."""
    found = []
    for row in rows:
        if row.get("tok_s") is None:
            continue
        gain = row.get("speed_up")
        text = f"{row['tok_s']:,.1f}" + (f" ({gain:.2f}x)" if gain else "")
        if not row.get("plain"):
            text += f", {exactness.show(row.get('exactness'))}"
        group = f"{row['title']}, {row['concurrency']} in flight"
        part = ((str(row["server"]), row["tok_s"]),)
        found.append(charts.Bar(group, str(row["server"]), part, text))
    return charts.bars("Output speed", found, "tok/s")


def length_plot(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Acceptance length, by set and concurrency."""
    found = []
    for row in rows:
        length = row.get("acceptance")
        if isinstance(length, dict):
            group = f"{row['title']}, {row['concurrency']} in flight"
            part = ((str(row["server"]), length["macro"]),)
            text = f"{length['macro']:.2f} ({length['micro']:.2f})"
            found.append(charts.Bar(group, str(row["server"]), part, text))
    return charts.bars(
        "Acceptance length: macro (micro)", found, "tokens per verify step"
    )
