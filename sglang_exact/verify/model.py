# SPDX-License-Identifier: Apache-2.0
"""The records that pass between plan, runner, comparison and report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang_exact.client.answer import Counters, Sample

EQUAL = "equal"
DIFFERENT = "different"
REFUSED = "refused"
FAILED = "failed"

VERIFIED = "verified"
DIVERGED = "diverged"
NOT_EXERCISED = "not exercised"
NOT_OFFERED = "not offered"
COULD_NOT_RUN = "could not run"
NOT_REACHED = "not reached"


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer leaves the reference; positions count completion tokens from 0.

    `what` names the kinds of difference found, worst first; `position` is the first
    position at which anything differs; None where only the finish reason does.
    """

    what: tuple[str, ...]
    position: int | None
    id_position: int | None
    ids: tuple[int | None, int | None]
    logprobs: tuple[int | None, int | None]
    top2_gap: float | None
    ulps: int | None
    max_abs: float
    details: tuple[str, ...] = ()


@dataclass(slots=True)
class Outcome:
    """What came of one request of one arm, small enough to keep for every request.

    The whole answer is kept only when it differs. `probe` names a request that was made
    to explain a difference; `neighbour` marks one that is not compared, and `beside`
    counts how many of those ran meanwhile.
    """

    arm: str
    case: str
    index: int
    server: str
    status: str
    message: str = ""
    difference: Difference | None = None
    answer: Sample | None = None
    digest: str = ""
    tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    counters: Counters = field(default_factory=Counters)
    chunks: int = 0
    not_finite: int = 0
    has_logprobs: bool = False
    finish: str = ""
    in_flight: int = 0
    latency_s: float = 0.0
    attempts: int = 1
    neighbour: bool = False
    beside: int = 0
    rid: str = ""
    probe: str = ""


@dataclass(slots=True)
class Reference:
    """The reference answer of one case; `unstable` says why it is not usable."""

    case: str
    prompt: str
    sha256: str
    params: dict[str, Any]
    answer: Sample
    unstable: str = ""


@dataclass(slots=True)
class CheckResult:
    """State of an arm with the reasons for it."""

    name: str
    title: str
    state: str
    reasons: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
