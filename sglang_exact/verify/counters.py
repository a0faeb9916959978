# SPDX-License-Identifier: Apache-2.0
"""Can the speculation counters of the answers be true?

They are the only evidence that an answer was speculated at all, so they are held
against the answer itself, against one another and against what the server says it is.
"""

from __future__ import annotations

from sglang_exact.client.answer import ServerInfo
from sglang_exact.verify.model import Outcome

# So many answers of so many tokens do not take equally many steps by chance.
CONSTANT_ANSWERS, CONSTANT_TOKENS = 8, 32


def counters_of(outcomes: list[Outcome]) -> list[Outcome]:
    """The answers that must carry counters: one token needs no verify step."""
    return [o for o in outcomes if o.tokens > 1]


def contradiction(outcome: Outcome) -> str | None:
    """A reason why a request's counters cannot be true, None if they may be."""
    c = outcome.counters
    if c.verify is None:
        return None
    if c.verify > max(outcome.tokens, 1):
        return f"{c.verify} verify steps for {outcome.tokens} tokens"
    # A step is sent as one piece; pieces may be merged on their way, never split.
    prefills = 1 + (c.retractions or 0)
    if outcome.chunks > prefills + c.verify:
        return f"{outcome.chunks} pieces of a stream from {c.verify} verify steps"
    if c.correct is None or c.proposed is None:
        return None
    if c.correct > c.proposed:
        return f"{c.correct} drafts accepted of {c.proposed} proposed"
    # The prefill token, one token per verify step and every accepted draft: the last
    # block may be cut, so this may exceed the tokens sent and never fall short.
    if prefills + c.verify + c.correct < outcome.tokens:
        return (
            f"1 + {c.verify} verify steps + {c.correct} accepted drafts do not "
            f"make {outcome.tokens} tokens"
        )
    if c.histogram and sum(c.histogram) != c.verify:
        return f"histogram counts {sum(c.histogram)} steps, spec_verify_ct {c.verify}"
    return None


def _unfounded(servers: list[ServerInfo], wanted: list[Outcome]) -> str | None:
    """Why verify counts that nothing else bears out are not believed."""
    said = {
        server.label: server.fields.get("speculative_num_draft_tokens")
        for server in servers
    }
    for outcome in wanted:
        c, draft_tokens = outcome.counters, said.get(outcome.server)
        if c.correct is not None:
            continue
        if type(draft_tokens) is not int:
            return (
                "spec_verify_ct comes without spec_num_correct_drafts, and the server "
                "names no speculative_num_draft_tokens: it may count anything"
            )
        most = 1 + (c.retractions or 0) + (c.verify or 0) * draft_tokens
        if most < outcome.tokens:
            return (
                f"{c.verify} verify steps of {draft_tokens} draft tokens do not make "
                f"{outcome.tokens} tokens"
            )
    return _constant(wanted)


def _constant(wanted: list[Outcome]) -> str | None:
    """Is the counter one and the same number for every prompt?"""
    enough = [o for o in wanted if o.tokens >= CONSTANT_TOKENS]
    long = {o.case.rpartition(":")[0]: o for o in enough}.values()
    counts = {o.counters.verify or 0 for o in long}
    if len(long) < CONSTANT_ANSWERS or len(counts) > 1:
        return None
    steps = counts.pop()
    extremes = {o.tokens - 1 for o in long}
    extremes |= {-(-(o.tokens - 1) // (o.counters.draft_tokens() or 1)) for o in long}
    # All drafts rejected or all accepted: there the number is the same.
    if steps in extremes:
        return None
    return f"spec_verify_ct is {steps} in all answers to {len(long)} prompts"


def counted(
    servers: list[ServerInfo], answered: list[Outcome]
) -> tuple[list[Outcome], list[str]]:
    """The answers whose counters are to be believed, and why there are none."""
    wanted = counters_of(answered)
    if not wanted:
        return [], ["answers of one token need no verify step"]
    silent = [o for o in wanted if not o.counters.verify]
    if silent:
        return [], [
            f"{len(silent)} of {len(wanted)} answers carry no spec_verify_ct: nothing "
            "shows that they were speculated"
        ]
    wrong = [text for o in wanted if (text := contradiction(o))]
    if wrong:
        return [], [f"speculation counters contradict themselves: {wrong[0]}"]
    doubt = _unfounded(servers, wanted)
    return ([], [doubt]) if doubt else (wanted, [])
