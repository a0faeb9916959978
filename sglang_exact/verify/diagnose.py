# SPDX-License-Identifier: Apache-2.0
"""From a divergence to a named suspicion, with the evidence for it.

Four names, after what the public reports of this kind turned out to be: "kernel" (other
arithmetic for other shapes), "state" (a wrong commit or roll-back), "sampler" (equal
numbers, another choice) and "scheduling" (what else was in the batch). A fifth,
"reference", says that the plain side does not repeat itself. It is a suspicion: each
line of evidence stands on its own, and with none of them it is "unclear".
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sglang_exact.client.answer import Sample
from sglang_exact.client.bits import bits_to_float
from sglang_exact.verify.arms import ARMS as ALL_ARMS
from sglang_exact.verify.arms import WIDTH, Check
from sglang_exact.verify.model import (
    DIFFERENT,
    CheckResult,
    Difference,
    Outcome,
    Reference,
)

SOLO = "alone, streamed"
SOLO_AGAIN = "alone, again"
REFERENCE_AGAIN = "reference again"
PROBES = (SOLO, SOLO_AGAIN)

# Rounding in another order moves a bf16 model's logprobs by at most about this much
# before the first other token; corrupted state moves them by whole nats.
ROUNDING = 0.25
CORRUPTION = 1.0

KERNEL, STATE, SAMPLER = "kernel", "state", "sampler"
SCHEDULING, REFERENCE, UNCLEAR = "scheduling", "reference", "unclear"
ORDER = (REFERENCE, SAMPLER, SCHEDULING, STATE, KERNEL)


@dataclass(slots=True)
class Suspicion:
    """The first divergence of an arm and what it points to."""

    arm: str
    outcome: Outcome
    name: str = UNCLEAR
    evidence: list[str] = field(default_factory=list)
    moves_with_width: bool | None = None
    survives_alone: bool | None = None
    follows_reject: bool | None = None


class _Weigher:
    """Collects evidence; every line counts for one name or for none."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.scores: Counter[str] = Counter()

    def add(self, text: str, name: str = "", weight: int = 1) -> None:
        self.lines.append(f"{text} (speaks for {name})" if name else text)
        if name:
            self.scores[name] += weight

    def best(self) -> str:
        if not self.scores:
            return UNCLEAR
        high = max(self.scores.values())
        return next(name for name in ORDER if self.scores[name] == high)


def earliest_first(outcomes: list[Outcome]) -> list[Outcome]:
    """Those that differ, the earliest position first; ties by request number."""
    different = [o for o in outcomes if o.status == DIFFERENT and o.difference]
    return sorted(different, key=lambda o: (_position(o), o.index))


def first_divergence(result: CheckResult) -> Outcome | None:
    """The answer that leaves the reference earliest."""
    return next(iter(earliest_first(result.outcomes)), None)


def _position(outcome: Outcome) -> int:
    found = outcome.difference
    return 2**31 if found is None or found.position is None else found.position


def diagnose(
    result: CheckResult,
    references: dict[str, Reference],
    probes: list[Outcome],
    results: list[CheckResult],
) -> Suspicion | None:
    """Name a suspicion for an arm; None if nothing in it differs."""
    outcome = first_divergence(result)
    if outcome is None or outcome.difference is None:
        return None
    arm = next((arm for arm in ALL_ARMS if arm.name == result.name), None)
    mine = {
        p.probe: p
        for p in probes
        if p.case == outcome.case
        and (p.server == outcome.server or p.probe == REFERENCE_AGAIN)
    }
    reference = references[outcome.case].answer
    suspicion, weigh = Suspicion(result.name, outcome), _Weigher()
    _numbers(weigh, outcome.difference, outcome.answer, reference)
    sampled = bool(references[outcome.case].params["temperature"])
    _choice(weigh, outcome.difference, outcome.answer, reference, sampled)
    _alone(weigh, suspicion, arm, outcome, mine)
    _reject(weigh, suspicion, outcome.difference, mine.get(SOLO))
    _width(weigh, suspicion, outcome, results)
    suspicion.name, suspicion.evidence = weigh.best(), weigh.lines
    return suspicion


def _only_the_end(found: Difference) -> bool:
    """Do the tokens agree as far as both answers go?"""
    shorter = found.id_position is not None and None in found.ids
    return shorter or set(found.what) <= {"finish reason", "length"}


def _numbers(
    weigh: _Weigher, found: Difference, answer: Sample | None, reference: Sample
) -> None:
    if _only_the_end(found):
        weigh.add(
            "the tokens agree as far as both go, only the end differs", SCHEDULING, 3
        )
        return
    if "prompt length" in found.what:
        weigh.add("the two servers read prompts of other lengths")
    if "not finite" in found.what:
        weigh.add("logprobs are not finite", STATE, 3)
    if answer is None or not answer.logprobs or not reference.logprobs:
        return
    if found.id_position is not None and found.position is not None:
        ahead = found.id_position - found.position
        if ahead:
            weigh.add(
                f"logprobs differ {ahead} tokens before the first other token", KERNEL
            )
    if 0 < found.max_abs <= ROUNDING:
        weigh.add(
            f"logprobs differ by at most {found.max_abs:.3g} nats while the tokens "
            "agree: the size of rounding",
            KERNEL,
        )
    elif found.max_abs >= CORRUPTION:
        weigh.add(
            f"logprobs differ by up to {found.max_abs:.3g} nats while the tokens "
            "agree: more than rounding",
            STATE,
            2,
        )


