# SPDX-License-Identifier: Apache-2.0
"""RMSNorm with a residual: a row's bits are its own, and the layer alone decides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sglang_exact.hooks import residual_norm  # noqa: E402

pytestmark = pytest.mark.host

ROWS = 300
WIDTHS = (64, 1000, 4096)


DEVICES = [
    pytest.param("cpu", marks=pytest.mark.rehearsal),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    found: str = request.param
    from sglang.srt import batch_invariant_ops

    monkeypatch.setattr(
        batch_invariant_ops, "is_batch_invariant_mode_enabled", lambda: True
    )
    return found


def layer(width: int, device: str, **changes: Any) -> SimpleNamespace:
    fields = {
        "weight": torch.linspace(0.5, 1.5, width, device=device).bfloat16(),
        "variance_epsilon": 1e-6,
        "variance_size_override": None,
        "override_orig_dtype": None,
        "cast_x_before_out_mul": False,
        "fp32_residual": False,
    }
    return SimpleNamespace(**{**fields, **changes})


def inputs(rows: int, width: int, device: str) -> tuple[Any, Any]:
    generator = torch.Generator(device).manual_seed(3)
    size = (2, rows, width)
    both = torch.randn(size, generator=generator, device=device).bfloat16()
    return both[0], both[1]


def never(*args: Any) -> None:
    raise AssertionError("found a call of the host's norm, expected none")


def norm(made: Any, x: Any, residual: Any) -> Any:
    return residual_norm.forward_cuda(never, made, x, residual)


def same(a: Any, b: Any) -> bool:
    return bool(torch.equal(a.view(torch.int16), b.view(torch.int16)))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_with_a_residual_is_its_own(device: str, width: int) -> None:
    """Alone, among few, among many, in another place; neither input is written to."""
    rows = ROWS if device == "cuda" else 20
    made, (x, residual) = layer(width, device), inputs(rows, width, device)
    before = x.clone(), residual.clone()
    whole = norm(made, x, residual)
    assert same(x, before[0]) and same(residual, before[1])
    assert same(whole[1], x + residual)
    for picked in ([0], [rows - 1], [5, 2, 9], list(range(17))):
        parts = norm(made, x[picked], residual[picked])
        assert all(same(p, w[picked]) for p, w in zip(parts, whole, strict=True))
    other = norm(made, x + 1, residual)
    assert not same(other[0], whole[0])


@pytest.mark.parametrize("width", WIDTHS)
def test_a_norm_with_a_residual_is_accurate(device: str, width: int) -> None:
    made, (x, residual) = layer(width, device), inputs(9, width, device)
    found, total = norm(made, x, residual)
    exact = total.double()
    scale = (exact.pow(2).mean(-1, keepdim=True) + made.variance_epsilon).rsqrt()
    exact = exact * scale * made.weight.double()
    # One rounding to bfloat16, of a value that float32 sums moved a little.
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"variance_size_override": 32},
        {"override_orig_dtype": torch.float32},
        {"cast_x_before_out_mul": True},
        {"fp32_residual": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_norms_stay_the_hosts(device: str, changes: dict[str, Any]) -> None:
    made, (x, residual) = layer(64, device, **changes), inputs(2, 64, device)
    asked: list[Any] = []

    def original(*args: Any) -> str:
        asked.append(args)
        return "host"

    assert residual_norm.forward_cuda(original, made, x, residual) == "host"
    plain = layer(64, device)
    assert residual_norm.forward_cuda(original, plain, x) == "host"
    assert residual_norm.forward_cuda(original, plain, x, residual, x) == "host"
    assert residual_norm.forward_cuda(original, plain, x[:0], residual[:0]) == "host"
    assert [len(args) for args in asked] == [5] * 4
