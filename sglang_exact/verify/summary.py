# SPDX-License-Identifier: Apache-2.0
"""The verdict of a run: headline, exit status, figures, JSON, and the submit row."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

from sglang_exact.client import facts as server_facts
from sglang_exact.client.answer import ServerInfo
from sglang_exact.client.bits import show
from sglang_exact.verify.arms import REFERENCE as REFERENCE_ROLE
from sglang_exact.verify.arms import TESTED
from sglang_exact.verify.compare import differences
from sglang_exact.verify.diagnose import Suspicion, diagnose
from sglang_exact.verify.model import (
    DIFFERENT,
    DIVERGED,
    EQUAL,
    NOT_OFFERED,
    VERIFIED,
    CheckResult,
    Difference,
    Outcome,
    Reference,
)

EXIT = {"verified": 0, "divergence": 1, "not verified": 2, "interrupted": 130}
CURVES = 6
# 3/n is an approximation for large n; below this it says nothing worth a line.
FEWEST_FOR_BOUND = 30


@dataclass(slots=True)
class Run:
    """Everything a report is made from."""

    header: dict[str, Any]
    servers: list[ServerInfo]
    references: dict[str, Reference]
    results: list[CheckResult]
    probes: list[Outcome]
    interrupted: bool = False
    finished: str = ""
    broken: str = ""
    suspicions: dict[str, Suspicion] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for result in self.results:
            found = diagnose(result, self.references, self.probes, self.results)
            if found is not None:
                self.suspicions[result.name] = found

    def server(self, role: str) -> ServerInfo | None:
        return next((s for s in self.servers if s.label == role), None)


def verdict(run: Run) -> str:
    """One of the keys of EXIT.

    "verified" needs every arm that was asked for; an arm that the server itself does
    not offer does not stand in the way unless it was asked for by name.
    """
    if run.interrupted:
        return "interrupted"
    states = [result.state for result in run.results]
    if DIVERGED in states:
        return "divergence"
    if run.broken:
        return "not verified"
    named = set(run.header.get("arms") or ())
    fine = all(
        r.state == VERIFIED or (r.state == NOT_OFFERED and r.name not in named)
        for r in run.results
    )
    return "verified" if fine and looked_at(run) else "not verified"


def looked_at(run: Run) -> bool:
    """Is there a verified arm in which another server than the reference answered?"""
    return any(_beyond_reference(r) for r in run.results if r.state == VERIFIED)


def _beyond_reference(result: CheckResult) -> list[Outcome]:
    return [o for o in result.outcomes if o.server != REFERENCE_ROLE]


def counts(outcomes: Iterable[Outcome]) -> tuple[int, int]:
    """(answers compared, answers equal)."""
    compared = [o for o in outcomes if o.status in (EQUAL, DIFFERENT)]
    return len(compared), sum(o.status == EQUAL for o in compared)


def bound_percent(compared: int, equal: int) -> str | None:
    """The upper bound in per cent of answers, rounded up to two digits.

    Rule of three (Hanley and Lippman-Hand, 1983): with 0 failures in n independent
    answers, 3/n is the upper end of the 95 % interval of the failure rate.
    """
    if compared < FEWEST_FOR_BOUND or equal != compared:
        return None
    exact = Fraction(300, compared)
    step = Fraction(10) ** (math.floor(math.log10(300 / compared)) - 1)
    return f"{float(math.ceil(exact / step) * step):.2g}"


def failure_bound(compared: int, equal: int) -> str | None:
    """What `compared` clean answers say about the failure rate, None for too few."""
    found = bound_percent(compared, equal)
    if found is None:
        return None
    return (
        f"0 of {compared:,} answers differ: failure rate below {found} % with 95 % "
        f"confidence (rule of three, 3/{compared:,})"
    )


def total_bound(run: Run) -> str | None:
    """The bound over the arms that were verified, the reference's own left out."""
    good = [r for r in run.results if r.state == VERIFIED]
    return failure_bound(*counts(o for r in good for o in _beyond_reference(r)))


def acceptance(outcomes: Iterable[Outcome]) -> dict[str, Any] | None:
    """Acceptance length from per-request counters, None without any.

    macro: mean over requests of completion_tokens / spec_verify_ct; micro: the same
    ratio of the sums. Both count the prefill token, as the host does.
    """
    counted = [o for o in outcomes if o.counters.verify and o.tokens > 1]
    if not counted:
        return None
    steps = sum(o.counters.verify or 0 for o in counted)
    ratios = [o.tokens / (o.counters.verify or 1) for o in counted]
    draft_tokens = max((o.counters.draft_tokens() or 0 for o in counted), default=0)
    histogram = [0] * max((len(o.counters.histogram) for o in counted), default=0)
    for o in counted:
        for place, value in enumerate(o.counters.histogram):
            histogram[place] += value
    return {
        "macro": sum(ratios) / len(ratios),
        "micro": sum(o.tokens for o in counted) / steps,
        "verify_steps": steps,
        "requests": len(counted),
        "draft_tokens": draft_tokens or None,
        "histogram": histogram,
    }