def _choice(
    weigh: _Weigher,
    found: Difference,
    answer: Sample | None,
    reference: Sample,
    sampled: bool,
) -> None:
    position = found.id_position
    if position is None or answer is None:
        return
    if found.top2_gap is not None and not sampled:
        tie = found.top2_gap == 0
        text = (
            f"the reference's two likeliest tokens are {found.top2_gap:.3g} nats apart"
        )
        weigh.add(f"{text}: an exact tie" if tie else text, SAMPLER if tie else "", 3)
    if position >= min(len(answer.top), len(answer.logprobs), len(reference.top)):
        return
    best, chosen = answer.top[position], answer.logprobs[position]
    if not best or best[0][0] is None or chosen is None:
        return
    if bits_to_float(chosen) < bits_to_float(best[0][0]) and not sampled:
        weigh.add("the token sent is not the likeliest of its own top list", SAMPLER, 3)
    elif best == reference.top[position]:
        weigh.add("the top lists are equal there, the choice is not", SAMPLER, 3)


def _alone(
    weigh: _Weigher,
    suspicion: Suspicion,
    arm: Check | None,
    outcome: Outcome,
    probes: dict[str, Outcome],
) -> None:
    again = probes.get(REFERENCE_AGAIN)
    if again is not None and again.status == DIFFERENT:
        weigh.add("the reference, asked again, differs from itself", REFERENCE, 9)
    elif again is not None:
        weigh.add("the reference, asked again, repeats itself")
    solo = [probes[name] for name in PROBES if name in probes]
    if not solo:
        weigh.add("not asked again alone: the server no longer answered")
        return
    differ = [p for p in solo if p.status == DIFFERENT]
    suspicion.survives_alone = bool(differ)
    if not differ:
        crowd = arm is not None and (arm.in_flight > 1 or bool(arm.neighbours))
        if crowd:
            weigh.add("asked alone it equals the reference", SCHEDULING, 4)
        elif arm is not None and not arm.logprobs:
            weigh.add("with logprobs requested it equals the reference", SAMPLER, 2)
        else:
            weigh.add(
                "asked again, alone and uncached, it equals the reference", STATE, 3
            )
        return
    places = {_position(p) for p in differ}
    if len(differ) == len(solo) and len({p.digest for p in solo}) == 1:
        where = "the same position" if places == {_position(outcome)} else "a position"
        weigh.add(f"asked alone it differs too, at {where}, twice alike", KERNEL)
    else:
        weigh.add("asked alone twice it gives two answers", STATE, 2)


def step_of(chunks: tuple[int, ...], position: int) -> tuple[int, int] | None:
    """(step, offset in the step) of a token, from the tokens each step committed."""
    start = 0
    for step, size in enumerate(chunks):
        if position < start + size:
            return step, position - start
        start += size
    return None


def _reject(
    weigh: _Weigher, suspicion: Suspicion, found: Difference, solo: Outcome | None
) -> None:
    if solo is None or solo.answer is None or found.position is None:
        return
    answer, draft_tokens = solo.answer, solo.counters.draft_tokens()
    # One piece for the prefill token and one per verify step, or the pieces are not
    # steps and say nothing.
    if draft_tokens is None or len(answer.chunks) != (answer.counters.verify or 0) + 1:
        return
    place = step_of(answer.chunks, found.position)
    if place is None or place[0] == 0:
        return
    step, offset = place
    if step == 1:
        weigh.add(f"it is token {offset} of the first verify step")
        suspicion.follows_reject = False
        return
    before = answer.chunks[step - 1]
    suspicion.follows_reject = before < draft_tokens
    rejects = sum(size < draft_tokens for size in answer.chunks[1:-1])
    share = rejects / max(len(answer.chunks) - 2, 1)
    text = (
        f"it is token {offset} of verify step {step}; the step before committed "
        f"{before} of {draft_tokens} ({100 * share:.0f} % of all steps reject a draft)"
    )
    # Where most steps reject, following one means nothing.
    telling = suspicion.follows_reject and offset == 0 and share < 0.5
    weigh.add(text, STATE if telling else "", 2)


def _width(
    weigh: _Weigher, suspicion: Suspicion, outcome: Outcome, results: list[CheckResult]
) -> None:
    names = {arm.name for arm in ALL_ARMS if arm.role == WIDTH} | {"speculation"}
    places: dict[int, int | None] = {}
    for result in results:
        if result.name not in names:
            continue
        for other in result.outcomes:
            width = other.counters.draft_tokens()
            if other.case == outcome.case and width is not None:
                found = other.difference
                places[width] = None if found is None else found.position
    if len(places) < 2 or set(places.values()) == {None}:
        return
    suspicion.moves_with_width = len(set(places.values())) > 1
    shown = ", ".join(
        f"{width}: {'equal' if place is None else place}"
        for width, place in sorted(places.items())
    )
    if suspicion.moves_with_width:
        weigh.add(f"the position moves with the draft width ({shown})", STATE, 2)
    else:
        weigh.add(f"the position is the same at every draft width ({shown})", KERNEL, 2)
