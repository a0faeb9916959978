# SPDX-License-Identifier: Apache-2.0
"""The servers of `scripts/gpu_bench` and how much each is asked.

All have random weights and, where they speculate, an oracle for a drafter, so that
acceptance is a setting. Every arm is one server; they run one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

from tools.proof.arms import EAGER, VOCAB, Arm

TITLE = "random ids"
LONG = 32768
"""Prompt tokens from which a prompt is asked once: its prefill takes most time."""
SEED = 42
IF_NAMED = ("plain-eager", "plain-breaks")
"""Arms that run only if --arms names them: without prefill graphs, and with graphs that
break at GDN's layers."""
PREFIX = "prefix-cache"
"""The stage that runs only if --only names it, with its arms."""


class Role(NamedTuple):
    """An arm, the arm it is compared with, and whether the host runs alone in it."""

    arm: Arm
    reference: str
    stages: tuple[str, ...]


FEW = 8
"""Requests that the further widths are served for: room for the states of a block
grows with width times requests, 74 GB for 16 times 32."""
STAGES = (
    *("memory", "accept", "in-step", "acceptance", "widths", "decode-table"),
    PREFIX,
)
"""In the order they run: the longest prompt comes last, for it takes most time and may
take the server down."""
_ALL = ("memory", "decode-table", "accept")


def roles(width: int, widths: tuple[int, ...], requests: int) -> list[Role]:
    """Every arm in the order it runs: a reference before what is compared with it.

    Args:
        width: tokens per verify step of the main arms.
        widths: of further exact arms, for the cost model.
        requests: most in flight.
    """

    def arm(
        name: str, drafter: str | None, tokens: int, mode: str, most: int = requests
    ) -> Arm:
        return Arm(
            name, name, drafter, tokens, mode, requests=most, deterministic=False
        )

    plain = arm("plain", None, width, "exact")
    eager = plain._replace(name="plain-eager", title="plain-eager", flags=EAGER)
    breaks = plain._replace(
        name="plain-breaks", title="plain-breaks", disable="gdn_prefill_graph"
    )
    found = [
        Role(plain, "plain", (*_ALL, "widths", PREFIX)),
        Role(eager, "plain", ("decode-table",)),
        Role(breaks, "plain", ("decode-table",)),
        Role(
            arm("exact-dflash2", "dflash2", width, "exact"),
            "plain",
            (*_ALL, "in-step", "acceptance", "widths"),
        ),
        Role(arm("host-plain", None, width, "stock"), "host-plain", _ALL),
        Role(arm("host-dflash2", "dflash2", width, "stock"), "host-plain", _ALL),
    ]
    for name, mode in (("plain-cache", "exact"), ("host-cache", "stock")):
        cached = arm(name, None, width, mode)._replace(cache=True)
        found.append(Role(cached, "plain", (PREFIX,)))
    for other in widths:
        if other != width:
            few = min(requests, FEW)
            made = arm(f"exact-dflash2-w{other}", "dflash2", other, "exact", few)
            found.append(Role(made, "plain", ("widths",)))
    return found


def is_forced(arm: Arm) -> bool:
    """Whether the host accepts as many drafts as it is told, whatever they are."""
    return arm.mode == "stock" and arm.drafter is not None


def forced(arm: Arm, acceptance: float) -> dict[str, str]:
    """Variables of the host's own benchmark switch, for an arm that needs it.

    Stock verify leaves plain decoding's ids within a few tokens of random weights, and
    with them the oracle: it would keep 1.01 tokens per step.
    """
    if not is_forced(arm):
        return {}
    return {
        "SGLANG_SIMULATE_ACC_LEN": f"{acceptance:g}",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    }


class PrefixScale(NamedTuple):
    """How much stage prefix-cache asks, in tokens but for the counts.

    Attributes:
        lengths: of prompts that are asked again.
        turns: of a conversation, each with a `question` and an `answer`.
        questions: behind a `shared` prefix, `in_flight` at once; question and answer
            are `short`.
    """

    lengths: tuple[int, ...] = (30000, 131072)
    turns: int = 10
    question: int = 400
    answer: int = 100
    questions: int = 200
    shared: int = 4096
    short: int = 32
    in_flight: int = 32


class Scale(NamedTuple):
    """How much is asked.

    Attributes:
        prompts: in the set.
        load: requests timed at each concurrency.
        new_tokens: of every answer of the accept stages.
        contexts: prompt tokens of the decode table.
        decode_tokens: of its answers.
        rounds: of its requests, fewer at the longest prompt.
        swept: acceptance lengths of the acceptance stage.
        vocab: token ids below it are used.
        prefix: of stage prefix-cache.
    """

    prompts: int = 64
    load: tuple[tuple[int, int], ...] = ((1, 4), (8, 32), (32, 64))
    new_tokens: int = 256
    contexts: tuple[int, ...] = (64, 2048, 131072)
    decode_tokens: int = 256
    rounds: tuple[int, ...] = (3, 3, 1)
    swept: tuple[float, ...] = (1, 2, 3, 4, 5.46, 6.5, 8)
    vocab: int = VOCAB
    prefix: PrefixScale = PrefixScale()


GPU = Scale()
REHEARSAL = Scale(
    4, ((1, 1), (2, 4)), 6, (8, 24), 6, (2, 1), (1, 3), 512,
    PrefixScale((70,), 2, 20, 4, 3, 70, 4, 2),
)  # fmt: skip
"""The same on the CPU: wiring alone, its speeds say nothing."""


def scaled(scale: Scale, contexts: str, new_tokens: int) -> Scale:
    """The scale with other contexts (numbers and commas) and lengths of answers.

    Empty and 0 leave it as it is. Long prompts are asked once, others as often as the
    first.
    """
    if contexts:
        found = tuple(int(part) for part in contexts.split(","))
        once = tuple(scale.rounds[0] if n < LONG else 1 for n in found)
        scale = scale._replace(contexts=found, rounds=once)
    if new_tokens:
        scale = scale._replace(new_tokens=new_tokens, decode_tokens=new_tokens)
    return scale


def behind(scale: Scale, lengths: str, questions: int) -> Scale:
    """The scale with other prompts and questions in stage prefix-cache.

    Empty and 0 leave it as it is.
    """
    size = scale.prefix
    if lengths:
        size = size._replace(lengths=tuple(int(part) for part in lengths.split(",")))
    if questions:
        size = size._replace(questions=questions)
    return scale._replace(prefix=size)
