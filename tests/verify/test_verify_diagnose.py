# SPDX-License-Identifier: Apache-2.0
"""Each suspicion from the evidence that stands for it; progress on stderr."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from sglang_exact.client.answer import Counters, Sample
from sglang_exact.client.bits import float32_bits
from sglang_exact.verify.compare import compare
from sglang_exact.verify.diagnose import (
    REFERENCE_AGAIN,
    SOLO,
    SOLO_AGAIN,
    Suspicion,
    diagnose,
    step_of,
)
from sglang_exact.verify.model import DIFFERENT, EQUAL, CheckResult, Outcome, Reference
from sglang_exact.view import console

LENGTH = 20
PLAIN = Sample(
    ids=tuple(range(10, 10 + LENGTH)),
    logprobs=(float32_bits(-1.0),) * LENGTH,
    top=tuple(
        ((float32_bits(-1.0), 10 + n), (float32_bits(-1.25), 99)) for n in range(LENGTH)
    ),
    finish=f"length:{LENGTH}",
)
REFERENCES = {
    "c": Reference("c", "prompt", "0" * 64, {"temperature": 0.0}, PLAIN),
}


def off_from(position: int, nats: float, **changes: object) -> Sample:
    """The reference with every logprob from `position` on moved by `nats`."""
    moved = (float32_bits(-1.0 - nats),) * (LENGTH - position)
    return replace(PLAIN, logprobs=PLAIN.logprobs[:position] + moved, **changes)


def outcome(arm: str, sample: Sample, probe: str = "", width: int = 4) -> Outcome:
    difference = compare(sample, PLAIN)
    steps = max(len(sample.chunks) - 1, 1)
    return Outcome(
        arm,
        "c",
        0,
        "tested",
        EQUAL if difference is None else DIFFERENT,
        difference=difference,
        answer=sample,
        digest=sample.digest(),
        tokens=LENGTH,
        counters=Counters(steps, 0, steps * (width - 1)),
        has_logprobs=True,
        probe=probe,
    )


def suspect(
    sample: Sample,
    arm: str = "speculation",
    probes: tuple[Outcome, ...] = (),
    others: tuple[CheckResult, ...] = (),
) -> Suspicion:
    result = CheckResult(arm, arm, "diverged", outcomes=[outcome(arm, sample)])
    found = diagnose(result, REFERENCES, list(probes), [result, *others])
    assert found is not None
    return found


def alone(sample: Sample, again: Sample | None = None) -> tuple[Outcome, ...]:
    return (
        outcome("probe", sample, SOLO),
        outcome("probe", again or sample, SOLO_AGAIN),
    )


def test_small_and_alike_is_the_kernel() -> None:
    bad = off_from(3, 1e-5)
    found = suspect(bad, probes=alone(bad))
    assert (found.name, found.survives_alone) == ("kernel", True)


def test_right_after_a_rare_reject_is_the_state() -> None:
    chunks = (1, 4, 4, 2, 4, 4, 1)
    counters = Counters(6, 13, 18)
    bad = off_from(11, 1e-5, chunks=chunks, counters=counters)
    found = suspect(bad, probes=alone(bad))
    assert found.follows_reject is True
    assert any("the step before committed 2 of 4" in line for line in found.evidence)
    whole = off_from(11, 3.0, chunks=chunks, counters=counters)
    assert suspect(whole, probes=alone(whole)).name == "state"
    later = off_from(12, 1e-5, chunks=chunks, counters=counters)
    assert suspect(later, probes=alone(later)).name == "kernel"


def test_pieces_that_are_no_steps_say_nothing() -> None:
    bad = off_from(11, 1e-5, chunks=(10, 10), counters=Counters(6, 13, 18))
    assert suspect(bad, probes=alone(bad)).follows_reject is None


def test_moving_with_the_width_is_the_state() -> None:
    bad, other = off_from(3, 1e-5), off_from(9, 1e-5)
    wide = CheckResult(
        "widths", "", "diverged", outcomes=[outcome("widths", other, width=8)]
    )
    found = suspect(bad, others=(wide,))
    assert (found.name, found.moves_with_width) == ("state", True)


def test_equal_alone_in_an_arm_about_company_is_scheduling() -> None:
    found = suspect(off_from(3, 1e-5), arm="in-flight-8", probes=alone(PLAIN))
    assert (found.name, found.survives_alone) == ("scheduling", False)


def test_reference_that_does_not_repeat_itself() -> None:
    bad = off_from(3, 1e-5)
    again = outcome("probe", off_from(7, 1e-5), REFERENCE_AGAIN)
    assert suspect(bad, probes=(*alone(bad), again)).name == "reference"


def test_only_the_end_differs() -> None:
    assert suspect(replace(PLAIN, finish="stop:2")).name == "scheduling"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_other_choice_from_equal_lists_is_the_sampler(temperature: float) -> None:
    ids = (*PLAIN.ids[:5], 99, *PLAIN.ids[6:])
    values = (*PLAIN.logprobs[:5], float32_bits(-1.25), *PLAIN.logprobs[6:])
    other = replace(PLAIN, ids=ids, logprobs=values)
    result = CheckResult("seeds", "", "diverged", outcomes=[outcome("seeds", other)])
    known = {"c": replace(REFERENCES["c"], params={"temperature": temperature})}
    found = diagnose(result, known, [], [result])
    assert found is not None
    assert found.name == "sampler"
    # Only a greedy answer has to take the likeliest token.
    unlikely = any("not the likeliest" in line for line in found.evidence)
    assert unlikely == (not temperature)


def test_no_difference_no_suspicion() -> None:
    result = CheckResult(
        "speculation", "", "verified", outcomes=[outcome("speculation", PLAIN)]
    )
    assert diagnose(result, REFERENCES, [], [result]) is None


def test_step_of() -> None:
    assert step_of((1, 4, 2), 0) == (0, 0)
    assert step_of((1, 4, 2), 4) == (1, 3)
    assert step_of((1, 4, 2), 5) == (2, 0)
    assert step_of((1, 4, 2), 7) is None


def test_progress_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(clock)))
    out = io.StringIO()
    with console.Bar(Console(file=out, width=80), 1000) as bar:
        bar.begin("arm [red]", 1000)
        bar.advance(100)
        bar.advance(100)
        bar.say("[bold] from a server")
    shown = out.getvalue()
    assert "arm [red]: up to 1,000 tokens" in shown
    assert "arm [red]: 20 % of all tokens, about 3 min left" in shown
    assert "[bold] from a server" in shown
