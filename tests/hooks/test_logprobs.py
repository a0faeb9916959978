# SPDX-License-Identifier: Apache-2.0
"""Top-k logprobs: the tie rule, for any number of rows."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from sglang_exact.hooks.logprobs import prompt_top_logprobs, top_k  # noqa: E402


def coarse(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """Few distinct values, so that every top-k has ties inside and at its edge."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-6, 3, (rows, vocab), generator=made).float() / 4


def by_rule(row: list[float], k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


@pytest.mark.parametrize("rows", [1, 8, 9, 64])
@pytest.mark.parametrize("k", [1, 5, 20])
def test_higher_value_then_lower_id(rows: int, k: int) -> None:
    values = coarse(rows, 300)
    found, ids = top_k(values, k)
    assert ids.tolist() == [by_rule(row, k) for row in values.tolist()]
    same = values.gather(1, ids).view(torch.int32)
    assert torch.equal(found.view(torch.int32), same)


def test_torch_topk_breaks_the_rule() -> None:
    """The control: what the host calls does not follow it."""
    values = coarse(8, 300)
    ids = values.topk(20).indices.tolist()
    assert ids != [by_rule(row, 20) for row in values.tolist()]


def test_signs_infinities_and_zeros() -> None:
    low = torch.finfo(torch.float32).min
    row = [-0.0, 0.0, -1.5, float("-inf"), low, -1e-45, 1e-45, float("inf"), -1.5]
    _, ids = top_k(torch.tensor([row]), len(row))
    assert ids.tolist() == [[7, 6, 0, 1, 5, 2, 8, 4, 3]]


def test_every_bfloat16_is_ordered() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16).float()
    values = values[~values.isnan()]
    found, _ = top_k(values[None], values.numel())
    assert torch.equal(found[0], values.sort(descending=True).values)


def test_prompt_chunks_get_the_same_rule() -> None:
    """Rows of a prompt, whole and cut in two, come to the host ordered."""
    seen: list[list[list[int]]] = []

    def original(logprobs: torch.Tensor, *rest: object, **given: object) -> int:
        values, ids = given["precomputed_topk"]  # type: ignore[misc]
        row_max, row_log_sum = given["log_normalizer"]  # type: ignore[misc]
        shown = (values.float() - row_max[:, None]) - row_log_sum[:, None]
        expected = logprobs.gather(1, ids)
        assert torch.equal(shown.view(torch.int32), expected.view(torch.int32))
        seen.append(ids.tolist())
        return 0

    values = coarse(7, 50)
    for part in (values, values[:3], values[3:]):
        prompt_top_logprobs(original, part, [4], [len(part)], [], [], 0)
    assert seen[0] == seen[1] + seen[2]
