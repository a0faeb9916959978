# SPDX-License-Identifier: Apache-2.0
"""The race stress finds what it must find, and nothing in a kernel that is sound."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from sglang_exact_kernels.race_stress import race_stress
from sglang_exact_kernels.small_m_gemm import small_m_gemm

SHAPE = (4, 32)


def inputs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    a = torch.randn(4, 64, generator=gen).bfloat16()
    w = torch.randn(32, 64, generator=gen).bfloat16()
    return a.to(device), w.to(device)


class Planted:
    """Right, except for one thing done to the output of one call."""

    def __init__(self, device: torch.device, bad_call: int, what: str) -> None:
        a, w = inputs(device)
        self.right = (a.float() @ w.float().t()).bfloat16()
        self.calls, self.bad_call, self.what = 0, bad_call, what

    def __call__(self, out: torch.Tensor) -> None:
        bad = self.calls == self.bad_call
        self.calls += 1
        if bad and self.what == "unwritten row":
            out[:3] = self.right[:3]
            return
        out.copy_(self.right)
        if bad and self.what == "flipped bit":
            out.view(torch.int16)[2, 7] ^= 1
        if bad and self.what == "signed zero":
            out[0, 0] = -0.0


@pytest.mark.parametrize("memory", [1 << 20, 8 * 4 * 32 * 2])
def test_a_sound_call_passes(device: torch.device, memory: int) -> None:
    call = Planted(device, -1, "")
    result = race_stress(call, SHAPE, torch.bfloat16, device, calls=40, memory=memory)
    assert result == (40, 0, 0, None)
    assert call.calls == 40


@pytest.mark.parametrize("memory", [1 << 20, 8 * 4 * 32 * 2])
@pytest.mark.parametrize("bad_call", [1, 6, 7, 8, 39])
@pytest.mark.parametrize("what", ["flipped bit", "unwritten row"])
def test_one_bad_call_is_found(
    device: torch.device, memory: int, bad_call: int, what: str
) -> None:
    call = Planted(device, bad_call, what)
    result = race_stress(call, SHAPE, torch.bfloat16, device, calls=40, memory=memory)
    assert result.differing_calls == 1
    assert result.first == bad_call
    assert result.elements == (1 if what == "flipped bit" else 32)


def test_a_bad_first_call_is_found(device: torch.device) -> None:
    call = Planted(device, 0, "flipped bit")
    result = race_stress(call, SHAPE, torch.bfloat16, device, calls=10)
    assert result.differing_calls == 9
    assert result.first == 1


def test_zeros_of_other_sign_are_found(device: torch.device) -> None:
    call = Planted(device, 3, "signed zero")
    call.right[0, 0] = 0.0
    result = race_stress(call, SHAPE, torch.bfloat16, device, calls=10)
    assert result.first == 3


def test_equal_nans_pass(device: torch.device) -> None:
    call = Planted(device, -1, "")
    call.right[1] = float("nan")
    assert race_stress(call, SHAPE, torch.bfloat16, device, calls=10).first is None


def test_small_m_gemm_passes(device: torch.device) -> None:
    a, w = inputs(device)
    calls = 2048 if device.type == "cuda" else 8
    result = race_stress(
        lambda out: small_m_gemm(a, w, out=out),
        SHAPE,
        torch.bfloat16,
        device,
        calls=calls,
    )
    assert result == (calls, 0, 0, None)


@pytest.mark.parametrize(("calls", "memory"), [(1, 1 << 20), (10, 4 * 32 * 2)])
def test_refusals(device: torch.device, calls: int, memory: int) -> None:
    call = Planted(device, -1, "")
    with pytest.raises(ValueError, match="expected"):
        race_stress(call, SHAPE, torch.bfloat16, device, calls=calls, memory=memory)
    assert call.calls == 0


@triton.jit
def _racing_sum_kernel(x, out, N: tl.constexpr, BLOCK: tl.constexpr):
    """The planted race: blocks add floats into one row in the order they arrive."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    tl.atomic_add(out + at, tl.load(x + row * N + at))


@pytest.mark.gpu
def test_negative_control_a_racing_kernel_is_found(device: torch.device) -> None:
    gen = torch.Generator(device).manual_seed(0)
    x = torch.randn(4096, 128, device=device, generator=gen)
    x *= torch.exp(4 * torch.randn(4096, 1, device=device, generator=gen))

    def call(out: torch.Tensor) -> None:
        out.zero_()
        _racing_sum_kernel[(4096,)](x, out, 128, 128)

    result = race_stress(call, (128,), torch.float32, device, calls=1024)
    assert result.differing_calls > 0


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(5120, 6144), (5120, 17408), (34816, 5120)])
@pytest.mark.parametrize("m", [1, 8, 16, 908])
def test_linear_layers_do_not_race(
    device: torch.device, m: int, n: int, k: int
) -> None:
    deep_gemm = pytest.importorskip("deep_gemm")
    deep_gemm.use_deterministic_algorithms(True)
    gen = torch.Generator(device).manual_seed(m)
    a = torch.randn(m, k, device=device, generator=gen).bfloat16()
    w = torch.randn(n, k, device=device, generator=gen).bfloat16()
    runs = [lambda out: deep_gemm.bf16_gemm_nt(a, w, out)]
    if m <= 16:
        runs.append(lambda out: small_m_gemm(a, w, out=out))
    for call in runs:
        result = race_stress(call, (m, n), torch.bfloat16, device, calls=1024)
        assert result == (1024, 0, 0, None)
