# SPDX-License-Identifier: Apache-2.0
"""The arms of scripts/gpu_proof: each has an answer to be compared with."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from sglang_exact import hooks  # noqa: E402
from sglang_exact.client.blocking import Completion  # noqa: E402
from tools.proof import arms as proof_arms  # noqa: E402
from tools.proof import bits as script  # noqa: E402
from tools.proof.arms import Arm, Phase, Sizes  # noqa: E402


def proof(folder: Path) -> Any:
    args = argparse.Namespace(
        state=str(folder),
        out=str(folder),
        gpus="0",
        side_by_side=1,
        name="proof",
        budget=1e9,
    )
    return script.Proof(args, Sizes(4))


def test_what_an_arm_asks_was_asked_of_plain_decoding(tmp_path: Path) -> None:
    recorded = {
        phase.text for arm in proof_arms.ARMS if arm.records for phase in arm.phases
    }
    for arm in proof_arms.ARMS:
        assert {phase.text for phase in arm.phases} <= recorded
        off = [name for name in arm.disable.split(",") if name]
        assert all(any(h.name.startswith(x) for h in hooks.ALL) for x in off)
    made = proof(tmp_path)
    assert set(made.texts) == recorded
    assert len({made.kept(text) for text in recorded}) == len(recorded)
    with pytest.raises(RuntimeError, match="run arm plain-repeated"):
        made.reference(proof_arms.BY_NAME["ngram-tries"], "few")


def test_repetitive_prompts_repeat() -> None:
    prompts = proof_arms.make_repeated_prompts(24, proof_arms.VOCAB)
    assert prompts == proof_arms.make_repeated_prompts(24, proof_arms.VOCAB)
    assert len({tuple(ids) for ids in prompts}) == 24
    assert {tuple(ids[-3:]) for ids in prompts[::2]} == {tuple(prompts[0][-3:])}
    for ids in prompts:
        pairs = list(zip(ids, ids[1:], strict=False))
        assert len(set(pairs)) < len(pairs) / 1.5 or len(ids) < 100
    bias = proof_arms.few_tokens(512)["logit_bias"]
    assert len(bias) == 16 and all(0 <= int(x) < 512 for x in bias)


@pytest.mark.parametrize(
    ("verifies", "first", "expected"),
    [(2, False, True), (9, False, False), (9, True, True), (0, True, False)],
)
def test_own_drafts_that_are_never_kept_prove_nothing(
    tmp_path: Path, verifies: int, first: bool, expected: bool
) -> None:
    """Ten tokens of one prompt in nine verifies: none of the drafts was kept.

    In its first turn a trie has nothing to draft from.
    """
    answer = Completion(tuple(range(10)), (), "length", verifies, 10, None, {})
    server: Any = SimpleNamespace(generate_many=lambda *a, **k: [answer])
    row, _ = script.run_phase(
        server, Arm("x", "X", "ngram", oracle=False),
        Phase(prompts=1, logprobs=False, first=first),
        proof_arms.Text([[1]], {}), [answer], tmp_path / "none.json", 10,
    )  # fmt: skip
    assert row["as_expected"] is expected and row["rate"] is None
