# SPDX-License-Identifier: Apache-2.0
"""The records that pass between plan, runner, comparison and report."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

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


class Prompt(NamedTuple):
    """One prompt: exactly one of `text` and `ids` is set.

    `sampling` holds the user's own sampling parameters, sorted JSON or "".
    """

    id: str
    kind: str
    text: str | None = None
    ids: tuple[int, ...] | None = None
    max_new_tokens: int | None = None
    sampling: str = ""

    def sha256(self) -> str:
        """Hash of what is sent: UTF-8 text, or the decimal ids joined by commas."""
        if self.text is not None:
            return hashlib.sha256(self.text.encode()).hexdigest()
        return hashlib.sha256(",".join(map(str, self.ids or ())).encode()).hexdigest()


class Case(NamedTuple):
    """A prompt with everything that may change the right answer."""

    prompt: Prompt
    max_new_tokens: int
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int | None = None
    # (start, stop, step) of the ids that end the generation.
    stop_ids: tuple[int, int, int] | None = None
    # Further sampling parameters, sorted JSON; they win over those above.
    sampling: str = ""

    def params(self) -> dict[str, Any]:
        """The sampling parameters as they are recorded and hashed."""
        more = {"sampling": orjson.loads(self.sampling)} if self.sampling else {}
        return {
            "max_new_tokens": self.max_new_tokens,
            "ignore_eos": self.ignore_eos,
            "temperature": self.temperature,
            "seed": self.seed,
            "stop_ids": None if self.stop_ids is None else list(self.stop_ids),
            **more,
        }

    def key(self) -> str:
        """Stable name of the case: two runs agree on it if and only if they ask the
        same thing."""
        blob = orjson.dumps(
            [self.prompt.sha256(), self.params()], option=orjson.OPT_SORT_KEYS
        )
        return f"{self.prompt.id}:{hashlib.sha256(blob).hexdigest()[:16]}"


class Manner(NamedTuple):
    """How a case is asked. None of it may change the answer."""

    logprobs: bool = True
    top: int = 5
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Counters:
    """Per-request speculation counters; None where the server sent none.

    After each of `retractions` a prefill gives a token that no verify step counts.
    """

    verify: int | None = None
    correct: int | None = None
    proposed: int | None = None
    histogram: tuple[int, ...] = ()
    retractions: int | None = None

    def width(self) -> int | None:
        """Draft tokens per verify step, the host's count (drafts + 1)."""
        if not self.verify or self.proposed is None:
            return None
        return self.proposed // self.verify + 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer.

    `logprobs` are float32 bit patterns [completion_tokens], `top` per position the
    (bits, id) pairs, highest first and ties by id; both empty if not asked for. `rid`
    is the server's name of the request, which no two answers share.
    """

    ids: tuple[int, ...]
    logprobs: tuple[int | None, ...] = ()
    top: tuple[tuple[tuple[int | None, int], ...], ...] = ()
    finish: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    counters: Counters = field(default_factory=Counters)
    chunks: tuple[int, ...] = ()
    latency_s: float = 0.0
    rid: str = ""

    def digest(self) -> str:
        """Hash over ids, logprob bits, top lists and finish reason."""
        blob = orjson.dumps([self.ids, self.logprobs, self.top, self.finish])
        return hashlib.sha256(blob).hexdigest()[:32]


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
    to explain a difference; `neighbour` marks company that is not compared, and
    `company` counts how much of it ran meanwhile.
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
    company: int = 0
    rid: str = ""
    probe: str = ""


class ServerInfo(NamedTuple):
    """What a server says about itself, reduced to the fields that matter here."""

    label: str
    url: str
    fields: dict[str, Any]
    exact: dict[str, Any]
    vocab_size: int | None
    identity: str
    notes: tuple[str, ...] = ()

    def speculative(self) -> bool | None:
        """True or False as the server reports it, None where it says nothing."""
        if "speculative_algorithm" not in self.fields:
            return None
        return bool(self.fields["speculative_algorithm"])


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
class ArmResult:
    """State of an arm with the reasons for it."""

    name: str
    title: str
    state: str
    reasons: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
