# SPDX-License-Identifier: Apache-2.0
"""Small-M GEMM: accuracy, invariance, repeatability, a control, refusals.

Without a GPU the kernel is interpreted: that checks indexing, masks and refusals. Bits
against DeepGEMM are compared on a device only (marker gpu).
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from sglang_exact_kernels import arch, tiles
from sglang_exact_kernels.reference import (
    small_m_gemm_exact,
    small_m_gemm_reference,
)
from sglang_exact_kernels.small_m_gemm import (
    MAX_M,
    small_m_gemm,
    unsupported_reasons,
)
from sglang_exact_kernels.tiles import Tile, small_m_tile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

TILES = (
    Tile(16, 64, 2, 3),
    Tile(32, 128, 4, 4),
    Tile(64, 64, 4, 4, swap_ab=True),
    Tile(32, 64, 4, 3, pdl=True),
)
SHAPES = ((96, 256), (104, 208), (16, 16), (72, 528))
SERVED = tuple(
    dict.fromkeys(
        tiles.SHAPES_27B
        + tiles.SHAPES_DRAFT
        + tiles.SHAPES_27B_TP2
        + tiles.SHAPES_DRAFT_TP2
    )
)
"""(N, K) of the 27B and its draft at one and at two ranks."""


def inputs(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(n * k + m)
    a = torch.randn(m, k, generator=gen).bfloat16()
    w = (torch.randn(n, k, generator=gen) * k**-0.5).bfloat16()
    return a.to(DEVICE), w.to(DEVICE)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.view(torch.int16), y.view(torch.int16))


def ulp_bf16(x: torch.Tensor) -> torch.Tensor:
    """Distance of neighbouring bf16 numbers at |x|, in fp64."""
    return torch.exp2(torch.floor(torch.log2(x.abs().clamp_min(2.0**-126))) - 7)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("tile", TILES)
def test_small_m_gemm_is_within_one_ulp_of_fp64(n: int, k: int, tile: Tile) -> None:
    a, w = inputs(17, n, k)
    exact = small_m_gemm_exact(a, w)
    # fp32 partial sums err by k * 2^-24 of the sum of magnitudes.
    slack = k * 2.0**-24 * (a.double().abs() @ w.double().abs().t())
    for got in (small_m_gemm(a, w, tile=tile), small_m_gemm_reference(a, w)):
        assert ((got.double() - exact).abs() <= ulp_bf16(exact) + slack).all()


@pytest.mark.parametrize("tile", TILES)
def test_small_m_gemm_batch_invariance_bs1_vs_bsN(tile: Tile) -> None:
    a, w = inputs(MAX_M, 104, 272)
    want = small_m_gemm(a, w, tile=tile)
    for m in (1, 2, 3, 8, 15, 16, 17, 33):
        assert same_bits(small_m_gemm(a[:m].contiguous(), w, tile=tile), want[:m])
    order = torch.tensor([5, 0, 63, 5, 17])
    assert same_bits(small_m_gemm(a[order].contiguous(), w, tile=tile), want[order])
    wild = a.clone()
    wild[1:] = float("nan")
    assert same_bits(small_m_gemm(wild[:16], w, tile=tile)[:1], want[:1])


def test_small_m_gemm_rows_of_w_do_not_meet() -> None:
    a, w = inputs(5, 104, 272)
    want = small_m_gemm(a, w)
    wild = w.clone()
    wild[40:] = float("nan")
    assert same_bits(small_m_gemm(a, wild)[:, :40], want[:, :40])


@pytest.mark.gpu
def test_small_m_gemm_tiles_agree() -> None:
    a, w = inputs(16, 1040, 1040)
    want = small_m_gemm(a, w, tile=TILES[0])
    assert all(same_bits(small_m_gemm(a, w, tile=t), want) for t in TILES)


def test_small_m_gemm_repeats_itself() -> None:
    a, w = inputs(9, 96, 256)
    want = small_m_gemm(a, w)
    assert all(same_bits(small_m_gemm(a, w), want) for _ in range(20))


def split_k_gemm(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The planted mistake: how often K is split depends on M."""
    parts = 4 if a.shape[0] == 1 else 1
    step = a.shape[1] // parts
    chunks = [slice(i * step, (i + 1) * step) for i in range(parts)]
    return sum(small_m_gemm_reference(a[:, c], w[:, c]) for c in chunks)


def test_negative_control_m_dependent_split_is_caught() -> None:
    a, w = inputs(16, 96, 256)
    assert not same_bits(split_k_gemm(a[:1], w), split_k_gemm(a, w)[:1])
    whole = small_m_gemm_reference(a, w)
    assert same_bits(small_m_gemm_reference(a[:1], w), whole[:1])


def test_comparison_tells_zeros_apart_and_equates_nans() -> None:
    zeros = torch.zeros(2).bfloat16()
    nans = torch.full((2,), float("nan")).bfloat16()
    assert not same_bits(zeros, -zeros)
    assert same_bits(nans, nans.clone())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda a, w: (a, w.t()), "pass W, not its transpose"),
        (lambda a, w: (a.float(), w), "torch.float32"),
        (lambda a, w: (a, w.float()), "torch.float32"),
        (lambda a, w: (a[:, :40], w[:, :40].contiguous()), "multiple of 16"),
        (lambda a, w: (a, w[:12]), "N = 12"),
        (lambda a, w: (a, w[:20]), "N = 20"),
        (lambda a, w: (a.repeat(5, 1), w), "M = 80"),
        (lambda a, w: (a[:0], w), "M = 0"),
        (lambda a, w: (a, w.t().contiguous().t()), "K contiguous"),
        (lambda a, w: (a[:, 4:84], w[:, 4:84]), "rows on 16 bytes"),
    ],
)
def test_small_m_gemm_refuses(change: object, word: str) -> None:
    a, w = change(*inputs(16, 96, 256))
    out = torch.full((a.shape[0], w.shape[0]), 7.0, device=DEVICE).bfloat16()
    before = out.clone()
    with pytest.raises(ValueError, match=word):
        small_m_gemm(a, w, out=out)
    assert same_bits(out, before)
    assert unsupported_reasons(a, w)


