# SPDX-License-Identifier: Apache-2.0
"""The prompts of `scripts/gpu_bench`, and where and how its servers run."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sglang_exact.bench.datasets import Dataset
from sglang_exact.client.answer import Request
from sglang_exact.rehearsal import models
from sglang_exact.rehearsal.drafters import draft_flags
from tools.proof import arms as proof_arms
from tools.proof.arms import VOCAB, Arm
from tools.proof.arms import Sizes as ServerSizes
from tools.proof.prefix_arms import CACHE
from tools.proof.speed_arms import SEED, TITLE, Scale

LENGTHS = (48, 61, 83, 97, 112, 128, 150, 176, 211, 255, 257, 300)
"""Tokens of the prompts: about those of GSM8K, MATH-500 and HumanEval questions."""
# What the overlay fixes and the host alone may choose.
_BACKEND = "--attention-backend"


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
        path = self.folder / f"w{arm.draft_tokens}" / f"{arm.drafter}-{self.layers}"
        if self.device == "cpu":
            return models.make_draft(path, arm.drafter, block_size=arm.draft_tokens)
        return models.make_27b_draft(
            path, arm.drafter, self.layers, block_size=arm.draft_tokens
        )

    def flags(self, arm: Arm, scale: Scale) -> list[str]:
        """Server flags of an arm."""
        draft = self.draft(arm)
        if self.device == "cpu":
            flags = ["--mamba-ssm-dtype", "float32"]
            cached = [*CACHE, "--max-mamba-cache-size", "32"]
            flags += cached if arm.cache else ["--disable-radix-cache"]
            if arm.drafter:
                flags += draft_flags(arm.drafter, draft, arm.draft_tokens)
            return flags
        longest = max(*scale.contexts, *scale.prefix.lengths)
        context = longest + scale.decode_tokens + 1024
        sizes = ServerSizes(self.layers, context, self.mem_fraction)
        folder = draft.parent if draft is not None else self.folder
        flags = [*proof_arms.server_flags(arm, folder, sizes), *arm.flags]
        if arm.mode != "stock":
            return flags
        if self.host_backends == "own" and arm.drafter is None:
            return [flag for flag in flags if flag not in proof_arms.EAGER]
        if self.host_backends == "own-no-graphs" and arm.drafter is None:
            return flags
        return flags if _BACKEND in flags else [*flags, _BACKEND, "triton"]


def greedy(request: Request, new_tokens: int) -> Request:
    """The request with its length; the end token is ignored."""
    return replace(request, max_new_tokens=new_tokens, ignore_eos=True)
