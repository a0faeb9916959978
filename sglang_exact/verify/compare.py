# SPDX-License-Identifier: Apache-2.0
"""Bit-for-bit comparison of an answer with the reference.

No tolerance anywhere: ids, chosen logprobs, top-k values, finish reason and lengths
are equal or they are a difference. The one freedom is the order of exact ties in a
top-k list, and which ids of a tie fall off its end.
"""

from __future__ import annotations

from itertools import groupby

from sglang_exact.client.answer import Case, Sample
from sglang_exact.client.bits import bits_to_float, ulp_distance
from sglang_exact.verify.model import Difference

Top = tuple[tuple[int | None, int], ...]


def compare(answer: Sample, reference: Sample) -> Difference | None:
    """The first difference, or None if every compared bit is equal.

    Logprobs and top lists are compared where both sides have them; whether the answer
    should have had them is for the claims to say.
    """
    id_position = _first(answer.ids, reference.ids)
    both = bool(answer.logprobs) and bool(reference.logprobs)
    lp_position = _first(answer.logprobs, reference.logprobs) if both else None
    # From the first other token on the numbers belong to other tokens and contexts.
    if None not in (id_position, lp_position) and lp_position >= id_position:  # type: ignore[operator]
        lp_position = None
    top_position = _first_top(answer, reference, id_position)
    what = _kinds(answer, reference, id_position, lp_position, top_position)
    if not what:
        return None
    found = [p for p in (id_position, lp_position, top_position) if p is not None]
    position = min(found) if found else None
    bits = (
        _at(answer.logprobs, position),
        _at(reference.logprobs, position),
    )
    return Difference(
        what=what,
        position=position,
        id_position=id_position,
        ids=(_at(answer.ids, position), _at(reference.ids, position)),
        logprobs=bits,
        top2_gap=top2_gap(
            reference, id_position if id_position is not None else position
        ),
        ulps=None if None in bits else ulp_distance(*bits),  # type: ignore[arg-type]
        max_abs=max_difference(answer, reference),
        details=_details(answer, reference),
    )


def not_finite(case: Case, answer: Sample) -> int:
    """How many logprobs of an answer are NaN or infinite.

    Of the top lists only where the user set no sampling parameters: a grammar or a bias
    may leave fewer than k tokens that are possible at all.
    """
    top = () if case.sampling else answer.top
    listed = sum(bits is None for row in top for bits, _ in row)
    return max(answer.logprobs.count(None), listed)


def _kinds(
    answer: Sample,
    reference: Sample,
    id_position: int | None,
    lp_position: int | None,
    top_position: int | None,
) -> tuple[str, ...]:
    checks = (
        ("ids", id_position is not None),
        ("length", len(answer.ids) != len(reference.ids)),
        ("logprobs", lp_position is not None),
        ("top-k", top_position is not None),
        ("finish reason", answer.finish != reference.finish),
        ("not finite", None in answer.logprobs),
        ("prompt length", _other_prompt(answer, reference)),
    )
    return tuple(name for name, found in checks if found)


def _other_prompt(answer: Sample, reference: Sample) -> bool:
    sides = (answer.prompt_tokens, reference.prompt_tokens)
    return None not in sides and sides[0] != sides[1]


def _details(answer: Sample, reference: Sample) -> tuple[str, ...]:
    lines = []
    if len(answer.ids) != len(reference.ids):
        lines.append(f"{len(answer.ids)} tokens, reference {len(reference.ids)}")
    if answer.finish != reference.finish:
        lines.append(f"finish {answer.finish}, reference {reference.finish}")
    if _other_prompt(answer, reference):
        lines.append(
            f"{answer.prompt_tokens} prompt tokens, reference "
            f"{reference.prompt_tokens}: the servers read another prompt"
        )
    return tuple(lines)


def _first(left: tuple[object, ...], right: tuple[object, ...]) -> int | None:
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def _at(values: tuple[int | None, ...], position: int | None) -> int | None:
    if position is None or position >= len(values):
        return None
    return values[position]


def _first_top(answer: Sample, reference: Sample, stop: int | None) -> int | None:
    if not answer.top or not reference.top:
        return None
    for position, (a, b) in enumerate(zip(answer.top, reference.top, strict=False)):
        # The lists at the first other token still come from one and the same context.
        if stop is not None and position > stop:
            return None
        if not top_equal(a, b):
            return position
    return None


def top_equal(left: Top, right: Top) -> bool:
    """True if two top-k lists are equal up to ties, bits compared as integers.

    The lowest value of a list may be a tie cut off by k: there only the values count.
    """
    if [bits for bits, _ in left] != [bits for bits, _ in right]:
        return False
    lowest = left[-1][0] if left else None
    for (bits, group), (_, other) in zip(_groups(left), _groups(right), strict=True):
        if bits != lowest and group != other:
            return False
    return True


def _groups(top: Top) -> list[tuple[int | None, list[int]]]:
    return [
        (bits, sorted(token for _, token in group))
        for bits, group in groupby(top, key=lambda pair: pair[0])
    ]


def top2_gap(sample: Sample, position: int | None) -> float | None:
    """Distance in nats between the two likeliest tokens, None where it is unknown."""
    if position is None or position >= len(sample.top):
        return None
    row = [bits for bits, _ in sample.top[position][:2]]
    if len(row) < 2 or row[0] is None or row[1] is None:
        return None
    return bits_to_float(row[0]) - bits_to_float(row[1])


def differences(answer: Sample, reference: Sample) -> list[float]:
    """|logprob difference| per position, up to the first other token; NaN where a
    value is not finite."""
    end = _first(answer.ids, reference.ids)
    pairs = zip(answer.logprobs[:end], reference.logprobs[:end], strict=False)
    return [
        float("nan")
        if a is None or b is None
        else abs(bits_to_float(a) - bits_to_float(b))
        for a, b in pairs
    ]


def max_difference(answer: Sample, reference: Sample) -> float:
    """Largest finite |logprob difference| while the contexts are the same, in nats."""
    return max((d for d in differences(answer, reference) if d == d), default=0.0)
