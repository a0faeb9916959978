# SPDX-License-Identifier: Apache-2.0
"""Did an arm exercise what it claims? Each claim is a function that returns reasons.

An empty list means that the answers themselves show the claim; what a server says
about its configuration is never enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_exact.client.answer import ServerInfo
from sglang_exact.verify.arms import LONG, PREFILL_TOKENS, Check
from sglang_exact.verify.counters import counted, counters_of
from sglang_exact.verify.model import DIFFERENT, EQUAL, REFUSED, Outcome, Reference
from sglang_exact.verify.prefixes import CHUNK

# Servers may say no to these: long prompts, seeds, penalties.
OPTIONAL = ("seeds", "penalties", *LONG)
# What every arm claims beside its own.
EVERY_ARM = ("finite", "whole", "own")
# Claims about all servers of an arm at once; the others hold for each.
TOGETHER = ("widths", "own")
# Sampling parameters that may end a generation before max_new_tokens in spite of
# ignore_eos.
ENDING = (
    *("stop", "stop_regex", "regex", "json_schema", "ebnf", "structural_tag"),
    *("no_stop_trim", "stop_token_ids"),
)


@dataclass(slots=True)
class Evidence:
    """What the claims of one arm are judged on.

    `outcomes` are the answers that were compared, `neighbours` those beside them,
    `earlier` the request ids of other arms' answers.
    """

    arm: Check
    outcomes: list[Outcome]
    neighbours: list[Outcome]
    servers: list[ServerInfo]
    references: dict[str, Reference]
    restarted: str | None = None
    expected: int = 0
    other_widths: set[int] = field(default_factory=set)
    earlier: set[str] = field(default_factory=set)


def unmet(evidence: Evidence) -> list[str]:
    """Every claim of the arm that the answers do not bear out."""
    answered = [o for o in evidence.outcomes if o.status in (EQUAL, DIFFERENT)]
    if not answered:
        return ["no request was answered"]
    if len(answered) < evidence.expected:
        return [f"{len(answered)} of {evidence.expected} requests were compared"]
    reasons = []
    for name in (*evidence.arm.claims, *EVERY_ARM):
        if name in TOGETHER:
            reasons += CLAIMS[name](evidence, answered)
            continue
        labels = list(dict.fromkeys(o.server for o in answered))
        for label in labels:
            mine = [o for o in answered if o.server == label]
            found = CLAIMS[name](evidence, mine)
            # One server's answers are no evidence for another.
            reasons += [f"{label}: {text}" if labels[1:] else text for text in found]
    return reasons


def _speculates(evidence: Evidence, answered: list[Outcome]) -> list[str]:
    wanted, reasons = counted(evidence.servers, answered)
    if reasons:
        return reasons
    tokens = sum(o.tokens for o in wanted)
    steps = sum(o.counters.verify or 0 for o in wanted)
    known = [o.counters.correct for o in wanted if o.counters.correct is not None]
    accepted = sum(known) if len(known) == len(wanted) else tokens - len(wanted) - steps
    if accepted <= 0:
        return [f"no draft was accepted in {steps} verify steps"]
    return []


def _rejects(_: Evidence, answered: list[Outcome]) -> list[str]:
    known = [(o, w) for o in counters_of(answered) if (w := o.counters.draft_tokens())]
    if not known:
        return ["no spec_num_proposed_drafts: nothing shows that a draft was rejected"]
    # Accepted drafts fall short of proposed ones also where max_new_tokens cuts the
    # last block; more steps than full blocks need is a rejection for certain.
    if not any((o.counters.verify or 0) > -(-(o.tokens - 1) // w) for o, w in known):
        return ["every draft was accepted: no rejection was exercised"]
    return []


def _speculates_nothing(evidence: Evidence, answered: list[Outcome]) -> list[str]:
    wanted, reasons = counted(evidence.servers, answered)
    if reasons:
        return reasons
    unknown = [o for o in wanted if o.counters.correct is None]
    if unknown:
        return ["no spec_num_correct_drafts: nothing shows that drafts were rejected"]
    idle = [o for o in wanted if not o.counters.proposed]
    if idle:
        return [f"no draft was proposed in {len(idle)} answers: nothing to reject"]
    accepted = sum(o.counters.correct or 0 for o in wanted)
    if accepted:
        return [f"{accepted} drafts were accepted: this server does not reject all"]
    return []


def _plain(_: Evidence, answered: list[Outcome]) -> list[str]:
    steps = sum(o.counters.verify or 0 for o in answered)
    return [f"the reference speculates: {steps} verify steps"] if steps else []


def _logprobs(_: Evidence, answered: list[Outcome]) -> list[str]:
    missing = sum(not o.has_logprobs for o in answered)
    return [f"{missing} answers carry no logprobs"] if missing else []


def _no_logprobs(_: Evidence, answered: list[Outcome]) -> list[str]:
    found = sum(o.has_logprobs for o in answered)
    return [f"{found} answers carry logprobs that were not asked for"] if found else []


def _finite(_: Evidence, answered: list[Outcome]) -> list[str]:
    count = sum(o.not_finite for o in answered)
    return [f"{count} logprobs are not finite"] if count else []


def _streamed(_: Evidence, answered: list[Outcome]) -> list[str]:
    several = [o for o in answered if o.tokens > 1]
    pieces = sum(o.chunks > 1 for o in several)
    # A slow reader may find all pieces of a short answer at once, but not of most.
    if pieces == 0 or 2 * pieces < len(several):
        return [f"{pieces} of {len(several)} answers came in more than one piece"]
    return []


def _in_flight(evidence: Evidence, answered: list[Outcome]) -> list[str]:
    wanted = evidence.arm.in_flight
    reached = max(o.in_flight for o in answered)
    if reached < wanted:
        return [
            f"at most {reached} requests overlapped, {wanted} were claimed: the "
            "answers are too short for this arm"
        ]
    limit = _limit(evidence)
    if limit is not None and limit < wanted:
        return [f"the server runs at most {limit} requests at once"]
    return []


def _limit(evidence: Evidence) -> int | None:
    """The lowest number of requests that a server says it runs at once."""
    said = [s.fields.get("max_running_requests") for s in evidence.servers]
    return min((n for n in said if type(n) is int and n > 0), default=None)


def _cached(_: Evidence, answered: list[Outcome]) -> list[str]:
    # Of each prompt the first answer in the order of asking fills the cache.
    seen: set[str] = set()
    again, hits = 0, 0
    for outcome in sorted(answered, key=lambda o: o.index):
        if outcome.case in seen:
            again += 1
            hits += bool(outcome.cached_tokens)
        seen.add(outcome.case)
    if hits == 0:
        return ["no prompt token came from the prefix cache"]
    if 2 * hits < again:
        return [f"{hits} of {again} prompts asked again came from the prefix cache"]
    return []


def _reused(_: Evidence, answered: list[Outcome]) -> list[str]:
    hits = sum(bool(o.cached_tokens) for o in answered)
    if 2 * hits < len(answered):
        return [f"{hits} of {len(answered)} prompts began in the prefix cache"]
    return []


def _said(evidence: Evidence, answered: list[Outcome]) -> list[str]:
    """The biased answers are those that stand in the later prompts, and long enough."""
    biases = [(_sampling(evidence, o).get("logit_bias"), o) for o in answered]
    said = [(bias, o) for bias, o in biases if bias]
    for bias, outcome in said:
        if set(map(str, evidence.references[outcome.case].answer.ids)) != set(bias):
            return ["logit_bias did not decide an answer: no later prompt holds it"]
    if min((o.tokens for _, o in said), default=0) < CHUNK:
        return [f"an answer of less than {CHUNK} tokens stands in a later prompt"]
    if len({o.prompt_tokens for _, o in said}) < 2:
        return ["the prompts were cut to the first turn: none holds an answer"]
    return []


def _evicted(_: Evidence, answered: list[Outcome]) -> list[str]:
    """The first prompt was found in the cache once, and later less of it or nothing."""
    ordered = sorted(answered, key=lambda o: o.index)
    hits = [o.cached_tokens or 0 for o in ordered if o.case == ordered[0].case]
    if not any(hits):
        return ["no prompt token came from the prefix cache"]
    if min(hits[hits.index(max(hits)) :]) == max(hits) or len(hits) < 3:
        return [
            "nothing was evicted: start the server with a smaller "
            "--max-mamba-cache-size or --max-total-tokens"
        ]
    return []


def _prompt_tokens(evidence: Evidence, answered: list[Outcome]) -> list[str]:
    wanted = LONG[evidence.arm.cases][0]
    short = [o for o in answered if (o.prompt_tokens or 0) < wanted]
    if short:
        return [
            f"{len(short)} answers report {short[0].prompt_tokens} prompt tokens, "
            f"expected {wanted}"
        ]
    return []


def _whole(evidence: Evidence, answered: list[Outcome]) -> list[str]:
    """Nothing ends an answer early where end-of-text tokens are to be ignored."""
    short = []
    for outcome in answered:
        params = evidence.references[outcome.case].params
        ends = not params["ignore_eos"] or set(ENDING) & set(
            _sampling(evidence, outcome)
        )
        if not ends and outcome.tokens < params["max_new_tokens"]:
            short.append((outcome.tokens, params["max_new_tokens"]))
    if not short:
        return []
    return [
        f"{len(short)} answers end early ({short[0][0]} of {short[0][1]} tokens): the "
        "server caps max_new_tokens or does not honour ignore_eos"
    ]


def _own(evidence: Evidence, answered: list[Outcome]) -> list[str]:
    """Every request was answered by the server itself, not by a cache before it."""
    named = [o for o in answered if o.rid]
    others = {evidence.references[o.case].answer.rid for o in named}
    others |= evidence.earlier
    fresh = {o.rid for o in named} - others
    if len(fresh) == len(named):
        return []
    return [
        f"{len(named) - len(fresh)} of {len(named)} answers carry the request id of "
        "another answer: something between here and the server repeats them"
    ]


def _stopped(evidence: Evidence, answered: list[Outcome]) -> list[str]:
    if not any(o.finish.startswith("stop") for o in answered):
        return ["no generation ended by itself: every one ran into max_new_tokens"]
    strings = [o for o in answered if _sampling(evidence, o).get("stop")]
    if strings and not any(o.finish.startswith("stop") for o in strings):
        return ["no generation was ended by a stop string"]
    return []


def _sampling(evidence: Evidence, outcome: Outcome) -> dict[str, Any]:
    found = evidence.references[outcome.case].params.get("sampling")
    return found if isinstance(found, dict) else {}


def _counted_steps(evidence: Evidence, answered: list[Outcome]) -> list[str]:
    return counted(evidence.servers, answered)[1]


def _altered(evidence: Evidence, answered: list[Outcome]) -> list[str]:
    """The parameters did something: with others the same prompt has other tokens."""
    by_prompt: dict[str, set[tuple[int, ...]]] = {}
    for outcome in answered:
        reference = evidence.references[outcome.case]
        if _sampling(evidence, outcome):
            by_prompt.setdefault(reference.prompt, set()).add(reference.answer.ids)
    if all(len(found) < 2 for found in by_prompt.values()):
        return ["penalties and bias changed no token: they had no effect"]
    return []


def _sampled_neighbours(evidence: Evidence, answered: list[Outcome]) -> list[str]:
    done = [o for o in evidence.neighbours if o.status in (EQUAL, DIFFERENT)]
    if not done:
        return _no_neighbours(evidence, "sampled")
    if not any(o.status == DIFFERENT for o in done):
        return ["the sampled neighbours all gave greedy answers"]
    return _beside(answered)


def _prefill_neighbours(evidence: Evidence, answered: list[Outcome]) -> list[str]:
    done = [o for o in evidence.neighbours if o.status in (EQUAL, DIFFERENT)]
    if not done:
        return _no_neighbours(evidence, "prefill")
    longest = max(o.prompt_tokens or 0 for o in done)
    if longest < PREFILL_TOKENS:
        return [
            f"the neighbours' prompts have {longest} tokens, expected {PREFILL_TOKENS}"
        ]
    return _beside(answered)


def _no_neighbours(evidence: Evidence, kind: str) -> list[str]:
    said = {o.message for o in evidence.neighbours if o.message}
    return [f"no {kind} neighbour was answered", *sorted(said)[:1]]


def _beside(answered: list[Outcome]) -> list[str]:
    """Neighbours that give up early leave the rest of the answers alone."""
    count = sum(o.beside > 0 for o in answered)
    if 2 * count < len(answered):
        return [f"{count} of {len(answered)} answers had a neighbour in flight"]
    return []


def _seeded(evidence: Evidence, answered: list[Outcome]) -> list[str]:
    by_prompt: dict[str, set[tuple[int, ...]]] = {}
    for outcome in answered:
        reference = evidence.references[outcome.case]
        by_prompt.setdefault(reference.prompt, set()).add(reference.answer.ids)
    if all(len(found) < 2 for found in by_prompt.values()):
        return ["other seeds gave the same tokens: the seed had no effect"]
    return []


def _widths(evidence: Evidence, answered: list[Outcome]) -> list[str]:
    seen = {
        w for o in answered if (w := o.counters.draft_tokens())
    } | evidence.other_widths
    if len(seen) < 2:
        shown = ", ".join(map(str, sorted(seen))) or "none"
        return [f"draft widths seen: {shown}; expected two or more"]
    return []


def _restarted(evidence: Evidence, _: list[Outcome]) -> list[str]:
    if evidence.restarted is None:
        return ["nothing shows that the server process was started again"]
    return []


CLAIMS: dict[str, Callable[[Evidence, list[Outcome]], list[str]]] = {
    "speculates": _speculates,
    "speculates-nothing": _speculates_nothing,
    "rejects": _rejects,
    "plain": _plain,
    "logprobs": _logprobs,
    "no-logprobs": _no_logprobs,
    "finite": _finite,
    "whole": _whole,
    "own": _own,
    "streamed": _streamed,
    "in-flight": _in_flight,
    "cached": _cached,
    "reused": _reused,
    "said": _said,
    "evicted": _evicted,
    "prompt-tokens": _prompt_tokens,
    "stopped": _stopped,
    "counted": _counted_steps,
    "altered": _altered,
    "sampled-neighbours": _sampled_neighbours,
    "prefill-neighbours": _prefill_neighbours,
    "seeded": _seeded,
    "widths": _widths,
    "restarted": _restarted,
}


def not_offered(evidence: Evidence) -> str | None:
    """Why the server itself says that it does not do what the arm needs.

    Asked only after the arm ran and a claim failed, so a server that says "off" and
    does it all the same is still compared.
    """
    arm = evidence.arm
    everyone = (*evidence.outcomes, *evidence.neighbours)
    refused = [o for o in everyone if o.status == REFUSED]
    served = {(o.server, o.case) for o in everyone if o.status in (EQUAL, DIFFERENT)}
    # What was refused now and answered then is offered all the same.
    whim = any(not o.neighbour and (o.server, o.case) in served for o in refused)
    optional = arm.cases in OPTIONAL or bool(arm.neighbours)
    if optional and refused and not whim:
        return f"the server refuses: {min(o.message for o in refused)}"
    # A server that found no room for it attests null.
    off = any(
        s.fields.get("disable_radix_cache") is True
        or s.exact.get("prefix_cache", {}) is None
        for s in evidence.servers
    )
    if off and {"cached", "reused", "evicted"} & set(arm.claims):
        return "the prefix cache is off on this server"
    limit = _limit(evidence)
    if "in-flight" in arm.claims and limit is not None and limit < arm.in_flight:
        return f"the server runs at most {limit} requests at once"
    return None
