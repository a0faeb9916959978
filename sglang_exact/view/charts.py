# SPDX-License-Identifier: Apache-2.0
"""Geometry of the pages' plots: numbers in, coordinates out. The templates draw.

The page must stay one file that opens offline and follows the reader's light or dark
scheme, so its plots are inline SVG; plots as files are matplotlib's, see `files`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

WIDTH, LEFT, RIGHT = 920, 64, 30
TOP, HEIGHT, FOOT = 14, 300, 44
BAR_LEFT, BAR_ROW, BAR_GAP = 250, 18, 8
FLOOR = 1e-9
HUES = 6
MOST_BARS = 60


def ticks(limit: float, count: int = 6) -> list[float]:
    """Round numbers from 0 up to `limit`, about `count` of them."""
    if limit <= 0:
        return [0.0]
    raw = limit / count
    size = 10 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 5, 10) if m * size >= raw)
    return [step * i for i in range(int(limit / step + 1e-9) + 1)]


class Series(NamedTuple):
    """One curve: (x, y) points, and a text at some of them.

    `style` is "line", "curve" (without points), "dashed" (a limit or a base) or "dots"
    (points alone).
    """

    name: str
    points: Sequence[tuple[float, float]]
    style: str = "line"
    texts: Sequence[str] = ()


class Bar(NamedTuple):
    """One bar of a group; `parts` are stacked (series name, value), `marks` are dots
    on it (value, label)."""

    group: str
    name: str
    parts: Sequence[tuple[str, float]]
    text: str = ""
    marks: Sequence[tuple[float, str]] = ()


def lines(
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> dict[str, Any] | None:
    """A line plot from 0 up, None without a point.

    `log_x` and `log_y` space by logarithm; with `log_y` what is below FLOOR lies on it.
    """
    points = [p for s in series for p in s.points if _finite(p)]
    if not points:
        return None
    place: Callable[[float], float] = (
        (lambda v: math.log2(max(v, 1e-9))) if log_x else (lambda v: v)
    )
    low, high = min(place(p[0]) for p in points), max(place(p[0]) for p in points)
    if low == high:
        low, high = low - 1, high + 1
    height, heights = _heights(max(p[1] for p in points), log_y)
    foot = HEIGHT - FOOT

    def x(value: float) -> float:
        share = (place(value) - low) / (high - low)
        return round(LEFT + 10 + (WIDTH - LEFT - RIGHT - 20) * share, 1)

    def y(value: float) -> float:
        return round(foot - (foot - TOP) * height(value), 1)

    marks = (
        sorted({p[0] for p in points}) if log_x else ticks(max(p[0] for p in points))
    )
    if not log_x:
        marks = [m for m in marks if low <= m <= high]
    return {
        "kind": "lines",
        "title": title,
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "foot": foot,
        "x_label": x_label,
        "y_label": y_label,
        "x_axis": [{"at": x(m), "label": f"{m:g}"} for m in marks[:16]],
        "y_axis": [{"at": y(value), "label": text} for value, text in heights],
        "lines": [_curve(s, n, x, y) for n, s in enumerate(series)],
    }


def _heights(
    most: float, log: bool
) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """Where a value lies between foot (0) and top (1), and the values to be marked."""
    if not log:
        top = most * 1.08 or 1.0
        return lambda value: value / top, [(t, f"{t:g}") for t in ticks(top)]
    low, high = math.log10(FLOOR), math.log10(max(most, 1e-6))
    marks = [(10.0**d, f"1e{d}") for d in range(-7, math.floor(high) + 1, 2)]
    return (
        lambda value: (math.log10(max(value, FLOOR)) - low) / (high - low),
        [(FLOOR, "0"), *marks],
    )


def _finite(point: tuple[float, float]) -> bool:
    return all(isinstance(v, int | float) and math.isfinite(v) for v in point)


def _curve(
    one: Series, number: int, x: Callable[[float], float], y: Callable[[float], float]
) -> dict[str, Any]:
    points = [p for p in one.points if _finite(p)]
    texts = [*one.texts, *([""] * len(points))]
    return {
        "name": one.name,
        "hue": number % HUES,
        "style": one.style,
        "path": " ".join(f"{x(a)},{y(b)}" for a, b in points),
        "dots": [
            {"x": x(a), "y": y(b), "label": f"{a:g}: {b:,.2f}", "text": text}
            for (a, b), text in zip(points, texts, strict=False)
        ],
    }


def bars(
    title: str, found: Sequence[Bar], unit: str, names: Sequence[str] = ()
) -> dict[str, Any] | None:
    """Horizontal bars, grouped; None without one. At most MOST_BARS are drawn.

    `names` are series whose hues come first, whether they are drawn or not.
    """
    groups = list(dict.fromkeys(b.group for b in found))
    ordered = sorted(found, key=lambda b: groups.index(b.group))
    shown = [b for b in ordered if all(_finite((v, 0)) for _, v in b.parts)][:MOST_BARS]
    if not shown:
        return None
    ends = [sum(max(v, 0) for _, v in b.parts) for b in shown]
    limit = max([*ends, *(at for b in shown for at, _ in b.marks)]) or 1.0
    names = list(dict.fromkeys([*names, *(name for b in shown for name, _ in b.parts)]))
    # Room for the longest text behind its bar, at about seven units a character.
    reach = WIDTH - BAR_LEFT - max(110, 7 * max(len(b.text) for b in shown) + 12)
    drawn, group, y = [], None, TOP
    for one in shown:
        if group is not None and one.group != group:
            y += BAR_GAP
        first = one.group != group
        group, start, rects = one.group, 0.0, []
        for name, value in one.parts:
            width = max(value, 0) * reach / limit
            rects.append(
                {
                    "x": round(BAR_LEFT + start, 1),
                    "width": round(max(width, 0.5), 1),
                    "hue": names.index(name) % HUES,
                    "label": f"{name}: {value:,.2f} {unit}",
                }
            )
            start += width
        total = sum(value for _, value in one.parts)
        drawn.append(
            {
                "y": y,
                "group": one.group if first else "",
                "name": one.name,
                "rects": rects,
                "marks": [
                    {"x": round(BAR_LEFT + reach * at / limit, 1), "label": label}
                    for at, label in one.marks
                ],
                "end": round(BAR_LEFT + start + 6, 1),
                "text": one.text or f"{total:,.1f}",
            }
        )
        y += BAR_ROW
    return {
        "kind": "bars",
        "title": title,
        "width": WIDTH,
        "height": y + 34,
        "left": BAR_LEFT,
        "foot": y + 4,
        "unit": unit,
        "axis": [
            {"at": round(BAR_LEFT + reach * t / limit, 1), "label": f"{t:g}"}
            for t in ticks(limit)
        ],
        "bars": drawn,
        "legend": [{"name": n, "hue": i % HUES} for i, n in enumerate(names)],
        "left_out": len(found) - len(shown),
    }
