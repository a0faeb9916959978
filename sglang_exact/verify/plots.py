# SPDX-License-Identifier: Apache-2.0
"""Geometry of the page's plots: numbers in, coordinates out. The template draws."""

from __future__ import annotations

import math
from typing import Any

from sglang_exact.verify.model import DIFFERENT
from sglang_exact.verify.summary import Run, acceptance, curves
from sglang_exact.view.charts import ticks

WIDTH, LEFT, RIGHT = 920, 170, 24
ROW = 24
CURVE_HEIGHT = 260
FLOOR = 1e-9


def _x(value: float, limit: float) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * value / max(limit, 1e-9), 1)


def _axis(limit: float) -> list[dict[str, Any]]:
    return [{"x": _x(t, limit), "label": f"{t:g}"} for t in ticks(limit)]


def positions(run: Run) -> dict[str, Any]:
    """Strip plot: where each diverging answer leaves the reference, by arm."""
    rows = [r for r in run.results if r.outcomes]
    limit = max((o.tokens for r in rows for o in r.outcomes), default=1)
    limit = max(
        [limit]
        + [
            o.difference.position
            for r in rows
            for o in r.outcomes
            if o.difference and o.difference.position is not None
        ]
    )
    bars = []
    for number, result in enumerate(rows):
        y = 14 + ROW * number
        reach = max((o.tokens for o in result.outcomes), default=0)
        different = [o for o in result.outcomes if o.status == DIFFERENT]
        dots = [
            {
                "x": _x(o.difference.position, limit),
                "label": f"token {o.difference.position}",
            }
            for o in different[:400]
            if o.difference and o.difference.position is not None
        ]
        bars.append(
            {
                "name": result.name,
                "y": y,
                "end": _x(reach, limit),
                "dots": dots,
                "count": len(different),
                "bad": bool(different),
            }
        )
    height = 14 + ROW * len(rows) + 34
    return {
        "bars": bars,
        "axis": _axis(limit),
        "height": height,
        "width": WIDTH,
        "left": LEFT,
        "foot": height - 34,
    }


def _log_y(value: float, top: float) -> float:
    low, high = math.log10(FLOOR), math.log10(max(top, 1e-6))
    share = (math.log10(max(value, FLOOR)) - low) / (high - low)
    return round(10 + (CURVE_HEIGHT - 50) * (1 - share), 1)


def logprob_curves(run: Run) -> dict[str, Any]:
    """Line plot with a logarithmic scale; exact zeros lie on the floor."""
    found = curves(run)
    limit = max((len(c["values"]) - 1 for c in found), default=1)
    top = max((v for c in found for v in c["values"] if v == v), default=1e-6)
    lines = []
    for number, curve in enumerate(found):
        points = [
            f"{_x(i, limit)},{_log_y(v, top)}"
            for i, v in enumerate(curve["values"])
            if v == v
        ]
        lines.append(
            {"name": curve["name"], "points": " ".join(points), "hue": number % 6}
        )
    decades = range(-9, math.floor(math.log10(max(top, 1e-6))) + 1, 2)
    marks = [
        {"y": _log_y(10.0**d, top), "label": "0" if d == -9 else f"1e{d}"}
        for d in decades
    ]
    return {
        "lines": lines,
        "axis": _axis(limit),
        "marks": marks,
        "width": WIDTH,
        "height": CURVE_HEIGHT,
        "left": LEFT,
        "foot": CURVE_HEIGHT - 40,
        "right": WIDTH - RIGHT,
    }


def acceptance_bars(run: Run) -> dict[str, Any]:
    """Acceptance length by arm, micro as a bar and macro as a mark."""
    rows = [(r.name, acceptance(r.outcomes)) for r in run.results]
    known = [(name, found) for name, found in rows if found is not None]
    limit = max((max(f["micro"], f["macro"]) for _, f in known), default=1.0)
    bars = [
        {
            "name": name,
            "y": 14 + ROW * n,
            "end": _x(f["micro"], limit),
            "mark": _x(f["macro"], limit),
            "label": f"micro {f['micro']:.3f}, macro {f['macro']:.3f}",
        }
        for n, (name, f) in enumerate(known)
    ]
    height = 14 + ROW * len(known) + 34
    return {
        "bars": bars,
        "axis": _axis(limit),
        "height": height,
        "width": WIDTH,
        "left": LEFT,
        "foot": height - 34,
    }
