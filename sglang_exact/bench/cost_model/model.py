# SPDX-License-Identifier: Apache-2.0
"""Predict decode speed from step times and acceptance length.

One verify step of `width` tokens (committed token and drafts) takes t(width) and gives
`acceptance` tokens, so

    tok/s = in_flight * acceptance / t(width)

With a drafter whose drafts are each kept with probability p, independent of position,
a step gives (1 - p**width) / (1 - p) tokens on average (Leviathan, Kalman, Matias,
"Fast Inference from Transformers via Speculative Decoding", 2023, equation 1, with
width = gamma + 1). Every step reads all weights of the target once, so no drafter is
faster than

    in_flight * acceptance * bandwidth / weight_bytes
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

PLAIN = 1
"""Width of a step without drafts."""
_BISECTIONS = 60


class Step(NamedTuple):
    """One measured configuration.

    Attributes:
        width: tokens verified per step and request, 1 for plain decode.
        step_ms: median milliseconds of one step, drafting included.
        acceptance: tokens per step, micro; 1 for plain decode.
        tok_s: measured output tokens per second of all requests together.
        in_flight: requests at once.
        source: where the figure was read.
    """

    width: int
    step_ms: float
    acceptance: float
    tok_s: float
    in_flight: int = 1
    source: str = ""


class Limit(NamedTuple):
    """Bandwidth in bytes per second and target weights in bytes, with their source."""

    bandwidth: float
    weight_bytes: float
    source: str

    def step_ms(self) -> float:
        """The shortest possible step: one read of the weights."""
        return 1000 * self.weight_bytes / self.bandwidth

    def tok_s(self, acceptance: float, in_flight: int = 1) -> float:
        """The weight-bandwidth limit of the speed."""
        return in_flight * acceptance * self.bandwidth / self.weight_bytes


def tokens_per_step(p: float, width: int) -> float:
    """Mean tokens of a step when each draft is kept with probability `p`."""
    # The sum of the formula: near p = 1 its closed form loses digits.
    return sum(p**drafts for drafts in range(width))


def keep_rate(acceptance: float, width: int) -> float:
    """The `p` for which `tokens_per_step(p, width)` is `acceptance`.

    Raises:
        ValueError: `acceptance` is not between 1 and `width`.
    """
    if not 1 <= acceptance <= width:
        raise ValueError(
            f"found acceptance length {acceptance:g} at width {width}, expected 1 to "
            f"{width}: a step gives at least one token and at most its width"
        )
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if tokens_per_step(middle, width) < acceptance:
            low = middle
        else:
            high = middle
    return (low + high) / 2


class Model:
    """Step time over width, from what was measured.

    Measured widths are taken as they are, widths between them are interpolated, and
    beyond them the line of least squares gives the slope. With one width measured the
    step time is held constant, which flatters longer blocks; `notes` says so.

    Args:
        steps: measurements with drafts and without, of one number in flight. Several
            of one width are joined by their median.

    Raises:
        ValueError: no measurement with drafts, or several numbers in flight.
    """

    def __init__(self, steps: Iterable[Step]) -> None:
        found = list(steps)
        flights = sorted({s.in_flight for s in found})
        drafted = [s for s in found if s.width > PLAIN]
        if not drafted or len(flights) != 1:
            raise ValueError(
                f"found {len(drafted)} measured widths with drafts and {flights} "
                "requests in flight; expected at least one width and one number in "
                "flight; fix: name a leaderboard, accept or decode-table run of a "
                "speculative server, and choose with --in-flight"
            )
        self.in_flight = flights[0]
        self.steps = sorted(found)
        self.times = _medians(drafted)
        self.plain_ms = _medians(s for s in found if s.width == PLAIN).get(PLAIN)
        self.slope_ms, self.base_ms = _line(self.times)
        self.notes = [] if len(self.times) > 1 else [
            f"one width measured ({drafted[0].width}): its step time stands for every "
            "width, which flatters longer blocks"
        ]  # fmt: skip

    def step_ms(self, width: int) -> float:
        """Milliseconds of a step that verifies `width` tokens per request."""
        if width in self.times:
            return self.times[width]
        known = sorted(self.times)
        if width < known[0]:
            near = known[0]
        elif width > known[-1]:
            near = known[-1]
        else:
            place = bisect.bisect(known, width)
            low, high = known[place - 1], known[place]
            share = (width - low) / (high - low)
            return self.times[low] * (1 - share) + self.times[high] * share
        # Noise must not make a longer block cheaper, nor a shorter one free.
        reached = self.times[near] + max(self.slope_ms, 0.0) * (width - near)
        return max(reached, self.times[near] * min(width / near, 1.0))

    def known(self, width: int) -> str:
        """How `step_ms(width)` was found: measured, interpolated or extrapolated."""
        if width in self.times:
            return "measured"
        inside = min(self.times) < width < max(self.times)
        return "interpolated" if inside else "extrapolated"

    def tok_s(self, acceptance: float, width: int) -> float:
        """Predicted output tokens per second of all requests together."""
        return 1000 * self.in_flight * acceptance / self.step_ms(width)

    def plain_tok_s(self) -> float | None:
        """Tokens per second of plain decode, None where it was not measured."""
        return None if not self.plain_ms else 1000 * self.in_flight / self.plain_ms

    def break_even(self, width: int) -> float | None:
        """Acceptance length at which speculation is as fast as plain decode."""
        return None if not self.plain_ms else self.step_ms(width) / self.plain_ms


def _medians(steps: Iterable[Step]) -> dict[int, float]:
    by_width: dict[int, list[float]] = {}
    for step in steps:
        by_width.setdefault(step.width, []).append(step.step_ms)
    return {w: statistics.median(v) for w, v in sorted(by_width.items())}


def _line(times: dict[int, float]) -> tuple[float, float]:
    """Slope and value at 0 of the least-squares line; slope 0 for one point."""
    if len(times) == 1:
        return 0.0, next(iter(times.values()))
    slope, base = statistics.linear_regression(list(times), list(times.values()))
    return slope, base


def checks(model: Model) -> list[dict[str, Any]]:
    """Each width predicted without its own measurements, against what was measured.

    Empty where fewer than two widths were measured: nothing is left to predict from.
    """
    rows = []
    for width in model.times if len(model.times) > 1 else ():
        rest = Model(s for s in model.steps if s.width not in (width, PLAIN))
        for step in (s for s in model.steps if s.width == width):
            rows.append(_checked("left out", rest, step))
    return rows


def checks_against(model: Model, steps: Sequence[Step]) -> list[dict[str, Any]]:
    """The prediction for measurements that the model has not seen."""
    return [
        _checked("other run", model, s)
        for s in steps
        if s.width > PLAIN and s.in_flight == model.in_flight
    ]


def _checked(kind: str, model: Model, step: Step) -> dict[str, Any]:
    predicted = model.tok_s(step.acceptance, step.width)
    return {
        "table": "check",
        "check": kind,
        "width": step.width,
        "acceptance": step.acceptance,
        "predicted_tok_s": predicted,
        "measured_tok_s": step.tok_s,
        "error": predicted / step.tok_s - 1,
        "step_time": model.known(step.width),
        "source": step.source,
    }


def predictions(
    model: Model,
    widths: Sequence[int],
    acceptances: Sequence[float],
    limit: Limit | None,
) -> list[dict[str, Any]]:
    """tok/s for every width and every acceptance length that the width can give."""
    plain = model.plain_tok_s()
    rows = []
    for width in widths:
        for acceptance in sorted({float(a) for a in acceptances if 1 <= a <= width}):
            speed = model.tok_s(acceptance, width)
            row = {
                "table": "predicted",
                "width": width,
                "acceptance": acceptance,
                "step_ms": model.step_ms(width),
                "step_time": model.known(width),
                "tok_s": speed,
                "speedup": speed / plain if plain else None,
                "break_even_acceptance": model.break_even(width),
            }
            if limit is not None:
                bound = limit.tok_s(acceptance, model.in_flight)
                row |= {"limit_tok_s": bound, "share_of_limit": speed / bound}
            rows.append(row)
    return rows


def drafters(
    model: Model,
    widths: Sequence[int],
    gains: Sequence[float] = (0.0, 0.1, 0.25, 0.5),
) -> list[dict[str, Any]]:
    """What a longer block and a better drafter would buy.

    The keep rate p comes from the measured step with the best speed. A gain g stands
    for a drafter that makes (1 - g) times as many errors: 1 - p' = (1 - g) (1 - p).
    """
    best = max((s for s in model.steps if s.width > PLAIN), key=lambda s: s.tok_s)
    p = keep_rate(min(max(best.acceptance, 1.0), best.width), best.width)
    rows = []
    for gain in gains:
        better = 1 - (1 - gain) * (1 - p)
        for width in widths:
            acceptance = tokens_per_step(better, width)
            speed = model.tok_s(acceptance, width)
            rows.append(
                {
                    "table": "drafter",
                    "fewer_errors": gain,
                    "keep_rate": better,
                    "width": width,
                    "acceptance": acceptance,
                    "tok_s": speed,
                    "against_best_measured": speed / best.tok_s,
                    "step_time": model.known(width),
                }
            )
    return rows
