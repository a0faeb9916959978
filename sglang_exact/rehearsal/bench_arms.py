# SPDX-License-Identifier: Apache-2.0
"""The servers of `scripts/gpu_bench` and how much each is asked.

All have random weights and, where they speculate, an oracle for a drafter, so that
acceptance is a setting. Every arm is one server; they run one after the other.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sglang_exact.bench.datasets import Dataset
from sglang_exact.bench.drive import Request
from sglang_exact.rehearsal import models, proof_arms
from sglang_exact.rehearsal.proof_arms import VOCAB, Arm
from sglang_exact.rehearsal.proof_arms import Sizes as ServerSizes
from sglang_exact.rehearsal.server import draft_flags

TITLE = "random ids"
LENGTHS = (48, 61, 83, 97, 112, 128, 150, 176, 211, 255, 257, 300)
"""Tokens of the prompts: about those of GSM8K, MATH-500 and HumanEval questions."""
LONG = 32768
"""Prompt tokens from which a prompt is asked once: its prefill takes most time."""
SEED = 42
# What the overlay fixes and the host alone may choose.
_BACKEND, _NO_PREFILL_GRAPHS = "--attention-backend", "--disable-prefill-cuda-graph"


class Role(NamedTuple):
    """An arm, the arm it is compared with, and whether the host runs alone in it."""

    arm: Arm
    reference: str
    stages: tuple[str, ...]


FEW = 8
"""Requests that the further widths are served for: room for the states of a block
grows with width times requests, 74 GB for 16 times 32."""
STAGES = ("memory", "accept", "in-step", "acceptance", "widths", "decode-table")
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

    found = [
        Role(arm("plain", None, width, "exact"), "plain", (*_ALL, "widths")),
        Role(
            arm("exact-dflash2", "dflash2", width, "exact"),
            "plain",
            (*_ALL, "in-step", "acceptance", "widths"),
        ),
        Role(arm("host-plain", None, width, "stock"), "host-plain", _ALL),
        Role(arm("host-dflash2", "dflash2", width, "stock"), "host-plain", _ALL),
    ]
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
    """

    prompts: int = 64
    load: tuple[tuple[int, int], ...] = ((1, 4), (8, 32), (32, 64))
    new_tokens: int = 256
    contexts: tuple[int, ...] = (64, 2048, 131072)
    decode_tokens: int = 256
    rounds: tuple[int, ...] = (3, 3, 1)
    swept: tuple[float, ...] = (1, 2, 3, 4, 5.46, 6.5, 8)
    vocab: int = VOCAB


GPU = Scale()
REHEARSAL = Scale(4, ((1, 1), (2, 4)), 6, (8, 24), 6, (2, 1), (1, 3), 512)
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


def data_set(scale: Scale) -> Dataset:
    """Seeded prompts as token ids, of `LENGTHS` where they fit."""
    rng = random.Random(SEED)
    low = min(1000, scale.vocab // 8)
    lengths: tuple[int, ...] = LENGTHS
    if scale.vocab < VOCAB:
        lengths = (9, 12, 17, 20)
    made = []
    for place in range(scale.prompts):
        count = lengths[place % len(lengths)] + place // len(lengths)
        ids = tuple(rng.randrange(low, scale.vocab - low) for _ in range(count))
        made.append(Request(f"{place:03d}", 1, ids=ids))
    digest = hashlib.sha256(repr([r.ids for r in made]).encode()).hexdigest()
    return Dataset("random-ids", TITLE, f"seed {SEED}", digest, tuple(made))


def context_ids(scale: Scale, length: int) -> tuple[int, ...]:
    """The seeded prompt of one row of the decode table."""
    rng = random.Random(f"{SEED}-{length}")
    low = min(1000, scale.vocab // 8)
    return tuple(rng.randrange(low, scale.vocab - low) for _ in range(length))


class Place(NamedTuple):
    """Where and how the servers run.

    Attributes:
        folder: for model configurations.
        device: "cuda" or "cpu" for a rehearsal.
        layers: of the target.
        mem_fraction: the host's --mem-fraction-static.
        host_backends: "own" lets stock plain decoding choose its attention backend and
            prefill graphs, "own-no-graphs" the backend alone, "same" gives it the
            overlay's. Stock speculation always has the overlay's backend, which is one
            that a DFLASH draft runs on.
    """

    folder: Path
    device: str = "cuda"
    layers: int = 64
    mem_fraction: float = 0.85
    host_backends: str = "own"

    def target(self) -> Path:
        """The target's folder, made if absent."""
        path = self.folder / f"target-{self.layers}"
        if self.device == "cpu":
            return path if path.exists() else models.make_target(path)
        return models.make_27b_target(path, self.layers)

    def draft(self, arm: Arm) -> Path | None:
        """The draft's folder, made if absent; None for an arm without one."""
        if arm.drafter is None:
            return None
        path = self.folder / f"w{arm.tokens}" / f"{arm.drafter}-{self.layers}"
        if self.device == "cpu":
            return models.make_draft(path, arm.drafter, block_size=arm.tokens)
        return models.make_27b_draft(
            path, arm.drafter, self.layers, block_size=arm.tokens
        )

    def flags(self, arm: Arm, scale: Scale) -> list[str]:
        """Server flags of an arm."""
        draft = self.draft(arm)
        if self.device == "cpu":
            own = ["--mamba-ssm-dtype", "float32", "--disable-radix-cache"]
            drafted = draft_flags(arm.drafter, draft, arm.tokens) if arm.drafter else []
            return drafted + (own if arm.mode == "stock" else [])
        context = max(scale.contexts) + scale.decode_tokens + 1024
        sizes = ServerSizes(self.layers, context, self.mem_fraction)
        folder = draft.parent if draft is not None else self.folder
        flags = proof_arms.server_flags(arm, folder, sizes)
        if arm.mode != "stock":
            return flags
        if self.host_backends == "own" and arm.drafter is None:
            return [flag for flag in flags if flag != _NO_PREFILL_GRAPHS]
        if self.host_backends == "own-no-graphs" and arm.drafter is None:
            return flags
        return flags if _BACKEND in flags else [*flags, _BACKEND, "triton"]


def greedy(request: Request, new_tokens: int) -> Request:
    """The request with its length; the end token is ignored."""
    return replace(request, max_new_tokens=new_tokens, ignore_eos=True)