def headline(run: Run) -> str:
    """One line: the verdict and how much stands behind it."""
    compared, equal = counts(o for r in run.results for o in r.outcomes)
    tokens = sum(o.tokens for r in run.results for o in r.outcomes)
    good = sum(r.state == VERIFIED for r in run.results)
    size = (
        f"{equal:,}/{compared:,} answers bitwise equal, {tokens:,} tokens, "
        f"{good}/{len(run.results)} arms verified"
    )
    word = verdict(run)
    if compared and not any(o.has_logprobs for r in run.results for o in r.outcomes):
        size += " (ids only: no logprobs were asked for)"
    if word == "divergence":
        worst = [r.name for r in run.results if r.state == DIVERGED]
        return f"DIVERGENCE in {_some(worst)}: {size}"
    if word == "verified":
        off = [r.name for r in run.results if r.state == NOT_OFFERED]
        tail = f"; not offered by this server: {_some(off)}" if off else ""
        return f"verified: {size}{tail}"
    if word == "interrupted":
        return f"INTERRUPTED, partial result: {size}"
    if run.broken:
        return f"NOT VERIFIED, {run.broken}: {size}"
    if VERIFIED in {r.state for r in run.results} and not looked_at(run):
        return f"NOT VERIFIED, the tested server was not compared: {size}"
    open_arms = [r.name for r in run.results if r.state != VERIFIED]
    return f"NOT VERIFIED, {_some(open_arms) or 'nothing was asked'}: {size}"


def _some(names: list[str]) -> str:
    """The first few names and how many there are besides."""
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + rest


def arm_row(run: Run, result: CheckResult) -> dict[str, Any]:
    """The figures of one arm."""
    compared, equal = counts(result.outcomes)
    suspicion = run.suspicions.get(result.name)
    return {
        "arm": result.name,
        "title": result.title,
        "state": result.state,
        "compared": compared,
        "equal": equal,
        "different": compared - equal,
        "tokens": sum(o.tokens for o in result.outcomes),
        "logprobs_compared": any(o.has_logprobs for o in result.outcomes),
        "acceptance": acceptance(result.outcomes),
        "failure_bound": failure_bound(compared, equal)
        if result.state == VERIFIED
        else None,
        "retried": sum(o.attempts > 1 for o in result.outcomes),
        "reasons": result.reasons,
        "notes": result.notes,
        "first_divergence": None
        if suspicion is None
        else divergence_row(run, suspicion),
    }


def _logprob(found: Difference, side: int) -> str:
    return "no token there" if found.ids[side] is None else show(found.logprobs[side])


def divergence_row(run: Run, suspicion: Suspicion) -> dict[str, Any]:
    """The first-divergence report of one arm."""
    outcome, found = suspicion.outcome, suspicion.outcome.difference
    if found is None:
        raise ValueError("a suspicion without a difference")
    reference = run.references[outcome.case]
    return {
        "request": f"{outcome.case}#{outcome.index}",
        "prompt": reference.prompt,
        "prompt_sha256": reference.sha256,
        "server": outcome.server,
        "what": list(found.what),
        "position": found.position,
        "id_position": found.id_position,
        "ids": {"served": found.ids[0], "reference": found.ids[1]},
        "logprobs": {
            "served": _logprob(found, 0) if outcome.has_logprobs else None,
            "reference": _logprob(found, 1) if found.position is not None else None,
        },
        "ulps": found.ulps,
        "max_abs_difference": found.max_abs,
        "top2_gap": found.top2_gap,
        "details": list(found.details),
        "moves_with_draft_width": suspicion.moves_with_width,
        "survives_one_in_flight": suspicion.survives_alone,
        "follows_reject": suspicion.follows_reject,
        "suspicion": suspicion.name,
        "evidence": suspicion.evidence,
    }


def to_json(run: Run) -> dict[str, Any]:
    """The whole result as JSON values."""
    word = verdict(run)
    tested, reference = run.server(TESTED), run.server(REFERENCE_ROLE)
    apart = server_facts.mismatches(tested, reference) if tested and reference else []
    compared, equal = counts(o for r in run.results for o in r.outcomes)
    return {
        "headline": headline(run),
        "verdict": word,
        "exit_status": EXIT[word],
        "partial": run.interrupted or bool(run.broken),
        "broken": run.broken or None,
        "compared": compared,
        "equal": equal,
        "with_logprobs": sum(o.has_logprobs for r in run.results for o in r.outcomes),
        "failure_bound": total_bound(run),
        "set_up_differences": apart,
        "numerics": tested.exact.get("numerics") if tested else None,
        "not_pinned": (tested.exact.get("not_pinned") or None) if tested else None,
        "test_settings": (tested.exact.get("test_settings") or None)
        if tested
        else None,
        "arms": [arm_row(run, result) for result in run.results],
        "provenance": {
            **run.header,
            "finished": run.finished,
            "servers": [info._asdict() for info in run.servers],
            "reference_cases": len(run.references),
            "reference_tokens": sum(len(r.answer.ids) for r in run.references.values()),
        },
    }


def curves(run: Run) -> list[dict[str, Any]]:
    """|logprob difference| along the tokens, of the first few diverging answers."""
    found: list[dict[str, Any]] = []
    for result in run.results:
        for o in result.outcomes:
            if o.answer is None or not o.answer.logprobs or len(found) >= CURVES:
                continue
            values = differences(o.answer, run.references[o.case].answer)
            if values:
                name = f"{result.name}, {run.references[o.case].prompt}"
                found.append({"name": name, "values": values})
    return found


def probe_rows(run: Run) -> list[dict[str, Any]]:
    """The closer looks, for the JSON and the page."""
    rows = []
    for o in run.probes:
        row = asdict(o)
        rows.append(
            {key: row[key] for key in ("case", "server", "probe", "status", "digest")}
            | {"position": o.difference.position if o.difference else None}
        )
    return rows
