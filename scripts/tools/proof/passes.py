# SPDX-License-Identifier: Apache-2.0
"""Serve one set of prompts in several ways and compare the answers bit for bit.

An arm is one server; a pass is one time through the prompts on it. Every pass is
compared with plain decoding under the overlay, recorded first.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sglang_exact.bench.exactness import Tally
from sglang_exact.client.blocking import Completion
from sglang_exact.hooks.testing import oracle
from sglang_exact.rehearsal.drafters import draft_flags
from sglang_exact.rehearsal.server import Server
from tools.proof.arms import Arm
from tools.proof.matrix import is_equal, judge, rounded, server, tallied

Say = Callable[[str], None]


class Pass(NamedTuple):
    """One time through the prompts.

    `rate` is the part of the oracle's drafts that are right; None for an arm without
    a drafter. `prompts` are the indices of those asked, None for all. `equal` is what
    the promise says about the answers.
    """

    title: str
    rate: float | None = None
    logprobs: bool = True
    prompts: tuple[int, ...] | None = None
    equal: bool = True


@dataclass(frozen=True)
class Setup:
    """What all arms share.

    Attributes:
        target: model folder.
        drafts: folder of each kind of draft model.
        prompts: token ids.
        new_tokens: per prompt.
        work: folder for logs and oracle files.
        device: "cpu" or "cuda".
        flags: flags of every server.
        env: variables of every server.
        in_flight: requests at once.
        start_timeout_s: seconds until a server has to be ready.
    """

    target: Path
    drafts: Mapping[str, Path]
    prompts: Sequence[Sequence[int]]
    new_tokens: int
    work: Path
    device: str = "cpu"
    flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    in_flight: int = 4
    start_timeout_s: float = 300.0


class Row(NamedTuple):
    """The outcome of one pass; `logprobs` is whether they were asked for."""

    arm: str
    title: str
    tally: Tally
    logprobs: bool
    tokens: int
    acceptance_length: float | None
    seconds: float
    expected_equal: bool
    exercised: bool

    @property
    def equal(self) -> bool:
        """Whether every bit that was asked for is equal."""
        return is_equal(self.tally, self.logprobs)

    @property
    def as_promised(self) -> bool:
        """Equal where the promise says so, different in a control, and exercised."""
        return self.exercised and self.equal == self.expected_equal

    def record(self) -> dict[str, Any]:
        """The row as JSON types."""
        return {
            "arm": self.arm,
            "title": self.title,
            "tally": tallied(self.tally, self.logprobs),
            "tokens": self.tokens,
            "acceptance_length": self.acceptance_length,
            "seconds": round(self.seconds, 1),
            "expected": "equal" if self.expected_equal else "different",
            "exercised": self.exercised,
            "as_promised": self.as_promised,
        }


def make_prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Seeded token ids, one prompt per length; ids 0 to 2 are left out."""
    rng = random.Random(20261129)
    return [[rng.randrange(3, vocab_size) for _ in range(n)] for n in lengths]


def _exercised(step: Pass, found: Sequence[Completion]) -> bool:
    """Whether the pass did what it says: drafted, kept drafts, rejected all."""
    verified = sum(c.spec_verify_ct for c in found)
    tokens = sum(c.completion_tokens for c in found)
    if step.rate is None:
        return verified == 0
    # The first token comes from the prefill; each verify commits one or more.
    kept = tokens - len(found) - verified
    return verified > 0 and (kept <= 0 if step.rate == 0.0 else kept > 0)


def _server(arm: Arm, setup: Setup, plan: Path) -> Server:
    flags = list(setup.flags)
    if arm.drafter:
        draft = setup.drafts.get(arm.drafter)
        flags += draft_flags(arm.drafter, draft, arm.draft_tokens)
    return server(
        arm,
        setup.target,
        plan=plan,
        log=setup.work / f"{arm.name}.log",
        device=setup.device,
        flags=flags,
        env=setup.env,
        start_timeout_s=setup.start_timeout_s,
        request_timeout_s=900.0,
    )


class Result(NamedTuple):
    """What an arm gave: a row and the answers for each pass, and its attestation."""

    rows: list[Row]
    answers: list[list[Completion]]
    attestation: dict[str, Any] | None


def run_arm(
    arm: Arm, setup: Setup, reference: Sequence[Completion] | None, say: Say
) -> Result:
    """Start the arm's server, go through its passes, stop it.

    Without a reference the arm's own first answers are it.

    Raises:
        RuntimeError: the server did not start or did not answer; its log is in the
            message.
    """
    plan = setup.work / f"oracle-{arm.name}.json"
    say(f"{arm.name}: starting")
    rows, answers = [], []
    with _server(arm, setup, plan) as running:
        say(f"{arm.name}: up in {running.started_in_s:.0f} s")
        attestation = running.info().get("sglang_exact")
        for step in arm.phases:
            if step.rate is not None and reference is not None:
                known = [
                    (p, c.ids) for p, c in zip(setup.prompts, reference, strict=True)
                ]
                oracle.write_plan(plan, step.rate, known)
            started = time.monotonic()
            asked = range(len(setup.prompts)) if step.prompts is None else step.prompts
            found = running.generate_many(
                [setup.prompts[i] for i in asked],
                setup.new_tokens,
                concurrency=setup.in_flight,
                return_logprob=step.logprobs,
            )
            seconds = time.monotonic() - started
            answers.append(found)
            expected = found if reference is None else [reference[i] for i in asked]
            verified = sum(c.spec_verify_ct for c in found)
            tokens = sum(c.completion_tokens for c in found)
            row = Row(
                arm.name,
                step.title,
                judge(expected, found),
                step.logprobs,
                tokens,
                rounded(tokens, verified),
                seconds,
                step.equal,
                _exercised(step, found),
            )
            rows.append(row)
            say(f"{arm.name}: {step.title}, {tokens} tokens in {seconds:.0f} s")
    return Result(rows, answers, attestation)
