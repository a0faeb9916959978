# SPDX-License-Identifier: Apache-2.0
"""The page's plots, measured out by `view.charts`."""

from __future__ import annotations

from typing import Any

from sglang_exact.verify.model import DIFFERENT
from sglang_exact.verify.summary import Run, acceptance, curves
from sglang_exact.view import charts

MOST_DOTS = 400
EQUAL, DIFFERS = "every answer is equal", "answers differ"


def positions(run: Run) -> dict[str, Any] | None:
    """Where each diverging answer leaves the reference, by arm."""
    bars = []
    for result in run.results:
        different = [o for o in result.outcomes if o.status == DIFFERENT]
        reach = max((o.tokens for o in result.outcomes), default=0)
        dots = [
            (o.difference.position, f"token {o.difference.position}")
            for o in different[:MOST_DOTS]
            if o.difference and o.difference.position is not None
        ]
        if result.outcomes:
            name = DIFFERS if different else EQUAL
            bar = charts.Bar("", result.name, [(name, reach)], f"{reach:,}", dots)
            bars.append(bar)
    title = "divergence position by arm"
    return charts.bars(title, bars, "completion token", (EQUAL, DIFFERS))


def logprob_curves(run: Run) -> dict[str, Any] | None:
    """Differences along the tokens; exact zeros lie on the floor."""
    found = [
        charts.Series(curve["name"], list(enumerate(curve["values"])), "curve")
        for curve in curves(run)
    ]
    title = "logprob difference along the tokens"
    return charts.lines(title, found, "completion token", "nats", log_y=True)


def acceptance_bars(run: Run) -> dict[str, Any] | None:
    """Acceptance length by arm, micro as a bar and macro as a mark."""
    bars = []
    for result in run.results:
        found = acceptance(result.outcomes)
        if found is not None:
            micro, macro = found["micro"], found["macro"]
            dots = [(macro, f"macro {macro:.3f}")]
            text = f"{micro:.3f}"
            bars.append(charts.Bar("", result.name, [("micro", micro)], text, dots))
    return charts.bars("acceptance length by arm", bars, "tokens per verify step")
