# SPDX-License-Identifier: Apache-2.0
"""Start-up race stress: which shapes, and that a race becomes a reason."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sglang_exact.selftest import race as selftest_race  # noqa: E402


class FakeDeepGemm(types.ModuleType):
    """Torch under DeepGEMM's name; every `bad`-th call flips one bit."""

    def __init__(self, bad: int) -> None:
        super().__init__("deep_gemm")
        self.bad, self.count, self.deterministic = bad, 0, False

    def get_deterministic_algorithms(self) -> bool:
        return self.deterministic

    def use_deterministic_algorithms(self, value: bool) -> None:
        self.deterministic = value

    def bf16_gemm_nt(self, a: Any, w: Any, out: Any) -> None:
        if not self.deterministic:
            raise RuntimeError("found the mode that may use split-K")
        out.copy_(a.float() @ w.float().t())
        self.count += 1
        if self.bad and self.count % self.bad == 0:
            out.view(torch.int16)[-1, -1] ^= 1


def test_shapes_with_the_longest_k_are_picked() -> None:
    shapes = [(34816, 5120), (5120, 17408), (5120, 6144), (96, 5120), (5120, 17408)]
    assert selftest_race.pick(shapes) == [(5120, 17408), (5120, 6144)]


@pytest.mark.parametrize("bad", [0, 3])
def test_a_race_is_a_reason(monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    fake = FakeDeepGemm(bad)
    monkeypatch.setitem(sys.modules, "deep_gemm", fake)
    monkeypatch.setattr(selftest_race, "ROWS", (2, 5))
    found = selftest_race.run([(16, 32)], torch.device("cpu"), limit=0, calls=7)
    assert len(found) == (2 if bad else 0)
    assert fake.count == 14
    assert not fake.deterministic
    if bad:
        assert "2 of 7" in found[0].found
        assert "sglang_exact.host.headers" in found[0].fix
