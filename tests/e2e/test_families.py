# SPDX-License-Identifier: Apache-2.0
"""Attention-only families on the real engine: speculation against plain decoding.

The GDN family has `test_exactness.py`. Kernels are interpreted: wiring, not rounding.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_exact import scope_families
from sglang_exact.rehearsal import models
from sglang_exact.scope_families import Family
from tools.proof.arms import Arm
from tools.proof.passes import Pass, Setup, make_prompts, run_arm

pytestmark = [pytest.mark.host, pytest.mark.e2e]

RATE = 0.7
TOKENS = 4
SHORT = (0, 1)
# Longer than one KV tile of 256: below it decode and verify attention agree anyway.
LONG = (7,)
LENGTHS = (9, 14, 3, 21, 5, 33, 12, 259)
LAYERS = 3
# Two that differ in norms, biases, head and table; the others are built of the same.
QUICK = ("qwen3", "llama")
slow = pytest.mark.slow


def dense() -> list[object]:
    """Every family without GDN layers; those that take longer are marked."""
    return [
        pytest.param(family, id=family.name, marks=() if family.name in QUICK else slow)
        for family in scope_families.FAMILIES
        if "gdn_verify" not in family.self_tests
    ]


@pytest.mark.parametrize("family", dense())
def test_speculation_equals_plain_decoding(family: Family, tmp_path: Path) -> None:
    """Eight in flight, all drafts rejected, and without the attention hook."""
    draft = models.make_draft(tmp_path / "dflash", "dflash", target_layers=LAYERS)
    setup = Setup(
        target=models.make_target(tmp_path / "target", LAYERS, family=family.name),
        drafts={"dflash": draft},
        prompts=make_prompts(LENGTHS, 512),
        new_tokens=8,
        work=tmp_path,
        in_flight=8,
    )
    plain = Arm("plain", "plain", phases=(Pass("plain"),))
    reference = run_arm(plain, setup, None, print)
    answers = reference.answers[0]
    # A model that repeats one token, or is always certain, would prove nothing.
    assert all(len(set(c.ids)) > 2 and len(set(c.logprobs)) > 2 for c in answers)
    assert reference.attestation is not None
    assert reference.attestation["prefix_cache"] is None
    drafters = [one.lower() for one in family.drafters]
    rejected = Pass("all rejected", 0.0, prompts=SHORT)
    arms = [
        Arm(one, one, one, TOKENS, phases=(Pass("oracle", RATE), rejected))
        for one in drafters
    ]
    off = (Pass("hook off", RATE, prompts=LONG, equal=False),)
    hook = "attention_verify"
    arms.append(Arm("off", "off", drafters[0], TOKENS, disable=hook, phases=off))
    for arm in arms:
        found = run_arm(arm, setup, answers, print)
        assert all(row.as_promised for row in found.rows), [*map(str, found.rows)]
