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


def test_another_step_draws_other_tokens() -> None:
    """Control: the comparison sees it when a row is drawn as of another step."""
    values, info = logits(), settings(64)
    positions = torch.arange(100, 164, device="cuda")
    first = draw_rows(values, info, positions)
    assert not torch.equal(draw_rows(values, info, positions + 1), first)


def test_order_moves_float_sums_and_not_ours() -> None:
    """Control: 1 + e + e is 1 or more than 1 in float32; in fixed point it is one sum.

    Which order torch.cumsum takes for how many rows is its own business, so that
    the orders are written out here.
    """
    one = torch.ones(1, device="cuda")
    small = torch.full((1,), 2.0**-24, device="cuda")
    assert torch.equal((one + small) + small, one)
    assert not torch.equal(one + (small + small), one)
    scale = 2.0**52
    fixed = [(x.double() * scale).long() for x in (one, small, small)]
    forwards = (fixed[0] + fixed[1]) + fixed[2]
    backwards = fixed[0] + (fixed[1] + fixed[2])
    assert torch.equal(forwards, backwards)
    assert int(forwards) > int(fixed[0])


@pytest.mark.parametrize("count", COUNTS)
def test_argmax_takes_the_lowest_of_exact_ties(count: int) -> None:
    values = logits(count)
    ids = torch.randint(0, VOCAB, (count, 5), device="cuda")
    values.scatter_(1, ids, 64.0)
    assert torch.equal(values.argmax(dim=-1), ids.min(dim=-1).values)


def test_last_of_ties_is_another_token() -> None:
    """Control: the rule has something to decide."""
    values = logits(8)
    ids = torch.arange(10, 18, device="cuda").view(8, 1) * torch.tensor(
        [1, 100], device="cuda"
    )
    values.scatter_(1, ids, 64.0)
    last = VOCAB - 1 - values.flip(1).argmax(dim=-1)
    assert torch.equal(last, ids[:, 1])
    assert not torch.equal(last, values.argmax(dim=-1))


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


def test_the_other_tie_rule_gives_other_ids() -> None:
    """Control: there are ties among the best 20, so that the rule matters."""
    values = torch.log_softmax(logits(), dim=-1)
    _, lowest = top_k(values, 20)
    _, highest = top_k(values.flip(1), 20)
    assert not torch.equal(lowest, VOCAB - 1 - highest)
