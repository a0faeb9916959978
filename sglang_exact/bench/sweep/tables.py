# SPDX-License-Identifier: Apache-2.0
"""The sweep's record as a table and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_exact.bench import runs as report_runs
from sglang_exact.bench import stats
from sglang_exact.bench.exactness import show
from sglang_exact.bench.run import BenchRun
from sglang_exact.bench.stats import ratio
from sglang_exact.view import charts
from sglang_exact.view import files as plotting
from sglang_exact.view.tables import TableData, number


def exact_cell(found: Mapping[str, Any] | None) -> str:
    """The exactness of a row for a table; says so where only text was compared."""
    text = show(found)
    if found and found.get("what") == "text":
        return text.replace("ids equal", "text equal")
    return text


def speedups(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], float | None]:
    """Median decode speed over the plain server's at the same length."""
    base = {row["length"]: decode_median(row) for row in rows if row.get("plain")}
    return {
        (row["server"], row["length"]): ratio(
            decode_median(row), base.get(row["length"])
        )
        for row in rows
        if not row.get("plain")
    }


def decode_median(row: Mapping[str, Any]) -> float | None:
    """Median decode tok/s of a row."""
    return stats.middle(row, "decode_tok_s")


def tables(run: BenchRun) -> list[TableData]:
    """The sweep as a table: one row per length and server."""
    gains = speedups(run.rows)
    columns = (
        "ISL = OSL", "server", "decode tok/s", "low", "high", "TTFT ms", "speed-up",
        "acceptance", "requests", "exactness",
    )  # fmt: skip
    data = TableData("sweep: speed over context, one in flight", columns, numbers=2)
    for row in sorted(run.rows, key=lambda r: (r["length"], not r.get("plain"))):
        decode = row.get("decode_tok_s") or {}
        ttft = (row.get("ttft_ms") or {}).get("median")
        place = (row["server"], row["length"])
        data.rows.append(
            (
                str(row["length"]),
                row["server"],
                number(decode.get("median")),
                number(decode.get("low")),
                number(decode.get("high")),
                number(ttft),
                "base" if row.get("plain") else number(gains.get(place), 2, "x"),
                number(row.get("acceptance_length", row.get("acceptance")), 2),
                str(row["requests"]),
                "reference" if row.get("plain") else exact_cell(row.get("exactness")),
            )
        )
    data.below.append(
        "decode: median, lowest and highest request of (OSL - 1) / (last token - first "
        f"token); aiperf {run.settings.get('aiperf')}, seed {run.settings.get('seed')}"
    )
    overall = [g for g in gains.values() if g]
    if len(overall) > 1:
        data.below.append(
            f"speed-up from {min(overall):.2f}x to {max(overall):.2f}x, median "
            f"{statistics.median(overall):.2f}x"
        )
    if run.settings.get("plain") is None:
        data.below.append("no plain server: neither speed-up nor exactness")
    data.below.extend(report_runs.remarks(run))
    return [data]


def plot(run: BenchRun, path: Path) -> None:
    """Decode speed and speed-up over context length, as a file.

    Raises plotting.NoPlot without matplotlib or for an unknown suffix.
    """
    drawn, axes = plotting.figure()
    gains = speedups(run.rows)
    for place, name in enumerate(dict.fromkeys(row["server"] for row in run.rows)):
        rows = [r for r in run.rows if r["server"] == name and decode_median(r)]
        rows.sort(key=lambda r: r["length"])
        if not rows:
            continue
        colour = plotting.COLOURS[place % len(plotting.COLOURS)]
        x, y = [r["length"] for r in rows], [decode_median(r) for r in rows]
        low = [decode_median(r) - r["decode_tok_s"]["low"] for r in rows]
        high = [r["decode_tok_s"]["high"] - decode_median(r) for r in rows]
        axes.errorbar(x, y, yerr=[low, high], marker="o", color=colour, label=name)
        for row in rows:
            gain = gains.get((name, row["length"]))
            if gain:
                at = (row["length"], decode_median(row))
                axes.annotate(f"{gain:.2f}x", at, (4, 6), textcoords="offset points")
    axes.set_xscale("log", base=2)
    lengths = sorted({row["length"] for row in run.rows})
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.set_xlabel("ISL = OSL, tokens")
    axes.set_ylabel("decode tok/s, median and range")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    plotting.write(drawn, path)


def speed_plot(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Decode speed over context."""
    gains = speedups(rows)
    series = []
    for name, own in stats.by(rows, "server").items():
        known = sorted((r for r in own if decode_median(r)), key=lambda r: r["length"])
        points = [(r["length"], decode_median(r) or 0.0) for r in known]
        found = [gains.get((name, r["length"])) for r in known]
        texts = ["" if gain is None else f"{gain:.2f}x" for gain in found]
        series.append(charts.Series(name, points, texts=texts))
    title = "Decode speed over context, speed-up over plain at each point"
    return charts.lines(
        title, series, "ISL = OSL, tokens", "decode tok/s, median", log_x=True
    )
