# SPDX-License-Identifier: Apache-2.0
"""Sampling: neighbours, greedy rows, top-p."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from request_tools import SAMPLED, VOCAB, batch_info, decode_step, make_request

from sglang_exact.hooks.sampling import support


def test_neighbours_do_not_move_a_draw() -> None:
    """Alone, and in one batch with every other setting, 40 steps."""
    torch.manual_seed(1)
    together, _ = batch_info([make_request(**given) for given in SAMPLED])
    for step in range(40):
        logits = torch.randn(len(SAMPLED), VOCAB) * 2
        positions = torch.full((len(SAMPLED),), 10 + step)
        both, _ = decode_step(together, logits, positions)
        for row, given in enumerate(SAMPLED):
            alone, _ = batch_info([make_request(**given)])
            ids, _ = decode_step(alone, logits[row : row + 1], positions[:1])
            assert ids.tolist() == both[row : row + 1].tolist(), (step, row)


def test_control_neighbours_move_the_hosts_draw() -> None:
    """The host's own functions give an unfiltered row another token beside top-p."""
    from sglang.srt.layers import sampler

    torch.manual_seed(1)
    moved = 0
    for step in range(20):
        probs = torch.softmax(torch.randn(1, VOCAB) * 2, dim=-1)
        seed, position = torch.tensor([3]), torch.tensor([10 + step])
        alone = sampler.sampling_from_probs_torch(probs.clone(), seed, position)
        beside = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
            probs.clone(),
            torch.tensor([1 << 30]),
            torch.tensor([1.0]),
            torch.tensor([0.0]),
            False,
            seed,
            position,
        )
        moved += int(alone.tolist() != beside.tolist())
    assert moved > 0


def _close_pair() -> Any:
    """Logits whose largest entry has a higher id than one a softmax cannot tell."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 1e-3
    logits[0, 9] = torch.nextafter(torch.tensor(1e-3), torch.tensor(1.0))
    probs = torch.softmax(logits, dim=-1)
    assert probs[0, 5] == probs[0, 9]
    return logits


def test_greedy_row_is_argmax_in_any_batch() -> None:
    info, _ = batch_info([make_request(temperature=0.0), make_request(sampling_seed=1)])
    logits = torch.cat([_close_pair(), torch.randn(1, VOCAB)])
    ids, _ = decode_step(info, logits, torch.tensor([3, 3]))
    assert ids[0] == 9
    tied = torch.zeros(2, VOCAB)
    tied[:, 40] = tied[:, 11] = 1.0
    assert decode_step(info, tied, torch.tensor([3, 3]))[0][0] == 11


def test_control_greedy_row_loses_its_argmax_in_the_host() -> None:
    from sglang.srt.layers import sampler

    probs = torch.softmax(_close_pair(), dim=-1)
    ids = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
        probs,
        torch.tensor([1]),
        torch.tensor([1.0]),
        torch.tensor([0.0]),
        False,
        torch.tensor([42]),
        torch.tensor([3]),
    )
    assert ids.tolist() != [9]


def test_top_p_keeps_what_its_sum_allows() -> None:
    """Sums are exact, so the cut is where real numbers put it."""
    probs = torch.tensor([[0.25, 0.5, 0.125, 0.125]])
    for top_p, kept in ((0.5, [1, 0]), (0.76, [1, 0, 2]), (1.0, [0, 1, 2, 3])):
        info = SimpleNamespace(
            need_top_k_sampling=False,
            need_top_p_sampling=True,
            need_min_p_sampling=False,
            top_ks=torch.tensor([1 << 30]),
            top_ps=torch.tensor([top_p]),
            min_ps=torch.tensor([0.0]),
        )
        found = support(probs, info, slice(0, 1)).nonzero()[:, 1].tolist()
        assert found == sorted(kept), (top_p, found)
