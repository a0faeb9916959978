# SPDX-License-Identifier: Apache-2.0
"""The oracle's rule: rates, determinism, and never the right token by accident."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_exact.bench.cost_model import model as cost_model
from sglang_exact.hooks.base import of
from sglang_exact.hooks.testing import oracle as subject
from tools.proof import speed_stages as bench_stages

VOCAB = 512
PROMPT = tuple(range(5, 25))
OUTPUT = tuple(int(x) for x in np.random.RandomState(3).randint(0, VOCAB, 4000))
KNOWN = np.array(PROMPT + OUTPUT)


def _row(rate: float, *, seed: int = 1, prompt: tuple[int, ...] = PROMPT) -> np.ndarray:
    plan = subject.Plan(rate, seed, ())
    return subject.draft_row(prompt, OUTPUT, plan, VOCAB, len(KNOWN))


def test_rate_one_keeps_all_and_rate_zero_none() -> None:
    assert np.array_equal(_row(1.0), KNOWN)
    assert not np.any(_row(0.0) == KNOWN)


def test_rate_is_the_kept_part() -> None:
    kept = _row(0.5) == KNOWN
    # Binomial: 4020 trials, six standard deviations.
    assert abs(kept.mean() - 0.5) < 6 * 0.5 / np.sqrt(len(KNOWN))
    # Kept at a low rate means kept at every higher one.
    assert np.all((_row(0.8) == KNOWN)[kept])


def test_rule_is_repeatable_and_depends_on_seed_and_prompt() -> None:
    assert np.array_equal(_row(0.5), _row(0.5))
    assert not np.array_equal(_row(0.5), _row(0.5, seed=2))
    other = _row(0.5, prompt=PROMPT[::-1])
    assert not np.array_equal(
        other[len(PROMPT) :] == KNOWN[len(PROMPT) :],
        (_row(0.5) == KNOWN)[len(PROMPT) :],
    )


def _kept(prompt: tuple[int, ...], *, in_step: bool, rate: float = 0.5) -> np.ndarray:
    """Which of the first 300 tokens are drafted rightly; the seed is the bench's."""
    plan = subject.Plan(rate, bench_stages.IN_STEP_SEED, (), in_step)
    row = subject.draft_row(prompt, OUTPUT, plan, VOCAB, len(prompt) + 300)
    return row[len(prompt) :] == np.array(OUTPUT[:300])


def test_in_step_the_place_in_the_answer_decides_alone() -> None:
    prompts = (PROMPT, PROMPT[::-1], PROMPT[:3], (7,))
    first, *others = (_kept(prompt, in_step=True) for prompt in prompts)
    assert all(np.array_equal(first, other) for other in others)
    apart, *others = (_kept(prompt, in_step=False) for prompt in prompts)
    assert not any(np.array_equal(apart, other) for other in others)


def test_the_bench_pattern_in_step_has_the_length_of_its_rate() -> None:
    right = _kept(PROMPT, in_step=True, rate=cost_model.keep_rate(5.46, 8))
    known, steps = 1, 0
    while known < 256:
        block = right[known : known + 7]
        known += 1 + (7 if block.all() else int(block.argmin()))
        steps += 1
    assert abs(256 / steps - 5.46) < 0.05


def test_drafts_are_valid_tokens() -> None:
    row = _row(0.0)
    assert row.min() >= 0
    assert row.max() < VOCAB


def test_a_longer_continuation_does_not_change_earlier_drafts() -> None:
    plan = subject.Plan(0.5, 1, ())
    short = subject.draft_row(PROMPT, OUTPUT[:50], plan, VOCAB, len(PROMPT) + 50)
    assert np.array_equal(short, _row(0.5)[: len(short)])


@dataclass
class _Request:
    origin_input_ids: list[int]


def _write(path: Path, rate: float) -> None:
    subject.write_plan(path, rate, [(PROMPT, OUTPUT), (PROMPT[:5], OUTPUT[:9])])


def test_tables_follow_the_file_and_the_positions(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    file = tmp_path / "oracle.json"
    _write(file, 1.0)
    oracle = subject.Oracle(file, VOCAB)
    requests = [_Request(list(PROMPT[:5])), _Request(list(PROMPT)), _Request([1])]
    rows = oracle.rows_of(requests)
    assert rows == (1, 0, 2)
    positions = torch.tensor([[5, 6, 7], [20, 21, 22], [1, 2, 3]])
    drafts = oracle.drafts(rows, positions)
    assert drafts[0].tolist() == list(OUTPUT[0:3])
    assert drafts[1].tolist() == list(OUTPUT[0:3])
    assert drafts[2].min() >= 0
    assert drafts[2].max() < VOCAB
    assert oracle.drafts_on_host(0, 20, 3).tolist() == list(OUTPUT[0:3])

    _write(file, 0.0)
    assert oracle.rows_of(requests) == (1, 0, 2)
    wrong = oracle.drafts(rows, positions)
    assert not torch.any(wrong[:2] == drafts[:2])


def test_positions_past_the_end_are_answered(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    file = tmp_path / "oracle.json"
    _write(file, 1.0)
    oracle = subject.Oracle(file, VOCAB)
    rows = oracle.rows_of([_Request(list(PROMPT))])
    drafts = oracle.drafts(rows, torch.tensor([[10_000, 20_000]]))
    assert 0 <= int(drafts.min()) <= int(drafts.max()) < VOCAB


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"rate": 0.5, "continuations": []}, "missing .'seed'."),
        ({"rate": 1.5, "seed": 1, "continuations": []}, "expected 0.0 to 1.0"),
        ({"rate": 1, "seed": 1, "continuations": [], "x": 1}, "unknown .'x'."),
    ],
)
def test_bad_files_are_refused(
    tmp_path: Path, raw: dict[str, object], message: str
) -> None:
    file = tmp_path / "oracle.json"
    file.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message):
        subject.read_plan(file)


