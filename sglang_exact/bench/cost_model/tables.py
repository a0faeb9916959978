# SPDX-License-Identifier: Apache-2.0
"""The cost model's record as rows, tables and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_exact.bench import stats
from sglang_exact.bench.cost_model import model as cost_model
from sglang_exact.bench.cost_model.model import PLAIN, Limit, Model
from sglang_exact.bench.run import BenchRun
from sglang_exact.view import charts
from sglang_exact.view import files as plotting
from sglang_exact.view.tables import TableData, number

WIDTHS = (2, 4, 6, 8, 12, 16)
Row = dict[str, Any]


def rows(
    model: Model,
    widths: Sequence[int],
    acceptances: Sequence[float],
    limit: Limit | None,
    checked: Sequence[Row] = (),
) -> list[Row]:
    """Everything the record holds: steps, checks, predictions, drafters."""
    found: list[Row] = [{"table": "step", **s._asdict()} for s in model.steps]
    found += cost_model.checks(model)
    found += checked
    found += cost_model.predictions(model, widths, acceptances, limit)
    return found + cost_model.drafters(model, widths)


def settings(model: Model, load: str, limit: Limit | None) -> Row:
    """What the model was made of."""
    return {
        "load": load,
        "in_flight": model.in_flight,
        "formula": "tok/s = in_flight * acceptance / step(width)",
        "limit_formula": "tok/s <= in_flight * acceptance * bandwidth / weight bytes",
        "step_ms": f"{model.base_ms:.3f} + {model.slope_ms:.3f} * width beyond the "
        "measured widths",
        "bandwidth_bytes_s": limit.bandwidth if limit else None,
        "weight_bytes": limit.weight_bytes if limit else None,
        "limit_source": limit.source if limit else None,
        "shortest_step_ms": limit.step_ms() if limit else None,
    }


def tables(run: BenchRun) -> list[TableData]:
    """Measured steps, checks, predictions, and what a better drafter would buy."""
    parts = {
        name: [r for r in run.rows if r.get("table") == name]
        for name in ("step", "check", "predicted", "drafter")
    }
    made = [_steps(run, parts["step"])]
    if parts["check"]:
        made.append(_checks(parts["check"]))
    made.append(_predicted(parts["predicted"]))
    made.append(_drafters(parts["drafter"]))
    return made


def _steps(run: BenchRun, found: Sequence[Row]) -> TableData:
    data = TableData(
        f"cost model: measured steps, {run.settings.get('load')}, "
        f"{run.settings.get('in_flight')} in flight",
        ("width", "step ms", "acceptance", "tok/s", "source"),
    )
    for row in found:
        width = "plain" if row["width"] == PLAIN else str(row["width"])
        data.rows.append(
            (
                width,
                number(row["step_ms"], 3),
                number(row["acceptance"], 2),
                number(row["tok_s"]),
                row["source"],
            )
        )
    data.below.append(f"{run.settings.get('formula')}; width: tokens per verify step")
    shortest = run.settings.get("shortest_step_ms")
    if shortest is not None:
        data.below.append(
            f"no step is shorter than {shortest:.2f} ms: one read of the weights "
            f"({run.settings.get('limit_source')})"
        )
    data.below.extend(run.notes)
    return data


def _checks(found: Sequence[Row]) -> TableData:
    data = TableData(
        "cost model: predictions against measurements",
        ("width", "predicted from", "acceptance", "predicted", "measured", "error"),
        numbers=2,
    )
    for row in found:
        data.rows.append(
            (
                str(row["width"]),
                f"{'all other widths' if row['check'] == 'left out' else 'the model'}, "
                f"step {row['step_time']}, for {row['source']}",
                number(row["acceptance"], 2),
                number(row["predicted_tok_s"]),
                number(row["measured_tok_s"]),
                f"{row['error']:+.1%}",
            )
        )
    worst = max(abs(row["error"]) for row in found)
    data.below.append(f"largest error {worst:.1%}")
    return data


def _predicted(found: Sequence[Row]) -> TableData:
    data = TableData(
        "cost model: predicted tok/s over acceptance length",
        ("width", "acceptance", "step ms", "tok/s", "speed-up", "limit", "of limit"),
    )
    for row in found:
        share = row.get("share_of_limit")
        data.rows.append(
            (
                str(row["width"]),
                number(row["acceptance"], 2),
                f"{row['step_ms']:.2f} {row['step_time']}",
                number(row["tok_s"]),
                number(row["speedup"], 2, "x"),
                number(row.get("limit_tok_s")),
                number(100 * share if share is not None else None, 0, " %"),
            )
        )
    even = {
        row["width"]: row["break_even_acceptance"]
        for row in found
        if row["break_even_acceptance"]
    }
    for width, acceptance in even.items():
        data.below.append(
            f"width {width} is as fast as plain decode at acceptance {acceptance:.2f}"
        )
    return data


def _drafters(found: Sequence[Row]) -> TableData:
    data = TableData(
        "cost model: what a longer block or a better drafter would buy",
        ("fewer wrong drafts", "width", "acceptance", "tok/s", "gain", "step time"),
    )
    for row in found:
        data.rows.append(
            (
                f"{row['fewer_errors']:.0%}",
                str(row["width"]),
                number(row["acceptance"], 2),
                number(row["tok_s"]),
                f"{row['against_best_measured'] - 1:+.1%}",
                row["step_time"],
            )
        )
    data.below.append(
        "gain: over the fastest measured configuration; acceptance (1 - p^width) / "
        "(1 - p) for drafts that are kept with probability p each"
    )
    return data


def plot(run: BenchRun, path: Path) -> None:
    """Predicted speed over acceptance length with the limit, as a file.

    Raises plotting.NoPlot without matplotlib or for an unknown suffix.
    """
    drawn, axes = plotting.figure()
    for place, one in enumerate(cost_series(run.rows)):
        colour = plotting.COLOURS[place % len(plotting.COLOURS)]
        style = {"line": "-", "dashed": "--", "dots": ""}[one.style]
        mark = "" if one.style == "dashed" else "o"
        x, y = [p[0] for p in one.points], [p[1] for p in one.points]
        axes.plot(x, y, linestyle=style, marker=mark, color=colour, label=one.name)
    axes.set_xlabel("acceptance length, tokens per verify step")
    axes.set_ylabel("tok/s")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    plotting.write(drawn, path)


def cost_series(rows: Sequence[Row]) -> list[charts.Series]:
    """The cost model's curves: predictions by width, the limit, what was measured."""
    predicted = [r for r in rows if r.get("table") == "predicted"]
    series = []
    for width, own in stats.by(predicted, "width").items():
        own = sorted(own, key=lambda r: r["acceptance"])
        points = [(r["acceptance"], r["tok_s"]) for r in own]
        series.append(charts.Series(f"{width} tokens per verify step", points))
    bound = {r["acceptance"]: r.get("limit_tok_s") for r in predicted}
    limit = [(a, v) for a, v in sorted(bound.items()) if v is not None]
    if limit:
        series.append(charts.Series("weight-bandwidth limit", limit, "dashed"))
    measured = [(r["acceptance"], r["tok_s"]) for r in rows if r.get("table") == "step"]
    if measured:
        series.append(charts.Series("measured", sorted(measured), "dots"))
    return series


def speed_plot(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Predicted speed over acceptance length."""
    title = "Predicted speed over acceptance length"
    return charts.lines(
        title, cost_series(rows), "acceptance length, tokens per verify step", "tok/s"
    )


def drafter_plot(rows: Sequence[Row]) -> dict[str, Any] | None:
    """What a longer block or a better drafter would buy."""
    own = [r for r in rows if r.get("table") == "drafter"]
    series = [
        charts.Series(
            f"{float(gain):.0%} fewer wrong drafts",
            sorted((r["width"], r["tok_s"]) for r in found),
        )
        for gain, found in stats.by(own, "fewer_errors").items()
    ]
    title = "What a longer block or a better drafter would buy"
    return charts.lines(title, series, "tokens per verify step", "predicted tok/s")
