# SPDX-License-Identifier: Apache-2.0
"""One record a drafter: what stands in the table is started, drafted, proved."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from sglang_exact import scope
from sglang_exact.hooks.base import of
from sglang_exact.hooks.testing import oracle
from sglang_exact.rehearsal import drafters, models
from sglang_exact.rehearsal.drafters import DRAFT_KINDS, DRAFTERS, NONE, Drafter
from tools.proof import arms, verifier_arms

every = pytest.mark.parametrize("one", DRAFTERS.values(), ids=lambda one: one.name)


def value(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]


@every
def test_it_is_started(one: Drafter) -> None:
    """An algorithm that the overlay serves; a draft model where it loads one."""
    flags = drafters.draft_flags(one.name, "folder", 5)
    assert value(flags, "--speculative-algorithm") == one.algorithm
    assert value(flags, "--speculative-num-draft-tokens") == "5"
    assert ("--speculative-draft-model-path" in flags) == (one.name in DRAFT_KINDS)
    assert one.algorithm in scope.CHAIN_ALGORITHMS


@every
def test_it_is_drawn_and_proved(one: Drafter) -> None:
    """By hooks of the oracle, by an arm of each proof, under a title of its own."""
    known = {hook.name.removeprefix("test_oracle_") for hook in of(oracle)}
    assert one.oracle and set(one.oracle) <= known
    for table in (arms.ARMS, verifier_arms.ARMS):
        drawn = [a for a in table if a.drafter == one.name and a.equal and a.drawn]
        assert [arm for arm in drawn if arm.mode == "exact" and not arm.disable]
    assert [other.title for other in DRAFTERS.values()].count(one.title) == 1


@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_its_draft_reads_the_block(tmp_path: Path, kind: str) -> None:
    """Tiny and at the 27B's width, of the same family."""
    made = [
        models.make_draft(tmp_path / "tiny", kind, block_size=6),
        models.make_27b_draft(tmp_path / "wide", kind, 4, block_size=6),
    ]
    tiny, wide = (json.loads((p / "config.json").read_text()) for p in made)
    assert tiny["architectures"] == wide["architectures"]
    assert tiny.keys() == wide.keys()


@pytest.mark.host
@every
def test_its_worker_is_there(one: Drafter) -> None:
    if one.worker:
        assert importlib.util.find_spec(one.worker) is not None


def test_what_is_no_drafter_is_refused() -> None:
    for ask in (drafters.drafter, lambda name: drafters.draft_flags(name, None)):
        with pytest.raises(ValueError, match="found draft kind 'medusa'"):
            ask("medusa")
    assert [one.name for one in DRAFTERS.values() if one.model == NONE] == ["ngram"]