def test_unconfigured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(subject.VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match="unset"):
        subject.oracle(VOCAB)


WIDTH = 4
SHAPES = (
    "positions",
    "custom_mask",
    "retrieve_index",
    "retrieve_next_token",
    "retrieve_next_sibling",
)


def _tree() -> Any:
    """A mask in which rows 1 and 2 both hang on row 0: [4, 4]."""
    mask = np.eye(WIDTH, dtype=np.int64)
    mask[:, 0] = 1
    mask[3, 1] = 1
    return mask


def _block(torch: Any) -> Any:
    """What a drafter hands to verify: one request, its block at positions 20 to 23."""
    tensors = {name: torch.arange(WIDTH) + i for i, name in enumerate(SHAPES)}
    tensors["positions"] = torch.arange(20, 20 + WIDTH)
    tensors["custom_mask"] = torch.from_numpy(_tree()).reshape(-1) != 0
    return SimpleNamespace(
        draft_token=torch.full((WIDTH,), 7),
        topk=1,
        draft_token_num=WIDTH,
        ragged_verify_layout=None,
        **tensors,
    )


def _dspark(torch: Any, worker: Any, batch: Any) -> tuple[Any, Any]:
    block = _block(torch)
    proposal = SimpleNamespace(
        draft_block=SimpleNamespace(draft_tokens=block.draft_token[None, 1:].clone()),
        verify_ids=block.draft_token[None].clone(),
    )
    subject.dspark_propose(
        lambda *a, **k: proposal,
        None,
        batch=batch,
        draft_input=None,
        verify_window=SimpleNamespace(positions_2d=block.positions[None]),
        bs=1,
        device="cpu",
        target_model=SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB)),
        sampling_info=None,
    )
    assert torch.equal(proposal.draft_block.draft_tokens, proposal.verify_ids[:, 1:])
    return block, proposal.verify_ids[0]


def _dflash(torch: Any, worker: Any, batch: Any) -> tuple[Any, Any]:
    block = _block(torch)
    subject.dflash_prepare_for_verify(lambda *a, **k: None, block, batch, worker)
    return block, block.draft_token


def _eagle(torch: Any, worker: Any, batch: Any) -> tuple[Any, Any]:
    block = _block(torch)
    subject.eagle_prepare_for_verify(lambda *a: None, block, None, batch, worker)
    return block, block.draft_token


def _ngram(torch: Any, worker: Any, batch: Any) -> tuple[Any, Any]:
    block = _block(torch)
    mask = _tree().reshape(-1)
    drafter = SimpleNamespace(
        draft_token_num=WIDTH, prev_accept_lens=[0], target_worker=worker
    )
    tokens, found = subject.ngram_prepare_draft_tokens(
        lambda *a: (block.draft_token.numpy(), mask), drafter, batch
    )
    block.custom_mask = torch.from_numpy(found) != 0
    return block, torch.from_numpy(tokens)


CHANGES = {"dspark": _dspark, "dflash": _dflash, "ngram": _ngram, "eagle": _eagle}


@pytest.mark.parametrize(
    "name", [hook.name.removeprefix("test_oracle_") for hook in of(subject)]
)
def test_a_drafter_keeps_its_shape(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are the known tokens; masks, positions and links are the drafter's own."""
    torch = pytest.importorskip("torch")
    file = tmp_path / "oracle.json"
    _write(file, 1.0)
    monkeypatch.setenv(subject.VARIABLE, str(file))
    request = SimpleNamespace(origin_input_ids=list(PROMPT), output_ids=[OUTPUT[0]])
    batch = SimpleNamespace(
        reqs=[request], forward_mode=SimpleNamespace(is_idle=lambda: False)
    )
    config = SimpleNamespace(vocab_size=VOCAB)
    worker = SimpleNamespace(model_runner=SimpleNamespace(model_config=config))
    block, tokens = CHANGES[name](torch, worker, batch)
    # Position 20 holds the first token of the answer, which is committed.
    assert tokens.tolist() == [7, *OUTPUT[1:WIDTH]]
    untouched = _block(torch)
    for shape in SHAPES:
        assert torch.equal(getattr(block, shape), getattr(untouched, shape)), shape
