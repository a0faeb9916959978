# SPDX-License-Identifier: Apache-2.0
"""What the servers of the proof of the verifier are made of, and its prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_exact.hooks.testing import oracle
from sglang_exact.rehearsal.drafters import draft_flags
from sglang_exact.verify.continuations import continuations
from sglang_exact.verify.plan import LIKELY
from sglang_exact.verify.prompts import id_prompt
from tools.proof import arms as proof_arms
from tools.proof.arms import Arm
from tools.proof.verifier_arms import Scale

_REQUESTS: tuple[dict[str, Any], ...] = (
    {},
    {"frequency_penalty": 0.6, "presence_penalty": 0.3},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4, "logit_bias": LIKELY},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": LIKELY},
    {},
    {"logit_bias": LIKELY},
    {"temperature": 0.8, "sampling_seed": 11, "presence_penalty": 0.5},
    {"temperature": 1.3, "sampling_seed": 12, "top_p": 0.8, "top_k": 40},
)
"""Sampling parameters of the "requests" group, one prompt for each."""


def server_flags(arm: Arm, folder: Path, layers: int, scale: Scale) -> list[str]:
    """Flags of an arm's server; the pool is explicit: others may be on the GPU."""
    if scale.rehearsal:
        flags = ["--context-length", str(scale.context)]
        if arm.drafter:
            draft = folder / f"{arm.drafter}-{layers}"
            flags += draft_flags(arm.drafter, draft, 4)
        return flags
    # Eight short answers beside the longest prompt.
    sizes = proof_arms.Sizes(layers, scale.context, 0.95, scale.context + 16384)
    return [*proof_arms.server_flags(arm, folder, sizes), *arm.flags]


def write_requests(path: Path, scale: Scale) -> None:
    """The prompts of group "requests": penalties, bias, seeds, beside greedy ones."""
    lines = []
    for number, sampling in enumerate(_REQUESTS):
        prompt = id_prompt(f"request-{number}", 24 + 9 * number, scale.vocab, 1)
        row: dict[str, Any] = {"id": prompt.id, "input_ids": prompt.ids}
        if sampling:
            row["sampling_params"] = sampling
        lines.append(json.dumps(row) + "\n")
    text = "".join(lines)
    # Another call may be reading it.
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def write_plan(path: Path, record: Path, group: str, rate: float) -> None:
    """The oracle's plan from a record.

    Raises:
        ValueError: the record is none, or of other prompts.
    """
    own = record.with_name("requests.jsonl") if group == "requests" else None
    known = [(c["input_ids"], c["output_ids"]) for c in continuations(record, own)]
    oracle.write_plan(path, rate, known)
