# SPDX-License-Identifier: Apache-2.0
"""The decode table's record as a table and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_exact.bench import exactness, runs, stats
from sglang_exact.bench.decode_table.measure import ONE_BY_ONE
from sglang_exact.bench.run import BenchRun
from sglang_exact.view import charts
from sglang_exact.view.tables import MISSING, TableData, number

COLUMNS = (
    "prompt tokens",
    "server",
    "decode tok/s",
    "spread",
    "ratio",
    "time to first token s",
    "ratio",
    "acceptance length",
    "exactness",
)


def tables(run: BenchRun) -> list[TableData]:
    """Medians, lowest to highest, and the median of the ratios inside a round."""
    lines = [
        "decode tok/s: tokens after the first over the time since it; median and "
        "lowest to highest over the rounds",
        f"ratio: over {run.settings.get('base')}, {_ratio_of(run)}",
        *dict.fromkeys(f"prompts: {row['prompt']}" for row in run.rows),
        *_from_cache(run.rows),
        "(exact): the server attests sglang_exact",
        *runs.remarks(run),
    ]
    rows = [_cells(row) for row in run.rows]
    return [TableData("Decode speed", COLUMNS, rows, lines, numbers=2)]


def _ratio_of(run: BenchRun) -> str:
    if run.settings.get("order") == ONE_BY_ONE:
        return "of medians: the servers ran one after the other"
    return "median of the ratios inside a round"


def _from_cache(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Times to the first token that are not those of the whole prompt."""
    return [
        f"{row['server']}, {row['prompt_tokens']:,}: up to {row['cached_tokens']:,} "
        "prompt tokens came from the prefix cache"
        + (f" ({row['cache_flush_error']})" if row["cache_flush_error"] else "")
        for row in rows
        if row["cached_tokens"]
    ]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    speed, ttft, got = row["decode_tok_s"], row["ttft_s"], row["acceptance"]
    first = row["plain"] and not row["exactness"]["compared"]
    return (
        f"{row['prompt_tokens']:,}",
        row["server"] + (" (exact)" if row["exact"] else ""),
        number(speed["median"], 2) if speed else MISSING,
        f"{speed['low']:,.2f} to {speed['high']:,.2f}" if speed else MISSING,
        _ratio(row["speed_ratio"]),
        number(ttft["median"], 3) if ttft else MISSING,
        _ratio(row["ttft_ratio"]),
        number(got["micro"] if got else None, 2),
        "reference" if first else exactness.show(row["exactness"]),
    )


def _ratio(found: dict[str, Any] | None) -> str:
    return number(found["median"] if found else None, 2, "x")


def speed_plot(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Decode speed by context."""
    found = []
    for row in rows:
        speed = stats.middle(row, "decode_tok_s")
        if speed is not None:
            context = row.get("title", row.get("prompt_tokens", row.get("length", "")))
            part = ((str(row["server"]), speed),)
            found.append(charts.Bar(str(context), str(row["server"]), part))
    return charts.bars("Decode speed by context", found, "tok/s, median")
