# SPDX-License-Identifier: Apache-2.0
"""On the device: neither token nor logprobs of a row depend on the other rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_exact.hooks.logprobs import top_k  # noqa: E402
from sglang_exact.hooks.sampling import draw  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.host]

VOCAB = 248320
COUNTS = (1, 2, 7, 8, 9, 16, 17, 64)


def logits(rows: int = 64, seed: int = 0) -> torch.Tensor:
    """bf16 logits as float32, as the host hands them to the sampler: many ties."""
    made = torch.Generator(device="cuda").manual_seed(seed)
    values = torch.randn(rows, VOCAB, generator=made, device="cuda") * 3
    return values.bfloat16().float()


def settings(rows: int) -> Any:
    """Rows in turn: plain, top-p, top-k, min-p, all three, greedy."""
    kinds = [(0, 1.0, 0.0), (0, 0.9, 0.0), (50, 1.0, 0.0), (0, 1.0, 0.05)]
    kinds += [(40, 0.8, 0.02), (1, 1.0, 0.0)]
    chosen = [kinds[i % len(kinds)] for i in range(rows)]
    return SimpleNamespace(
        need_top_k_sampling=True,
        need_top_p_sampling=True,
        need_min_p_sampling=True,
        is_any_greedy=True,
        top_ks=torch.tensor([k or 1 << 30 for k, _, _ in chosen], device="cuda"),
        top_ps=torch.tensor([p for _, p, _ in chosen], device="cuda"),
        min_ps=torch.tensor([m for _, _, m in chosen], device="cuda"),
        sampling_seed=torch.arange(rows, device="cuda"),
    )


def part(info: Any, rows: slice) -> Any:
    """The settings of some rows."""
    names = ("top_ks", "top_ps", "min_ps", "sampling_seed")
    return SimpleNamespace(
        **{**vars(info), **{name: getattr(info, name)[rows] for name in names}}
    )


def draw_rows(values: torch.Tensor, info: Any, positions: torch.Tensor) -> Any:
    probs = torch.softmax(values / 0.9, dim=-1)
    return draw(probs, info, positions, values.argmax(dim=-1))


@pytest.mark.parametrize("count", COUNTS)
def test_draw_does_not_depend_on_rows(count: int) -> None:
    values, info = logits(), settings(64)
    positions = torch.arange(100, 164, device="cuda")
    together = draw_rows(values, info, positions)
    for start in range(0, 64, count):
        rows = slice(start, min(start + count, 64))
        alone = draw_rows(values[rows].clone(), part(info, rows), positions[rows])
        assert torch.equal(alone, together[rows]), (count, start)


def test_draw_repeats() -> None:
    values, info = logits(), settings(64)
    positions = torch.arange(100, 164, device="cuda")
    first = draw_rows(values, info, positions)
    assert all(
        torch.equal(draw_rows(values, info, positions), first) for _ in range(50)
    )


def test_float_sums_depend_on_rows() -> None:
    """The control: the sums that the host's top-p compares do depend on them."""
    ordered = torch.softmax(logits(), dim=-1).sort(dim=-1, descending=True).values
    together = torch.cumsum(ordered, dim=-1)
    alone = torch.cat([torch.cumsum(ordered[i : i + 1], dim=-1) for i in range(64)])
    assert not torch.equal(together.view(torch.int32), alone.view(torch.int32))


@pytest.mark.parametrize("count", COUNTS)
def test_argmax_takes_the_lowest_of_exact_ties(count: int) -> None:
    values = logits(count)
    ids = torch.randint(0, VOCAB, (count, 5), device="cuda")
    values.scatter_(1, ids, 64.0)
    assert torch.equal(values.argmax(dim=-1), ids.min(dim=-1).values)


@pytest.mark.parametrize("count", COUNTS)
def test_top_logprobs_do_not_depend_on_rows(count: int) -> None:
    values = torch.log_softmax(logits(), dim=-1)
    together = top_k(values, 20)
    for start in range(0, 64, count):
        rows = slice(start, min(start + count, 64))
        found, ids = top_k(values[rows].clone(), 20)
        assert torch.equal(ids, together[1][rows])
        same = found.view(torch.int32), together[0][rows].view(torch.int32)
        assert torch.equal(*same)