def test_small_m_gemm_refuses_a_wrong_out_and_names_every_reason() -> None:
    a, w = inputs(4, 96, 256)
    with pytest.raises(ValueError, match="found out"):
        small_m_gemm(a, w, out=torch.empty(4, 96, device=DEVICE))
    assert len(unsupported_reasons(a.float(), w.float()[:12])) == 3


def test_tiles_depend_on_shape_alone_and_fit() -> None:
    for capability, table in tiles._TABLES.items():
        listed = [tile for tile in table.values() if tile is not None]
        rows = [*listed, tiles._DEFAULT[capability], tiles._NARROW[capability]]
        for tile in rows:
            assert tile.source
            assert tile.smem_bytes <= tiles.SMEM_LIMIT[capability]
    for n, k in SERVED:
        assert isinstance(small_m_tile(n, k, DEVICE), Tile)
    with pytest.raises(ValueError, match="bfloat16"):
        small_m_tile(96, 256, DEVICE, torch.float16)


def test_shapes_of_two_ranks_are_halves_of_those_of_one() -> None:
    """Columns of what is split by columns, rows of what is summed over ranks."""
    for one, two in (
        (tiles.SHAPES_27B, tiles.SHAPES_27B_TP2),
        (tiles.SHAPES_DRAFT[:-1], tiles.SHAPES_DRAFT_TP2[:-1]),
    ):
        for (n, k), half in zip(one, two, strict=True):
            assert half in ((n // 2, k), (n, k // 2))
    assert tiles.SHAPES_DRAFT[-1] == tiles.SHAPES_DRAFT_TP2[-1]


def test_a_shape_that_lost_the_sweep_is_left_to_deep_gemm() -> None:
    assert tiles.prefers_deep_gemm(96, 5120, DEVICE)
    assert not tiles.prefers_deep_gemm(5120, 6144, DEVICE)
    assert not tiles.prefers_deep_gemm(7, 7, DEVICE)


@pytest.mark.skipif(not arch.is_interpreted(), reason="looks at interpreted loads")
def test_every_element_of_w_is_read_once_per_m_tile() -> None:
    """Unit rows of A pick out columns of W: C is W^T's rows, exactly."""
    n, k = 104, 272
    w = torch.arange(n * k).reshape(n, k).remainder(251).bfloat16()
    for start in range(0, k, 16):
        rows = torch.arange(start, min(start + 16, k))
        a = torch.zeros(len(rows), k).bfloat16()
        a[torch.arange(len(rows)), rows] = 1.0
        assert same_bits(small_m_gemm(a, w), w[:, rows].t().contiguous())


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), SERVED)
def test_small_m_gemm_has_the_bits_of_deep_gemm(n: int, k: int) -> None:
    deep_gemm = pytest.importorskip("deep_gemm")
    deep_gemm.use_deterministic_algorithms(True)
    gen = torch.Generator("cuda").manual_seed(n + k)
    a = torch.randn(64, k, device="cuda", generator=gen).bfloat16()
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16, generator=gen)
    want = torch.empty(64, n, device="cuda", dtype=torch.bfloat16)
    deep_gemm.bf16_gemm_nt(a, w, want)
    for m in (*range(1, 18), 24, 64):
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        deep_gemm.bf16_gemm_nt(a[:m].contiguous(), w, out)
        assert same_bits(out, want[:m])
        assert same_bits(small_m_gemm(a[:m].contiguous(), w), want[:m])


@triton.jit
def _two_halves_kernel(a, w, c, N: tl.constexpr, K: tl.constexpr):
    """The planted mistake on a device: two accumulators, joined at the end."""
    rm, rn, rk = tl.arange(0, 16), tl.arange(0, N), tl.arange(0, 16)
    low = tl.zeros((16, N), tl.float32)
    high = tl.zeros((16, N), tl.float32)
    for k in range(0, K // 2, 16):
        x = tl.load(a + rm[:, None] * K + rk[None, :] + k)
        y = tl.load(w + rn[None, :] * K + rk[:, None] + k)
        low = tl.dot(x, y, low)
        x = tl.load(a + rm[:, None] * K + rk[None, :] + k + K // 2)
        y = tl.load(w + rn[None, :] * K + rk[:, None] + k + K // 2)
        high = tl.dot(x, y, high)
    out = c + rm[:, None] * N + rn[None, :]
    tl.store(out, (low + high).to(tl.bfloat16))


@pytest.mark.gpu
def test_negative_control_other_reduction_order_is_caught() -> None:
    a, w = inputs(16, 64, 5120)
    c = torch.empty(16, 64, device=DEVICE, dtype=torch.bfloat16)
    _two_halves_kernel[(1,)](a, w, c, 64, 5120)
    assert not same_bits(c, small_m_gemm(a, w))
