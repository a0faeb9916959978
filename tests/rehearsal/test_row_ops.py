# SPDX-License-Identifier: Apache-2.0
"""Products whose rows do not depend on the number of rows."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from sglang_exact.rehearsal import row_ops  # noqa: E402


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 512), (128, 64), (33, 7)])
def test_rows_are_independent(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    k, n = shape
    generator = torch.Generator().manual_seed(k * n)
    a = torch.randn(17, k, generator=generator).to(dtype)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    whole = row_ops.mm_rows(a, weight.t())
    for count in (1, 2, 4, 8):
        part = row_ops.mm_rows(a[3 : 3 + count].clone(), weight.t())
        assert torch.equal(_bits(part), _bits(whole[3 : 3 + count]))
    exact = a.double() @ weight.t().double()
    error = (whole.double() - exact).abs().max()
    assert error <= (0.5 if dtype == torch.bfloat16 else 1e-3) * exact.abs().max() / 64


def test_large_products_are_cut_in_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(3, 64), torch.randn(64, 100)
    whole = row_ops.mm_rows(a, b)
    monkeypatch.setattr(row_ops, "_CHUNK_BYTES", 4 * 64 * 7)
    assert torch.equal(_bits(row_ops.mm_rows(a, b)), _bits(whole))


def test_registered_operators_reach_linear_and_log_softmax() -> None:
    x = torch.randn(5, 64).bfloat16()
    weight = torch.randn(32, 64).bfloat16()
    bias = torch.randn(32).bfloat16()
    library = row_ops.register()
    try:
        plain = torch.nn.functional.linear(x, weight)
        with_bias = torch.nn.functional.linear(x, weight, bias)
        one = torch.nn.functional.linear(x[2:3], weight)
        logprobs = torch.log_softmax(plain.float(), dim=-1)
        single = torch.log_softmax(plain[1:2].float(), dim=-1)
        batched = torch.bmm(x.view(1, 5, 64), weight.t().view(1, 64, 32))
    finally:
        library._destroy()
    rows = row_ops.mm_rows(x, weight.t())
    assert torch.equal(_bits(plain), _bits(rows))
    assert torch.equal(_bits(one), _bits(rows[2:3]))
    assert torch.equal(_bits(batched[0]), _bits(rows))
    summed = row_ops.mm_rows(x, weight.t(), torch.float32) + bias.float()
    assert torch.equal(_bits(with_bias), _bits(summed.bfloat16()))
    assert torch.equal(_bits(single), _bits(logprobs[1:2]))
    assert torch.allclose(logprobs.exp().sum(-1), torch.ones(5), atol=1e-5)
