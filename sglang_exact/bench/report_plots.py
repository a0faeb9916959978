# SPDX-License-Identifier: Apache-2.0
"""Geometry of the report's plots: numbers in, coordinates out. The template draws.

The page must stay one file that opens offline and follows the reader's light or dark
scheme, so its plots are inline SVG; plots as files are matplotlib's, see `plotting`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sglang_exact.bench.exactness import show
from sglang_exact.bench.run import BenchRun
from sglang_exact.verify.plots import ticks

WIDTH, LEFT, RIGHT = 920, 64, 30
TOP, HEIGHT, FOOT = 14, 300, 44
BAR_LEFT, BAR_ROW, BAR_GAP = 250, 18, 8
HUES = 6
MOST_BARS = 60
Row = Mapping[str, Any]


class Series(NamedTuple):
    """One curve: (x, y) points, and a text at some of them.

    `style` is "line", "dashed" (a limit or a base) or "dots" (points alone).
    """

    name: str
    points: Sequence[tuple[float, float]]
    style: str = "line"
    texts: Sequence[str] = ()


class Bar(NamedTuple):
    """One bar of a group; `parts` are stacked (series name, value)."""

    group: str
    name: str
    parts: Sequence[tuple[str, float]]
    text: str = ""


def lines(
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    log_x: bool = False,
) -> dict[str, Any] | None:
    """A line plot from 0 up, None without a point; `log_x` spaces x by logarithm."""
    points = [p for s in series for p in s.points if _finite(p)]
    if not points:
        return None
    place: Callable[[float], float] = (
        (lambda v: math.log2(max(v, 1e-9))) if log_x else (lambda v: v)
    )
    low, high = min(place(p[0]) for p in points), max(place(p[0]) for p in points)
    if low == high:
        low, high = low - 1, high + 1
    top = max(p[1] for p in points) * 1.08 or 1.0
    foot = HEIGHT - FOOT

    def x(value: float) -> float:
        share = (place(value) - low) / (high - low)
        return round(LEFT + 10 + (WIDTH - LEFT - RIGHT - 20) * share, 1)

    def y(value: float) -> float:
        return round(foot - (foot - TOP) * value / top, 1)

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
        "y_axis": [{"at": y(t), "label": f"{t:g}"} for t in ticks(top)],
        "lines": [_curve(s, n, x, y) for n, s in enumerate(series)],
    }


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


def bars(title: str, found: Sequence[Bar], unit: str) -> dict[str, Any] | None:
    """Horizontal bars, grouped; None without one. At most MOST_BARS are drawn."""
    groups = list(dict.fromkeys(b.group for b in found))
    ordered = sorted(found, key=lambda b: groups.index(b.group))
    shown = [b for b in ordered if all(_finite((v, 0)) for _, v in b.parts)][:MOST_BARS]
    if not shown:
        return None
    limit = max(sum(max(v, 0) for _, v in b.parts) for b in shown) or 1.0
    names = list(dict.fromkeys(name for b in shown for name, _ in b.parts))
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


def of(run: BenchRun) -> list[dict[str, Any]]:
    """The plots of one record, by its verb; none for a verb that has none."""
    makers = _BY_VERB.get(run.verb, ())
    return [plot for make in makers if (plot := make(run.rows)) is not None]


def _middle(row: Row, key: str) -> float | None:
    found = row.get(key)
    return found.get("median") if isinstance(found, dict) else None


def _by(rows: Sequence[Row], key: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row.get(key)), []).append(row)
    return found


def _sweep(rows: Sequence[Row]) -> dict[str, Any] | None:
    base = {r["length"]: _middle(r, "decode_tok_s") for r in rows if r.get("plain")}
    series = []
    for name, own in _by(rows, "server").items():
        known = [r for r in own if _middle(r, "decode_tok_s")]
        known.sort(key=lambda r: r["length"])
        gains = []
        for row in known:
            plain = base.get(row["length"])
            gain = _middle(row, "decode_tok_s")
            shown = not row.get("plain") and plain and gain
            gains.append(f"{gain / plain:.2f}x" if shown and gain and plain else "")
        points = [(r["length"], _middle(r, "decode_tok_s") or 0.0) for r in known]
        series.append(Series(name, points, texts=gains))
    title = "Decode speed over context, speed-up over plain at each point"
    return lines(title, series, "ISL = OSL, tokens", "decode tok/s, median", log_x=True)


def _leaderboard(rows: Sequence[Row]) -> dict[str, Any] | None:
    series = []
    lengths = [r["draft_length"] for r in rows if not r.get("plain")]
    for name, own in _by(
        [r for r in rows if not r.get("plain")], "configuration"
    ).items():
        own = sorted(own, key=lambda r: r["draft_length"])
        kept = [r.get("accepted_per_verify") for r in own]
        series.append(
            Series(
                name,
                [(r["draft_length"], r["tok_s"]["mean"]) for r in own],
                texts=[f"{k:.2f}" if k is not None else "" for k in kept],
            )
        )
    for row in rows:
        if row.get("plain") and lengths:
            speed = row["tok_s"]["mean"]
            ends = [(min(lengths), speed), (max(lengths), speed)]
            series.append(Series(str(row["configuration"]), ends, "dashed"))
    title = "Speed against draft length; numbers: drafts accepted per verify step"
    return lines(title, series, "drafts per verify step", "tok/s, mean")


def _accept_speed(rows: Sequence[Row]) -> dict[str, Any] | None:
    found = []
    for row in rows:
        if row.get("tok_s") is None:
            continue
        gain = row.get("speed_up")
        text = f"{row['tok_s']:,.1f}" + (f" ({gain:.2f}x)" if gain else "")
        if not row.get("plain"):
            text += f", {show(row.get('exactness'))}"
        group = f"{row['title']}, {row['concurrency']} in flight"
        part = ((str(row["server"]), row["tok_s"]),)
        found.append(Bar(group, str(row["server"]), part, text))
    return bars("Output speed", found, "tok/s")


def _accept_length(rows: Sequence[Row]) -> dict[str, Any] | None:
    found = []
    for row in rows:
        length = row.get("acceptance")
        if isinstance(length, dict):
            group = f"{row['title']}, {row['concurrency']} in flight"
            part = ((str(row["server"]), length["macro"]),)
            text = f"{length['macro']:.2f} ({length['micro']:.2f})"
            found.append(Bar(group, str(row["server"]), part, text))
    return bars("Acceptance length: macro (micro)", found, "tokens per verify step")


def _decode_table(rows: Sequence[Row]) -> dict[str, Any] | None:
    found = []
    for row in rows:
        speed = _middle(row, "decode_tok_s")
        if speed is not None:
            context = row.get("title", row.get("prompt_tokens", row.get("length", "")))
            part = ((str(row["server"]), speed),)
            found.append(Bar(str(context), str(row["server"]), part))
    return bars("Decode speed by context", found, "tok/s, median")


def _memory(rows: Sequence[Row]) -> dict[str, Any] | None:
    keys = {
        "weights": "weight_gib",
        "KV cache": "kv_gib",
        "graphs": "graph_gib",
        "not named by the host": "not_named_gib",
    }
    found = [
        Bar(
            "",
            str(row["server"]),
            [(n, row[k]) for n, k in keys.items() if row.get(k) is not None],
        )
        for row in rows
    ]
    return bars("GPU memory", [b for b in found if b.parts], "GiB")


def _quality(rows: Sequence[Row]) -> dict[str, Any] | None:
    found = []
    for subject, own in _by(rows, "subject").items():
        for name, graded in _by(own, "server").items():
            right = sum(r.get("state") == "correct" for r in graded)
            share = 100 * right / len(graded)
            text = f"{right} of {len(graded)}"
            found.append(Bar(subject, name, ((name, share),), text))
    return bars("Correct answers by subject", sorted(found), "%")


def cost_series(rows: Sequence[Row]) -> list[Series]:
    """The cost model's curves: predictions by width, the limit, what was measured."""
    predicted = [r for r in rows if r.get("table") == "predicted"]
    series = []
    for width, own in _by(predicted, "width").items():
        own = sorted(own, key=lambda r: r["acceptance"])
        points = [(r["acceptance"], r["tok_s"]) for r in own]
        series.append(Series(f"{width} tokens per verify step", points))
    bound = {r["acceptance"]: r.get("limit_tok_s") for r in predicted}
    limit = [(a, v) for a, v in sorted(bound.items()) if v is not None]
    if limit:
        series.append(Series("weight-bandwidth limit", limit, "dashed"))
    measured = [(r["acceptance"], r["tok_s"]) for r in rows if r.get("table") == "step"]
    if measured:
        series.append(Series("measured", sorted(measured), "dots"))
    return series


def _cost_model(rows: Sequence[Row]) -> dict[str, Any] | None:
    title = "Predicted speed over acceptance length"
    return lines(
        title, cost_series(rows), "acceptance length, tokens per verify step", "tok/s"
    )


def _drafters(rows: Sequence[Row]) -> dict[str, Any] | None:
    own = [r for r in rows if r.get("table") == "drafter"]
    series = [
        Series(
            f"{float(gain):.0%} fewer wrong drafts",
            sorted((r["width"], r["tok_s"]) for r in found),
        )
        for gain, found in _by(own, "fewer_errors").items()
    ]
    title = "What a longer block or a better drafter would buy"
    return lines(title, series, "tokens per verify step", "predicted tok/s")


_BY_VERB: dict[str, tuple[Callable[[Sequence[Row]], dict[str, Any] | None], ...]] = {
    "sweep": (_sweep,),
    "leaderboard": (_leaderboard,),
    "accept": (_accept_speed, _accept_length),
    "decode-table": (_decode_table,),
    "memory": (_memory,),
    "quality": (_quality,),
    "cost-model": (_cost_model, _drafters),
}
