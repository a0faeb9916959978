# SPDX-License-Identifier: Apache-2.0
"""The leaderboard's runs as rows, tables and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sglang_exact.bench import exactness, stats
from sglang_exact.bench import runs as report_runs
from sglang_exact.bench.exactness import Tally
from sglang_exact.bench.leaderboard.run_log import Line
from sglang_exact.bench.run import BenchRun
from sglang_exact.view import charts
from sglang_exact.view import files as plotting
from sglang_exact.view.tables import MISSING, TableData, number

Row = dict[str, Any]


def summarize(lines: Sequence[Line], plain: str) -> tuple[list[Row], dict[str, Any]]:
    """One row per configuration and draft length, and the exactness of all of them.

    Answers are compared by the hash of their token ids: with plain decoding's if all
    its runs agree, else with nothing.
    """
    groups: dict[tuple[str, int], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.configuration, line.draft_length), []).append(line)
    base = [line for line in lines if line.configuration == plain]
    answers = {line.ids_sha256 for line in base}
    reference = next(iter(answers)) if len(answers) == 1 else None
    base_speed = statistics.fmean(line.tok_s for line in base) if base else None
    rows = [
        _row(key, groups[key], plain, reference, base_speed) for key in sorted(groups)
    ]
    rows.sort(key=lambda row: not row["plain"])
    return rows, {**exactness.total(rows), "plain_answers": len(answers)}


def _row(
    key: tuple[str, int],
    lines: list[Line],
    plain: str,
    reference: str | None,
    base_speed: float | None,
) -> Row:
    speed = stats.spread(line.tok_s for line in lines)
    decode = stats.spread(_known(line.decode_tok_s for line in lines))
    ttft = stats.spread(_known(line.ttft_s for line in lines))
    tally = Tally()
    # The first plain run is the reference: it is not compared with itself.
    for line in lines[int(key[0] == plain and reference is not None) :]:
        if reference is None:
            tally.missing.append(str(line.run))
        else:
            same = line.ids_sha256 == reference
            tally.count(str(line.run), same, None if same else {})
    return {
        "configuration": key[0],
        "draft_length": key[1],
        "plain": key[0] == plain,
        "runs": len(lines),
        "tokens": sum(line.tokens for line in lines),
        "tok_s": speed.to_json() if speed else None,
        "decode_tok_s": decode.to_json() if decode else None,
        "ttft_s": ttft.to_json() if ttft else None,
        "speed_up": None
        if key[0] == plain
        else stats.ratio(speed.mean if speed else None, base_speed),
        "acceptance_length": _mean(line.acceptance_length for line in lines),
        "accepted_per_verify": _mean(line.accepted_per_verify for line in lines),
        "distinct_answers": len({line.ids_sha256 for line in lines}),
        "exactness": tally.to_json(),
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return statistics.fmean(known) if known else None


def best(rows: Sequence[Row]) -> list[Row]:
    """Of every configuration the draft length with the highest mean, fastest first."""
    found: dict[str, Row] = {}
    for row in rows:
        name = row["configuration"]
        if name not in found or row["tok_s"]["mean"] > found[name]["tok_s"]["mean"]:
            found[name] = row
    return sorted(found.values(), key=lambda row: -row["tok_s"]["mean"])


COLUMNS = (
    "configuration",
    "drafts",
    "mean tok/s",
    "lowest",
    "highest",
    "decode tok/s",
    "speed-up",
    "accepted per verify",
    "acceptance length",
    "runs",
    "exactness",
)


def tables(run: BenchRun) -> list[TableData]:
    """Best mean per configuration, then every draft length."""
    below = [
        "tok/s: tokens over the whole request; decode tok/s: without the time to the "
        "first token",
        "accepted per verify: drafts kept in a verify step, of the number in `drafts`",
        *_unsteady(run),
        *report_runs.remarks(run),
    ]
    return [
        TableData(
            "Best mean per configuration",
            COLUMNS,
            [_cells(row) for row in best(run.rows)],
            numbers=1,
        ),
        TableData(
            "Every draft length",
            COLUMNS,
            [_cells(row) for row in run.rows],
            below,
            numbers=1,
        ),
    ]


def _unsteady(run: BenchRun) -> list[str]:
    count = run.exactness.get("plain_answers")
    if count is None or count == 1:
        return []
    why = f"plain decoding gave {count} different answers" if count else "no plain run"
    return [f"nothing is compared: {why}"]


def _cells(row: Row) -> tuple[str, ...]:
    reference = row["plain"] and row["runs"] == 1
    speed, decode = row["tok_s"], row["decode_tok_s"]
    return (
        row["configuration"],
        str(row["draft_length"]),
        number(speed["mean"], 2),
        number(speed["low"], 2),
        number(speed["high"], 2),
        number(decode["mean"], 2) if decode else MISSING,
        number(row["speed_up"], 2, "x"),
        number(row["accepted_per_verify"], 2),
        number(row["acceptance_length"], 2),
        str(row["runs"]),
        "reference" if reference else exactness.show(row["exactness"]),
    )


def plot(run: BenchRun, path: Path) -> None:
    """Speed against draft length (mean, lowest to highest), and accepted per verify.

    Raises NoPlot without matplotlib, OSError if the file cannot be written.
    """
    drawn, axes = plotting.figure()
    kept = axes.twinx()
    names = dict.fromkeys(r["configuration"] for r in run.rows if not r["plain"])
    for place, name in enumerate(names):
        colour = plotting.COLOURS[place % len(plotting.COLOURS)]
        rows = [r for r in run.rows if r["configuration"] == name]
        _curve(axes, kept, name, rows, colour)
    for row in run.rows:
        if row["plain"]:
            axes.axhline(
                row["tok_s"]["mean"], color="#666666", linestyle=":", label="plain"
            )
    axes.set_xlabel("drafts per verify step")
    axes.set_ylabel("tok/s (line: mean; bar: lowest to highest)")
    kept.set_ylabel("accepted per verify (dashed)")
    axes.set_ylim(bottom=0)
    kept.set_ylim(bottom=0)
    lengths = {r["draft_length"] for r in run.rows if not r["plain"]}
    axes.set_xticks(sorted(lengths))
    if run.rows:
        axes.legend(loc="lower right", frameon=False)
    axes.set_title(run.label or "Speed against draft length")
    plotting.write(drawn, path)


def _curve(axes: Any, kept: Any, name: str, rows: list[Row], colour: str) -> None:
    rows = sorted(rows, key=lambda row: row["draft_length"])
    lengths = [row["draft_length"] for row in rows]
    means = [row["tok_s"]["mean"] for row in rows]
    below = [row["tok_s"]["mean"] - row["tok_s"]["low"] for row in rows]
    above = [row["tok_s"]["high"] - row["tok_s"]["mean"] for row in rows]
    axes.errorbar(
        lengths,
        means,
        yerr=[below, above],
        color=colour,
        marker="o",
        capsize=3,
        label=f"{name}, {exactness.show(exactness.total(rows))}",
    )
    known = [r for r in rows if r["accepted_per_verify"] is not None]
    kept.plot(
        [row["draft_length"] for row in known],
        [row["accepted_per_verify"] for row in known],
        color=colour,
        linestyle="--",
        marker="x",
        alpha=0.6,
    )


def speed_plot(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Speed against draft length."""
    series = []
    lengths = [r["draft_length"] for r in rows if not r.get("plain")]
    for name, own in stats.by(
        [r for r in rows if not r.get("plain")], "configuration"
    ).items():
        own = sorted(own, key=lambda r: r["draft_length"])
        kept = [r.get("accepted_per_verify") for r in own]
        series.append(
            charts.Series(
                name,
                [(r["draft_length"], r["tok_s"]["mean"]) for r in own],
                texts=[f"{k:.2f}" if k is not None else "" for k in kept],
            )
        )
    for row in rows:
        if row.get("plain") and lengths:
            speed = row["tok_s"]["mean"]
            ends = [(min(lengths), speed), (max(lengths), speed)]
            series.append(charts.Series(str(row["configuration"]), ends, "dashed"))
    title = "Speed against draft length; numbers: drafts accepted per verify step"
    return charts.lines(title, series, "drafts per verify step", "tok/s, mean")
