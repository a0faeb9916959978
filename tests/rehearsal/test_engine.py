# SPDX-License-Identifier: Apache-2.0
"""The stock engine on the CPU: drafts are accepted, and the known defect shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_exact.hooks.testing import oracle
from sglang_exact.rehearsal.server import Server, draft_flags

pytestmark = pytest.mark.e2e

PROMPTS = (
    (5, 6, 7, 8, 9, 10, 11, 12),
    (100, 7, 300, 22, 45, 9, 77, 410, 333, 12, 5),
)
TOKENS = 12


def test_stock_verify_accepts_and_differs(tiny_models: Path, tmp_path: Path) -> None:
    target = tiny_models / "target"
    with Server(target, mode="stock") as plain:
        known = plain.generate_many(PROMPTS, TOKENS)
        again = plain.generate_many(PROMPTS, TOKENS)
    # Control: plain decoding repeats itself, so a difference below is the verify's.
    assert [(c.ids, c.logprobs) for c in again] == [(c.ids, c.logprobs) for c in known]

    plan = tmp_path / "oracle.json"
    pairs = [(p, c.ids) for p, c in zip(PROMPTS, known, strict=True)]
    oracle.write_plan(plan, 1.0, pairs)
    with Server(
        target,
        mode="stock",
        flags=draft_flags("dflash", tiny_models / "dflash"),
        env={oracle.VARIABLE: str(plan)},
    ) as speculative:
        kept = speculative.generate_many(PROMPTS, TOKENS)
        oracle.write_plan(plan, 0.0, pairs)
        rejected = speculative.generate(PROMPTS[0], TOKENS)

    assert max(c.acceptance_length for c in kept) > 2.0
    # One token from prefill, then one from each verify.
    assert rejected.spec_verify_ct == TOKENS - 1
    assert all(c.spec_verify_ct == 0 for c in known)
    assert [c.logprobs for c in kept] != [c.logprobs for c in known]
