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
# The last one is longer than a KV tile of 256: up to one the host's attention agrees.
LENGTHS = (9, 14, 3, 21, 5, 33, 12, 259)
LAYERS = 3


def cases() -> list[object]:
    """One family with one drafter, and all of those without GDN layers with theirs."""
    slow = [
        pytest.param(family, family.drafters, id=family.name, marks=pytest.mark.slow)
        for family in scope_families.FAMILIES
        if "gdn_verify" not in family.self_tests
    ]
    first = scope_families.find(["Qwen3ForCausalLM"])
    return [pytest.param(first, ("DFLASH",), id="quick"), *slow]


@pytest.mark.parametrize(("family", "drafters"), cases())
def test_speculation_equals_plain_decoding(
    family: Family, drafters: tuple[str, ...], tmp_path: Path
) -> None:
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
    rejected = Pass("all rejected", 0.0, prompts=SHORT)
    names = [name.lower() for name in drafters]
    arms = [
        Arm(name, name, name, TOKENS, phases=(Pass("oracle", RATE), rejected))
        for name in names
    ]
    off = (Pass("hook off", RATE, equal=False),)
    hook = "attention_verify"
    arms.append(Arm("off", "off", names[0], TOKENS, disable=hook, phases=off))
    for arm in arms:
        found = run_arm(arm, setup, answers, print)
        assert all(row.as_promised for row in found.rows), [*map(str, found.rows)]
