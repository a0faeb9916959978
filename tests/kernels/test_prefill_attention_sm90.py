# SPDX-License-Identifier: Apache-2.0
"""sm90's own kernel on a copy of the keys: chosen by rule, the bits of the others."""

from __future__ import annotations

import pytest
import torch
from prefill_cases import MODEL_27B, SHARD_27B, Case, Heads, make_case

from sglang_exact_kernels import arch
from sglang_exact_kernels import prefill_attention as module
from sglang_exact_kernels.invariance import assert_same_bits
from sglang_exact_kernels.prefill_attention import dense_shape, prefill_attention
from sglang_exact_kernels.race_stress import race_stress


def _served_on_sm90(device: torch.device) -> None:
    query = torch.empty(0, dtype=torch.bfloat16, device=device)
    if not module._specialises(query, MODEL_27B.dim):
        pytest.skip("needs sm90")


def test_the_kernel_of_sm90_is_chosen_by_gpu_dtype_and_head_dim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bf16, fp16 = (torch.empty(0, dtype=t) for t in (torch.bfloat16, torch.float16))
    for capability, want in ((90, True), (120, False), (arch.INTERPRETED, False)):
        monkeypatch.setattr(arch, "capability", lambda device, c=capability: c)
        assert module._specialises(bf16, 256) is want
        assert not module._specialises(bf16, 128)
        assert not module._specialises(fp16, 256)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [MODEL_27B, SHARD_27B])
def test_the_kernel_of_sm90_keeps_the_bits_in_a_batch(
    device: torch.device, heads: Heads
) -> None:
    """Requests below one tile, at its edges and beyond, one of them without rows."""
    _served_on_sm90(device)
    lengths = [1, 2, 63, 64, 65, 127, 128, 129, 700, 2049]
    case = make_case(heads, lengths, device, seed=41)
    for part in (0, 1, 2):
        spans = [(r, n * part // 3, n) for r, n in enumerate(lengths)]
        spans[3] = (3, 64, 64)
        read, copied = case.step(spans), case.step(spans, copied=True)
        for (r, first, _), a, b in zip(spans, copied, read, strict=True):
            assert_same_bits(a, b, f"request {r} from {first}")


@pytest.mark.gpu
def test_the_kernel_of_sm90_takes_strides(device: torch.device) -> None:
    """q and out are slices of wider rows, the cache's slots lie far apart."""
    _served_on_sm90(device)
    case = make_case(MODEL_27B, [700], device, seed=42)
    heads, wide = case.heads, 3 * case.heads.q
    q = torch.zeros(700, wide, heads.dim, dtype=torch.bfloat16, device=device)
    q[:, 5 : 5 + heads.q] = case.q[0]
    kv = torch.zeros(2, len(case.k_buffer), 16, heads.dim, device=device).bfloat16()
    kv[0, :, 3:7], kv[1, :, 3:7] = case.k_buffer, case.v_buffer
    out = torch.full_like(q, float("nan"))
    starts = torch.tensor([0, 700], dtype=torch.int32, device=device)
    shape = dense_shape(700, 1, heads.kv, heads.dim)
    prefill_attention(
        q[:, 5 : 5 + heads.q],
        kv[0, :, 3:7],
        kv[1, :, 3:7],
        out[:, 7 : 7 + heads.q],
        qo_indptr=starts,
        kv_indptr=torch.zeros_like(starts),
        kv_indices=case.slots[0][:0],
        out_cache_loc=case.slots[0],
        max_extend_len=700,
        sm_scale=heads.dim**-0.5,
        dense=torch.full(shape, float("nan"), device=device).bfloat16(),
    )
    assert_same_bits(out[:, 7 : 7 + heads.q].contiguous(), case.whole(0))
    assert bool(out[:, :7].isnan().all() and out[:, 7 + heads.q :].isnan().all())


@pytest.mark.gpu
def test_the_kernel_of_sm90_after_a_long_prefix(device: torch.device) -> None:
    """262,144 keys of 4 heads of 256: element numbers of the copy beyond 2**28."""
    _served_on_sm90(device)
    keys, heads = 262_144, MODEL_27B
    g = torch.Generator(device=device).manual_seed(43)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=g, device=device, dtype=torch.bfloat16)

    k, v = (normal(keys, heads.kv, heads.dim) for _ in range(2))
    # One query for all tokens: q of all of them would be 3 GiB.
    q = normal(1, heads.q, heads.dim).expand(keys, -1, -1)
    slots = torch.randperm(keys, generator=g, device=device)
    case = Case(heads, [q], k, v, [slots])
    want = case.step([(0, keys - 130, keys)])[0]
    got = case.step([(0, keys - 130, keys)], copied=True)[0]
    assert_same_bits(got, want, "one step")
    last = case.step([(0, keys - 57, keys)], copied=True)[0]
    assert_same_bits(last, want[-57:], "cut")


@pytest.mark.gpu
def test_the_kernel_of_sm90_has_no_race(device: torch.device) -> None:
    """Back to back without a synchronisation; test_race_stress shows it can fail."""
    _served_on_sm90(device)
    case, span = make_case(MODEL_27B, [900], device, seed=44), (0, 200, 900)
    want = case.step([span])[0]
    q, slots = case.q[0][200:], case.slots[0]
    starts = torch.tensor([[0, 700], [0, 200]], dtype=torch.int32, device=device)
    dense = q.new_empty(dense_shape(900, 1, MODEL_27B.kv, MODEL_27B.dim))

    def call(out: torch.Tensor) -> None:
        prefill_attention(
            q,
            case.k_buffer,
            case.v_buffer,
            out,
            qo_indptr=starts[0],
            kv_indptr=starts[1],
            kv_indices=slots[:200],
            out_cache_loc=slots[200:],
            max_extend_len=700,
            sm_scale=MODEL_27B.dim**-0.5,
            dense=dense,
        )

    found = race_stress(call, tuple(want.shape), want.dtype, device)
    assert found.differing_calls == 0, found
    out = torch.empty_like(want)
    call(out)
    assert_same_bits(out, want)
