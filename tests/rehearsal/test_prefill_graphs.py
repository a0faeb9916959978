# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_prefill_graphs: what it asks, what it compares, and a run of it.

A rehearsal has no graphs. It runs the step with its rows rounded up, which finds code
that looks at the number of rows; the bits of a replayed graph are a GPU's to prove.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_exact.rehearsal import models  # noqa: E402
from tools.proof import prefill_graphs as script  # noqa: E402
from tools.proof import prefill_steps as steps  # noqa: E402

BUCKETS = (4, 8, 12, 64, 512)


def test_every_bucket_is_asked_at_its_edges() -> None:
    asked = list(steps.cases(BUCKETS))
    found = {b: sorted({c.tokens for c in asked if c.bucket == b}) for b in BUCKETS}
    # From half of its rows on, but not what the bucket below takes.
    assert found == {
        4: [2, 3, 4],
        8: [5, 7, 8],
        12: [9, 11, 12],
        64: [32, 63, 64],
        512: [256, 511, 512],
    }
    for case in asked:
        parts = steps.split(case.tokens, case.shape)
        assert sum(parts) == case.tokens and min(parts) > 0
        assert (len(parts) == 3) is (case.shape in steps.OF_THREE)
        assert case.shape != "kept" or max(parts) >= steps.CHUNK
    assert {c.shape for c in asked} == set(steps.SHAPES)


def bits() -> tuple[list[tuple[str, Any]], steps.Bits]:
    """Pools before a step, and what a step left that wrote nothing."""
    torch.manual_seed(0)
    before = [("kv", torch.randn(8, 2)), ("states", torch.randn(4, 3))]
    owned = {"kv": torch.tensor([0, 2, 3]), "states": torch.tensor([1])}
    return before, steps.Bits(torch.randn(1, 5), before, owned)


def test_nothing_written_differs_nowhere() -> None:
    before, left = bits()
    found = steps.compare(before, left, left)
    assert found == {"logits": 0, "kv": 0, "states": 0, "foreign": 0}


@pytest.mark.parametrize(
    ("pool", "slot", "where"),
    [(0, 3, "kv"), (1, 1, "states"), (0, 5, "foreign"), (1, 0, "foreign"), (0, 0, "")],
)
def test_one_bit_is_found(pool: int, slot: int, where: str) -> None:
    """In a slot of the step, in one of nobody's; padded rows may write the first."""
    before, eager = bits()
    pools = [(name, tensor.clone()) for name, tensor in before]
    pools[pool][1].view(torch.int32)[slot, 1] ^= 1
    found = steps.compare(before, eager._replace(pools=pools), eager)
    assert {part for part, count in found.items() if count} == ({where} - {""})


def test_one_bit_of_a_logit_is_found() -> None:
    before, eager = bits()
    logits = eager.logits.clone()
    logits.view(torch.int32)[0, 4] ^= 1
    found = steps.compare(before, eager._replace(logits=logits), eager)
    assert found == {"logits": 1, "kv": 0, "states": 0, "foreign": 0}


def test_a_row_says_when_a_control_finds_nothing_or_a_graph_was_not_used() -> None:
    part = dict.fromkeys(("logits", "kv", "states", "foreign"), 0)
    good = {**part, "replayed": True}
    row = script.row_of("exact", [good], [4], True, 1.0)
    assert row["as_expected"] and row["first"] is None
    assert not script.row_of("exact", [], [4], True, 1.0)["as_expected"]
    assert not script.row_of("rows-planted", [good], [4], True, 1.0)["as_expected"]
    # GDN's layers have to be in the graphs, but for the host's default mode.
    assert not script.row_of("exact", [good], [4], False, 1.0)["as_expected"]
    eager = {**good, "replayed": False}
    assert not script.row_of("exact", [good, eager], [4], True, 1.0)["as_expected"]
    bad = {**good, "kv": 2}
    assert not script.row_of("exact", [good, bad], [4], True, 1.0)["as_expected"]
    assert script.row_of("rows-planted", [good, bad], [4], True, 1.0)["as_expected"]


@pytest.mark.e2e
@pytest.mark.parametrize("arm", ["exact", "rows-planted"])
def test_a_step_does_not_depend_on_its_padding(tmp_path: Path, arm: str) -> None:
    """Logits, KV and states; and a layer that looks at the rows is found."""
    model = models.make_target(tmp_path / "target", 4)
    first, *found = script.ask(arm, model, rehearsal=True, limit_s=300)
    row = script.row_of(arm, found, first["buckets"], first["whole"], 0.0)
    assert row["as_expected"], script.shown(row)
