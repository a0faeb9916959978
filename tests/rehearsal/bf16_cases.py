# SPDX-License-Identifier: Apache-2.0
"""Run interpreted bfloat16 kernels and compare with torch; prints {case: equal}.

A script of its own: Triton decides at import whether it interprets.
"""

from __future__ import annotations

import json

import torch
import triton
import triton.language as tl

exp_alias = tl.exp


@triton.jit
def _binary(x, y, out, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    if OP == "add":
        c = a + b
    elif OP == "sub":
        c = a - b
    elif OP == "mul":
        c = a * b
    elif OP == "neg":
        c = -a
    elif OP == "max":
        c = tl.maximum(a, b)
    elif OP == "less":
        c = tl.where(a < b, a, b)
    elif OP == "fma":
        c = tl.fma(a, b, a)
    else:
        c = a * 2.0 + 1.0
    tl.store(out + i, c)


@triton.jit
def _cast(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i))


@triton.jit
def _sum(x, out, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + tl.arange(0, M), tl.sum(tl.load(x + i), axis=1))


@triton.jit
def _maximum(x, out, N: tl.constexpr):
    tl.store(out, tl.max(tl.load(x + tl.arange(0, N)), axis=0))


@triton.jit
def _cumsum(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.cumsum(tl.load(x + i), axis=0))


@triton.jit
def _dot(x, y, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(x + m[:, None] * K + k[None, :])
    b = tl.load(y + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(a, b).to(tl.bfloat16))


@triton.jit
def _constant(out, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), tl.full([N], 0.3, tl.bfloat16))


@triton.jit
def _alias(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, exp_alias(tl.load(x + i).to(tl.float32)))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    view = torch.int16 if a.element_size() == 2 else torch.int32
    return torch.equal(a.view(view), b.view(view))


def _special(n: int) -> torch.Tensor:
    """float32 with ties, subnormals and infinities among random values."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, generator=generator) * 10.0 ** torch.randint(
        -30, 30, (n,), generator=generator
    )
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F80FFFF, 0x7F7FFFFF, 1, 0x8000])
    x[: len(bits)] = bits.int().view(torch.float32)
    x[6], x[7] = float("inf"), float("-inf")
    return x


def _results() -> dict[str, bool]:
    n = 256
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, generator=generator).bfloat16()
    y = torch.randn(n, generator=generator).bfloat16()
    fma = (x.double() * y.double() + x.double()).float().bfloat16()
    wanted = {
        "add": x + y,
        "sub": x - y,
        "mul": x * y,
        "neg": -x,
        "max": torch.maximum(x, y),
        "less": torch.where(x < y, x, y),
        "fma": fma,
    }
    results = {}
    for name, value in wanted.items():
        out = torch.empty_like(x)
        _binary[(1,)](x, y, out, OP=name, N=n)
        results[name] = _same(out, value)
    wide = _special(n)
    out = torch.empty(n, dtype=torch.bfloat16)
    _cast[(1,)](wide, out, N=n)
    results["to_bfloat16"] = _same(out, wide.bfloat16())
    back = torch.empty(n)
    _cast[(1,)](out, back, N=n)
    results["to_float32"] = _same(back, out.float())
    # Small integers: every order of summation gives the same exact value.
    whole = torch.randint(-8, 9, (4, 64), generator=generator).bfloat16()
    out = torch.empty(4, dtype=torch.bfloat16)
    _sum[(1,)](whole, out, M=4, N=64)
    results["sum"] = _same(out, whole.float().sum(1).bfloat16())
    out = torch.empty(1, dtype=torch.bfloat16)
    _maximum[(1,)](x, out, N=n)
    results["maximum"] = _same(out, x.max().view(1))
    out = torch.empty(64, dtype=torch.bfloat16)
    _cumsum[(1,)](whole[0], out, N=64)
    results["cumsum"] = _same(out, whole[0].float().cumsum(0).bfloat16())
    a = torch.randint(-4, 5, (16, 32), generator=generator).bfloat16()
    b = torch.randint(-4, 5, (32, 16), generator=generator).bfloat16()
    out = torch.empty(16, 16, dtype=torch.bfloat16)
    _dot[(1,)](a, b, out, M=16, N=16, K=32)
    results["dot"] = _same(out, (a.float() @ b.float()).bfloat16())
    return results


def _mended_only() -> dict[str, bool]:
    """Cases that raise without the mend."""
    out = torch.empty(8, dtype=torch.bfloat16)
    _constant[(1,)](out, N=8)
    results = {"constant": _same(out, torch.full((8,), 0.3).bfloat16())}
    x = torch.randn(8).bfloat16()
    out = torch.empty_like(x)
    _binary[(1,)](x, x, out, OP="scalar", N=8)
    results["scalar"] = _same(out, x * 2.0 + 1.0)
    wide = torch.empty(8)
    _alias[(1,)](x, wide, N=8)
    results["alias"] = torch.allclose(wide, x.float().exp(), rtol=1e-6)
    return results


if __name__ == "__main__":
    import os

    found = _results()
    if os.environ.get("SGLANG_EXACT_TEST_REHEARSAL") == "1":
        found |= _mended_only()
    print(json.dumps(found))  # noqa: T201
