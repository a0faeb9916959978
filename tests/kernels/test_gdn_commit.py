# SPDX-License-Identifier: Apache-2.0
"""gdn_commit: each request its own accepted length, all layers at once, refusal.

That its states are those of decode steps is shown in test_gdn_verify.py, for every
accepted length: `GdnCase.verify` takes its states from here.
"""

from __future__ import annotations

import pytest
import torch

from sglang_exact_kernels.gdn_commit import gdn_commit
from sglang_exact_kernels.gdn_verify import record_width
from sglang_exact_kernels.invariance import assert_same_bits, different_elements
from tools.kernels.gdn_cases import GdnCase, GdnShape, make_case

SMALL = GdnShape(bs=4, T=3, H=2, HV=4, K=32, V=32)
ODD = GdnShape(bs=2, T=3, H=1, HV=2, K=16, V=8)
"""Its 34 floats a token are no whole number of vectors."""
MODEL_27B = GdnShape(bs=8, T=8, H=16, HV=48, K=128, V=128)


def _layers(
    shape: GdnShape, device: torch.device, count: int
) -> tuple[list[GdnCase], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Layers that share slots: cases, pool, records, and the states of every step."""
    first = make_case(shape, device, seed=21)
    cases, records, wanted = [], [], []
    for seed in range(count):
        case = make_case(shape, device, seed=22 + seed)
        states = torch.full_like(first.ssm_states, float("nan"))
        states[first.cache_indices.long()] = case.ssm_states[case.cache_indices.long()]
        case = case._replace(ssm_states=states, cache_indices=first.cache_indices)
        kept, _ = case.records()
        wanted.append(case.verify(records=kept)[1])
        cases.append(case)
        records.append(kept)
    pool = torch.stack([case.ssm_states for case in cases])
    return cases, pool, torch.stack(records), torch.stack(wanted)


def _last(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _check(shape: GdnShape, device: torch.device, last: list[int]) -> None:
    cases, pool, records, wanted = _layers(shape, device, 2)
    before, slots = pool.clone(), cases[0].cache_indices
    rows = torch.arange(shape.bs, dtype=torch.int32, device=device)
    gdn_commit(
        pool,
        records,
        cache_indices=slots,
        record_rows=rows,
        last_steps=_last(last, device),
    )
    for r, step in enumerate(last):
        slot = int(slots[r])
        want = before[:, slot] if step < 0 else wanted[:, r, step]
        assert_same_bits(pool[:, slot], want)
    rest = [s for s in range(pool.shape[1]) if s not in slots.tolist()]
    assert bool(pool[:, rest].isnan().all())


def test_every_request_commits_its_own_length(device: torch.device) -> None:
    _check(SMALL, device, [2, -1, 0, 1])


def test_records_are_whole_vectors(device: torch.device) -> None:
    assert record_width(ODD.H, ODD.HV, ODD.K, ODD.V) == 36
    _check(ODD, device, [1, 2])


def test_control_another_length_gives_another_state(device: torch.device) -> None:
    _, _, _, wanted = _layers(SMALL, device, 1)
    assert different_elements(wanted[:, :, 0], wanted[:, :, 1])


def test_padding_rows_store_nothing(device: torch.device) -> None:
    cases, pool, records, _ = _layers(SMALL, device, 1)
    before, slots = pool.clone(), cases[0].cache_indices.clone()
    slots[1] = -1
    rows = torch.arange(SMALL.bs, dtype=torch.int32, device=device)
    rows[2] = -1
    last = _last([-1, 2, 2, -1], device)
    gdn_commit(pool, records, cache_indices=slots, record_rows=rows, last_steps=last)
    assert_same_bits(pool, before)


def test_it_refuses_before_any_launch(device: torch.device) -> None:
    _, pool, records, _ = _layers(SMALL, device, 1)
    slots = torch.zeros(SMALL.bs, dtype=torch.int32, device=device)
    with pytest.raises(ValueError) as refusal:
        gdn_commit(
            pool.double(),
            records[:, :, :, :-1],
            cache_indices=slots,
            record_rows=slots,
            last_steps=slots[:2],
        )
    text = str(refusal.value)
    assert "states dtype: found torch.float64" in text
    assert "records width" in text
    assert "last_steps shape: found (2,)" in text


@pytest.mark.gpu
@pytest.mark.parametrize("shift", range(8))
def test_every_length_27b(device: torch.device, shift: int) -> None:
    _check(MODEL_27B, device, [(r + shift) % 9 - 1 for r in range(8)])
