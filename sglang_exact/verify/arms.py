# SPDX-License-Identifier: Apache-2.0
"""The arms: ways to ask that must not change the answer.

Each arm names what it claims to exercise; claims.py checks every claim, and an arm
whose claims do not hold is "not exercised", whatever its comparison says.
"""

from __future__ import annotations

from typing import NamedTuple

SUITES = ("quick", "standard", "full")

TESTED = "tested"
REFERENCE = "reference"
REJECT_ALL = "reject-all"
WIDTH = "width"
RESTARTED = "restarted"
# Roles that --server ROLE=URL may give.
EXTRA_ROLES = (REJECT_ALL, WIDTH, RESTARTED)


class Check(NamedTuple):
    """One arm.

    `suite` is the smallest suite that includes it. `cases` names a set that plan.py
    builds. `in_flight` requests run at once, started `stagger_s` seconds apart;
    `rounds` times through the cases, or as many rounds as fill `in_flight` twice
    (--repeats and --long-repeats have their own numbers).
    `flush` empties the prefix cache first.
    """

    name: str
    title: str
    suite: str
    claims: tuple[str, ...]
    role: str = TESTED
    cases: str = "base"
    in_flight: int = 1
    stagger_s: float = 0.0
    rounds: int = 1
    logprobs: bool = True
    stream: bool = False
    flush: bool = True
    neighbours: str = ""


_SPEC = ("speculates", "logprobs")
ARMS = (
    Check("speculation", "one request at a time", "quick",
        ("speculates", "rejects", "logprobs")),
    Check("without-logprobs", "logprobs not asked for", "quick",
        ("speculates", "no-logprobs"), logprobs=False),
    Check("streaming", "streamed answers", "quick", (*_SPEC, "streamed"), stream=True),
    Check("in-flight-8", "8 in flight, staggered", "quick", (*_SPEC, "in-flight"),
        in_flight=8, stagger_s=0.05),
    Check("long-2k", "2,048-token prompts", "quick", (*_SPEC, "prompt-tokens"),
        cases="long-2k"),
    Check("in-flight-16", "16 in flight, staggered", "standard", (*_SPEC, "in-flight"),
        in_flight=16, stagger_s=0.03),
    Check("in-flight-44", "44 in flight, staggered", "standard", (*_SPEC, "in-flight"),
        in_flight=44, stagger_s=0.02),
    Check("warm", "prompts served from the prefix cache", "standard",
        (*_SPEC, "cached"), cases="long-2k", rounds=2),
    Check("multi-turn", "conversations behind their own earlier answers", "standard",
        (*_SPEC, "reused", "said"), cases="multi-turn"),
    Check("branch", "prompts that part behind a shared prefix", "standard",
        (*_SPEC, "reused"), cases="branch"),
    Check("sampled-neighbours", "greedy beside sampled requests", "standard",
        (*_SPEC, "sampled-neighbours"), in_flight=4, neighbours="sampled"),
    Check("prefill-neighbours", "long prefills between decode steps", "standard",
        (*_SPEC, "prefill-neighbours"), in_flight=4, neighbours="prefill"),
    Check("stops", "generations that may end by themselves", "standard",
        (*_SPEC, "stopped"), cases="stops"),
    Check("seeds", "seeded sampling", "standard", ("speculates", "seeded"),
        cases="seeds"),
    Check("penalties", "penalties, logit bias, min_new_tokens", "standard",
        ("counted", "logprobs", "altered"), cases="penalties"),
    Check("long-8k", "8,192-token prompts", "standard", (*_SPEC, "prompt-tokens"),
        cases="long-8k"),
    Check("long-32k", "32,768-token prompt", "standard", (*_SPEC, "prompt-tokens"),
        cases="long-32k"),
    Check("repeats", "short answers again and again, 8 in flight", "standard",
        (*_SPEC, "in-flight"), cases="repeats", in_flight=8),
    Check("plain-repeat", "control: the reference server asked again", "standard",
        ("plain", "logprobs"), role=REFERENCE),
    Check("long-128k", "131,072-token prompt", "full", (*_SPEC, "prompt-tokens"),
        cases="long-128k"),
    Check("long-repeat", "one 60,000-token prompt repeated", "full",
        (*_SPEC, "prompt-tokens"), cases="long-60k"),
    Check("plain-in-flight-8", "the reference server with 8 in flight", "full",
        ("plain", "logprobs", "in-flight"), role=REFERENCE, in_flight=8,
        stagger_s=0.05),
    Check("evict", "prefixes that had to make room", "full",
        (*_SPEC, "evicted"), cases="evict"),
    Check("rejected", "every draft rejected", "full",
        ("speculates-nothing", "logprobs"), role=REJECT_ALL),
    Check("widths", "other draft widths", "full",
        ("speculates", "rejects", "logprobs", "widths"), role=WIDTH),
    Check("restart", "after a restart of the server", "full", (*_SPEC, "restarted"),
        role=RESTARTED),
)  # fmt: skip

# Prompt length in tokens and number of prompts of every long case set.
LONG = {
    "long-2k": (2048, 4),
    "long-8k": (8192, 2),
    "long-32k": (32768, 1),
    "long-60k": (60000, 1),
    "long-128k": (131072, 1),
}

# Prompt of a prefill neighbour, in tokens.
PREFILL_TOKENS = 4096

START_HINTS = {
    REJECT_ALL: (
        "start the server so that it rejects every draft (SGLANG_SIMULATE_ACC_LEN=1 "
        "with SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token) and pass "
        "--server reject-all=URL"
    ),
    WIDTH: (
        "start the server with another --speculative-num-draft-tokens and pass "
        "--server width=URL, once for each width"
    ),
    RESTARTED: (
        "pass --restart-command CMD, or start a second process of the same server and "
        "pass --server restarted=URL"
    ),
    REFERENCE: "pass the address of a running plain server as --reference URL",
}


def by_name(names: list[str]) -> list[Check]:
    """The arms of that name, in the order of ARMS. Raises ValueError for others."""
    known = {arm.name for arm in ARMS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"found unknown arms {', '.join(unknown)}; expected some of "
            f"{', '.join(arm.name for arm in ARMS)}"
        )
    return [arm for arm in ARMS if arm.name in names]


def of_suite(suite: str) -> list[Check]:
    """Every arm of a suite. Raises ValueError for an unknown suite."""
    if suite not in SUITES:
        raise ValueError(f"found suite {suite!r}; expected one of {', '.join(SUITES)}")
    size = SUITES.index(suite)
    return [arm for arm in ARMS if SUITES.index(arm.suite) <= size]
