# SPDX-License-Identifier: Apache-2.0
"""gdn_verify: accuracy, bits of the decode kernel, invariance, repeat, refusal."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_exact_kernels.gdn_verify import gdn_verify
from sglang_exact_kernels.invariance import (
    assert_row_subset_invariance,
    assert_same_bits,
    different_elements,
)
from sglang_exact_kernels.reference import gdn_verify_fp64
from tools.kernels.gdn_cases import GdnCase, GdnShape, make_case

SMALL = GdnShape(bs=3, T=4, H=2, HV=4, K=32, V=32)
MODEL_27B = GdnShape(bs=8, T=8, H=16, HV=48, K=128, V=128)


def _next_float(x: float) -> float:
    return torch.nextafter(torch.tensor(x), torch.tensor(math.inf)).item()


def _fp64(case: GdnCase) -> tuple[torch.Tensor, torch.Tensor]:
    return gdn_verify_fp64(
        case.mixed_qkv,
        case.a,
        case.b,
        case.A_log,
        case.dt_bias,
        states=case.ssm_states[case.cache_indices.long()],
        num_draft_tokens=case.shape.T,
        num_k_heads=case.shape.H,
        scale=case.scale,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gdn_verify_accuracy(device: torch.device, dtype: torch.dtype) -> None:
    case = make_case(SMALL, device, seed=1, dtype=dtype)
    out, states = case.verify()
    want_out, want_states = _fp64(case)
    # fp32 arithmetic over T steps: 2**-24 per operation, a few hundred operations deep
    # at worst, on values of size about 1; then one rounding to the output dtype.
    scale = want_states.abs().max().item()
    assert (states.double() - want_states).abs().max().item() < 2.0**-19 * scale
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-19
    bound = unit * want_out.abs() + 2.0**-19 * scale
    assert bool(((out.double() - want_out).abs() <= bound).all())


@pytest.mark.host
@pytest.mark.parametrize("seed", range(4))
def test_gdn_verify_equals_decode_steps(device: torch.device, seed: int) -> None:
    case = make_case(SMALL, device, seed)
    for ours, theirs in zip(case.verify(), case.by_steps(), strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.host
def test_decode_step_comparison_can_fail(device: torch.device) -> None:
    case = make_case(SMALL, device, seed=0)
    out, _ = case.verify()
    nudged, _ = case.by_steps(scale=_next_float(case.scale))
    # bf16 hides most one-ulp nudges of an fp32 factor; some outputs must still move.
    wide = case._replace(mixed_qkv=case.mixed_qkv.float())
    assert different_elements(wide.verify()[0], wide.by_steps()[0]) == 0
    assert different_elements(
        wide.verify()[0], wide.by_steps(scale=_next_float(case.scale))[0]
    )
    assert out.shape == nudged.shape


def test_gdn_verify_row_subset_invariance(device: torch.device) -> None:
    case = make_case(SMALL, device, seed=3)
    subsets = [[0], [2], [2, 0], [1, 0, 2], [0, 1]]
    for part in (0, 1):
        assert_row_subset_invariance(
            lambda rows, part=part: case.rows(list(rows)).verify()[part],
            SMALL.bs,
            subsets,
        )


def test_row_subset_invariance_can_fail(device: torch.device) -> None:
    case = make_case(SMALL, device, seed=3)._replace(scale=0.25)

    def depends_on_bs(rows: list[int]) -> torch.Tensor:
        some = case.rows(list(rows))
        scale = 0.25 if len(rows) == SMALL.bs else _next_float(0.25)
        wide = some._replace(mixed_qkv=some.mixed_qkv.float())
        return wide.verify(scale=scale)[0]

    with pytest.raises(AssertionError, match="elements differ in bits"):
        assert_row_subset_invariance(depends_on_bs, SMALL.bs, [[1]])


def test_gdn_verify_block_is_prefix_invariant(device: torch.device) -> None:
    """Draft token t has the bits it has as the last token of a shorter block."""
    case = make_case(SMALL, device, seed=4)
    out, states = case.verify()
    T = SMALL.T
    for shorter in range(1, T):
        tokens = [T * r + t for r in range(SMALL.bs) for t in range(shorter)]
        cut = case._replace(
            shape=SMALL._replace(T=shorter),
            mixed_qkv=case.mixed_qkv[tokens],
            a=case.a[tokens],
            b=case.b[tokens],
        )
        cut_out, cut_states = cut.verify()
        assert_same_bits(cut_out, out[:, :shorter])
        assert_same_bits(cut_states, states[:, :shorter])


def test_gdn_verify_padding_rows(device: torch.device) -> None:
    case = make_case(SMALL, device, seed=5)
    out, states = case.verify()
    padded = case._replace(cache_indices=case.cache_indices.clone())
    padded.cache_indices[1] = -1
    pad_out, pad_states = padded.verify()
    assert different_elements(pad_out[1], torch.zeros_like(pad_out[1])) == 0
    assert bool(pad_states[1].isnan().all())
    for live in (0, 2):
        assert_same_bits(pad_out[live], out[live])
        assert_same_bits(pad_states[live], states[live])


def test_gdn_verify_reads_strided_rows_and_keeps_the_pool(device: torch.device) -> None:
    case = make_case(SMALL, device, seed=6)
    out, states = case.verify()
    before = case.ssm_states.clone()
    width = case.mixed_qkv.shape[1]
    wide = torch.full(
        (case.mixed_qkv.shape[0], width + 64), float("nan"), device=device
    ).to(case.mixed_qkv.dtype)
    wide[:, :width] = case.mixed_qkv
    strided = case._replace(mixed_qkv=wide[:, :width])
    strided_out, strided_states = strided.verify()
    assert_same_bits(strided_out, out)
    assert_same_bits(strided_states, states)
    assert_same_bits(case.ssm_states, before)


def test_gdn_verify_repeats(device: torch.device) -> None:
    case = make_case(SMALL, device, seed=7)
    first = case.verify()
    for _ in range(3):
        for x, y in zip(case.verify(), first, strict=True):
            assert_same_bits(x, y)


def test_gdn_verify_refuses_before_any_launch(device: torch.device) -> None:
    case = make_case(SMALL, device, seed=8)
    records, rows = case.records()
    with pytest.raises(ValueError) as refusal:
        case._replace(ssm_states=case.ssm_states.to(torch.bfloat16)).verify(
            records=records[:, :2], record_rows=rows
        )
    text = str(refusal.value)
    assert "ssm_states dtype: found torch.bfloat16" in text
    assert "records steps: found 2, expected at least 4" in text
    assert bool(records.isnan().all())
    with pytest.raises(ValueError, match="mixed_qkv shape"):
        case.verify(num_draft_tokens=2)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        shifted = torch.cat([case.mixed_qkv, case.mixed_qkv], dim=1)
        width = case.mixed_qkv.shape[1]
        case._replace(mixed_qkv=shifted[:, 1 : width + 1]).verify()
    with pytest.raises(ValueError, match="ssm_states: found base"):
        flat = torch.zeros(case.ssm_states.numel() + 1, device=device)
        case._replace(ssm_states=flat[1:].view_as(case.ssm_states)).verify()
    with pytest.raises(ValueError, match="mixed_qkv dtype: found torch.float64"):
        case._replace(mixed_qkv=case.mixed_qkv.double()).verify()


@pytest.mark.gpu
@pytest.mark.host
@pytest.mark.parametrize("seed", range(16))
def test_gdn_verify_equals_decode_steps_27b(device: torch.device, seed: int) -> None:
    """16 seeds x 8 requests x 48 heads: 6,144 random states, each over 8 steps."""
    case = make_case(MODEL_27B, device, seed=100 + seed)
    for ours, theirs in zip(case.verify(), case.by_steps(), strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 5, 16])
def test_gdn_verify_row_subset_invariance_27b(device: torch.device, T: int) -> None:
    case = make_case(MODEL_27B._replace(T=T), device, seed=200 + T)
    for part in (0, 1):
        assert_row_subset_invariance(
            lambda rows, part=part: case.rows(list(rows)).verify()[part],
            MODEL_27B.bs,
            [[5], [7, 0], [3, 2, 1, 0]],
        )


@pytest.mark.gpu
def test_gdn_verify_under_a_cuda_graph(device: torch.device) -> None:
    case = make_case(MODEL_27B._replace(bs=2), device, seed=300)
    records, rows = case.records()
    out, want_states = case.verify(records=records)
    want_out = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gdn_verify(
            *(case.mixed_qkv, case.a, case.b, case.A_log, case.dt_bias),
            ssm_states=case.ssm_states,
            cache_indices=case.cache_indices,
            records=records,
            record_rows=rows,
            num_draft_tokens=case.shape.T,
            num_k_heads=case.shape.H,
            scale=case.scale,
        )
    for _ in range(3):
        captured.zero_()
        records.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(captured.view_as(want_out), want_out)
        assert_same_bits(case.committed(records, rows), want_states)
