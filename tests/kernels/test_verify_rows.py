# SPDX-License-Identifier: Apache-2.0
"""fill_verify_rows against rows built on the host."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from sglang_exact_kernels.reference import verify_rows_reference
from sglang_exact_kernels.verify_rows import fill_verify_rows

POISON = -7


class Rows(NamedTuple):
    row_indptr: torch.Tensor
    row_splits: torch.Tensor
    row_indices: torch.Tensor


def _inputs(
    lengths: list[int], T: int, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    indptr = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    slots = torch.randperm(sum(lengths) + T * len(lengths) + 1, generator=g)
    loc = slots[: T * len(lengths)].clone()
    prefix = slots[T * len(lengths) :].clone()
    return indptr.to(device), prefix.to(device), loc.to(device)


def _fill(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], T: int, **changes: int
) -> Rows:
    indptr, prefix, loc = inputs
    bs = indptr.numel() - 1
    context = int((indptr[1:] - indptr[:-1]).max().item()) + T
    device = indptr.device
    rows = Rows(
        torch.full((bs * T + 1,), POISON, dtype=torch.int32, device=device),
        torch.full((bs * T,), POISON, dtype=torch.int32, device=device),
        torch.full((bs * T * context,), POISON, dtype=torch.int64, device=device),
    )
    options = {"split_tile_size": 256, "max_context_len": context, **changes}
    fill_verify_rows(indptr, prefix, loc, T, **options, **rows._asdict())
    return rows


@pytest.mark.parametrize("T", [1, 3, 8])
@pytest.mark.parametrize("lengths", [[0], [1, 0, 255], [256, 1025, 7, 1, 1], [5000, 2]])
def test_fill_verify_rows(device: torch.device, lengths: list[int], T: int) -> None:
    inputs = _inputs(lengths, T, seed=T, device=device)
    got = _fill(inputs, T)
    want = verify_rows_reference(*(x.cpu() for x in inputs), T, 256)
    used = want[2].numel()
    assert torch.equal(got.row_indptr.cpu(), want[0])
    assert torch.equal(got.row_splits.cpu(), want[1])
    assert torch.equal(got.row_indices[:used].cpu(), want[2])
    assert bool((got.row_indices[used:] == POISON).all())


def test_fill_verify_rows_does_not_depend_on_neighbours(device: torch.device) -> None:
    T, lengths = 4, [300, 17, 2049]
    indptr, prefix, loc = _inputs(lengths, T, seed=9, device=device)
    whole = _fill((indptr, prefix, loc), T)
    for r, length in enumerate(lengths):
        begin = int(indptr[r].item())
        alone = _fill(
            (
                torch.tensor([0, length], dtype=torch.int32, device=device),
                prefix[begin : begin + length].contiguous(),
                loc[T * r : T * (r + 1)].contiguous(),
            ),
            T,
        )
        first = int(whole.row_indptr[T * r].item())
        end = int(whole.row_indptr[T * (r + 1)].item())
        assert torch.equal(whole.row_splits[T * r : T * (r + 1)], alone.row_splits)
        assert torch.equal(
            whole.row_indptr[T * r : T * (r + 1) + 1] - first, alone.row_indptr
        )
        assert torch.equal(
            whole.row_indices[first:end], alone.row_indices[: end - first]
        )


def test_fill_verify_rows_comparison_can_fail(device: torch.device) -> None:
    inputs = _inputs([40, 3], 2, seed=1, device=device)
    other = (inputs[0], inputs[1], inputs[2].flip(0).contiguous())
    assert not torch.equal(_fill(inputs, 2).row_indices, _fill(other, 2).row_indices)


def test_fill_verify_rows_repeats(device: torch.device) -> None:
    inputs = _inputs([700, 3000], 3, seed=2, device=device)
    first = _fill(inputs, 3)
    for _ in range(3):
        for x, y in zip(_fill(inputs, 3), first, strict=True):
            assert torch.equal(x, y)


def test_fill_verify_rows_refuses(device: torch.device) -> None:
    indptr, prefix, loc = _inputs([10], 2, seed=3, device=device)
    with pytest.raises(ValueError) as refusal:
        _fill((indptr.long(), prefix, loc.int()), 2)
    assert "kv_indptr: found torch.int64" in str(refusal.value)
    assert "out_cache_loc: found torch.int32" in str(refusal.value)
    with pytest.raises(ValueError, match="row_indices: found 24 elements"):
        _fill((indptr, prefix, loc), 2, max_context_len=13)
