# SPDX-License-Identifier: Apache-2.0
"""The self-test of quantised layers finds rows that depend on their number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_exact import schemes  # noqa: E402
from sglang_exact.selftest import quantised  # noqa: E402

SCHEME = schemes.BY_NAME["fp8-block"]


class Fp8LinearMethod:
    """A product of rows, and a bit that a fault flips."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.calls = fault, 0

    def apply(self, layer: Any, x: Any) -> Any:
        self.calls += 1
        # One row at a time: torch's own product depends on the number of rows.
        out = (x.float()[:, None, :] * layer.weight.float()).sum(-1).bfloat16()
        flip = {
            "rows": x.shape[0] >= 65,
            "calls": self.calls % 100 == 0,
        }.get(self.fault, False)
        if flip:
            out.view(torch.int16)[-1, 0] ^= 1
        return out


def model(fault: str = "") -> Any:
    made = torch.nn.Module()
    made.proj = torch.nn.Module()
    made.proj.weight = torch.nn.Parameter(torch.randn(3, 8), requires_grad=False)
    made.proj.quant_method = Fp8LinearMethod(fault)
    made.visual = torch.nn.Module()
    made.visual.weight, made.visual.quant_method = made.proj.weight, Fp8LinearMethod()
    made.other = torch.nn.Module()
    made.other.quant_method = SimpleNamespace()
    return made


class W8A8Int8LinearMethod:
    """Stands in for the host's, which keeps [K, N]."""


def test_shapes_of_turned_weights() -> None:
    made = model()
    made.proj.quant_method = W8A8Int8LinearMethod()
    made.proj.weight = torch.nn.Parameter(torch.randn(8, 3), requires_grad=False)
    assert list(quantised.layers(made, schemes.BY_NAME["int8-w8a8"])) == [(3, 8)]
    assert list(quantised.layers(made, SCHEME)) == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [("", None), ("rows", "M = 65: 1 of 195"), ("calls", "of 256 calls at M = 8")],
)
def test_one_bit_is_found(fault: str, said: str | None) -> None:
    found = quantised.layers(model(fault), SCHEME)
    assert list(found) == [(3, 8)]
    reasons = quantised.run(found, (17,), torch.device("cpu"))
    assert len(reasons) == (said is not None)
    assert all((said or "") in reason.found for reason in reasons)
