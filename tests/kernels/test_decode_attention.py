# SPDX-License-Identifier: Apache-2.0
"""decode_attention: accuracy, verify rows equal decode rows, invariance, refusal."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from sglang_exact_kernels import arch
from sglang_exact_kernels import decode_attention as module
from sglang_exact_kernels.decode_attention import (
    decode_attention,
    max_splits,
    scratch_shapes,
)
from sglang_exact_kernels.invariance import (
    assert_row_subset_invariance,
    assert_same_bits,
    bits,
    different_elements,
)
from sglang_exact_kernels.reference import attention_fp64


class Heads(NamedTuple):
    q: int
    kv: int
    dim: int


SMALL = Heads(q=6, kv=2, dim=32)
MODEL_27B = Heads(q=24, kv=4, dim=256)


class Case(NamedTuple):
    """Requests with prefixes and a block of T draft tokens each."""

    heads: Heads
    T: int
    q: torch.Tensor
    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    prefixes: list[torch.Tensor]
    blocks: list[torch.Tensor]

    def row_slots(self, r: int, i: int) -> torch.Tensor:
        return torch.cat([self.prefixes[r], self.blocks[r][: i + 1]])

    def longest(self) -> int:
        return max(len(p) for p in self.prefixes) + self.T

    def _run(self, q: torch.Tensor, slots: list[torch.Tensor], **options: Any) -> Any:
        device = q.device
        lengths = torch.tensor([0, *(len(s) for s in slots)], device=device)
        context = options.pop("max_context_len", self.longest())
        acc, stat = scratch_shapes(len(q), self.heads.q, self.heads.dim, context)
        out = torch.full_like(q, float("nan"))
        decode_attention(
            q,
            self.k_buffer,
            self.v_buffer,
            out,
            kv_indptr=lengths.cumsum(0).to(torch.int32),
            kv_indices=torch.cat(slots),
            part_acc=torch.full(acc, float("nan"), device=device),
            part_stat=torch.full(stat, float("nan"), device=device),
            sm_scale=self.heads.dim**-0.5,
            max_context_len=context,
            **options,
        )
        return out

    def verify(self, requests: list[int] | None = None, **options: Any) -> torch.Tensor:
        """[requests, T, heads, dim] as one verify launch."""
        chosen = list(range(len(self.prefixes))) if requests is None else requests
        q = self.q[chosen].flatten(0, 1).contiguous()
        out = self._run(
            q,
            [self.prefixes[r] for r in chosen],
            num_draft_tokens=self.T,
            out_cache_loc=torch.cat([self.blocks[r] for r in chosen]),
            **options,
        )
        return out.view(len(chosen), self.T, *out.shape[1:])

    def decode(self, rows: list[tuple[int, int]], **options: Any) -> torch.Tensor:
        """[rows, heads, dim]; each (request, position) as a decode row of its own."""
        q = torch.stack([self.q[r, i] for r, i in rows])
        return self._run(q, [self.row_slots(r, i) for r, i in rows], **options)

    def fp64(self) -> torch.Tensor:
        rows = [(r, i) for r in range(len(self.prefixes)) for i in range(self.T)]
        out = attention_fp64(
            self.q.flatten(0, 1),
            self.k_buffer,
            self.v_buffer,
            [self.row_slots(r, i) for r, i in rows],
            self.heads.dim**-0.5,
        )
        return out.view(len(self.prefixes), self.T, *out.shape[1:])


def make_case(
    heads: Heads,
    lengths: list[int],
    T: int,
    device: torch.device,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Random case; slots are scattered and every unused slot holds NaN."""
    g = torch.Generator().manual_seed(seed)
    used = sum(lengths) + T * len(lengths)
    slots = torch.randperm(used + 7, generator=g)[:used]
    kv = torch.full((2, used + 7, heads.kv, heads.dim), float("nan"))
    kv[:, slots] = torch.randn(2, used, heads.kv, heads.dim, generator=g)
    q = torch.randn(len(lengths), T, heads.q, heads.dim, generator=g) * 2
    sizes = [n for length in lengths for n in (length, T)]
    parts = slots.to(device).split(sizes)
    return Case(
        heads,
        T,
        q.to(device, dtype),
        kv[0].to(device, dtype),
        kv[1].to(device, dtype),
        list(parts[0::2]),
        list(parts[1::2]),
    )


@pytest.fixture
def short_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiers small enough that a few hundred keys cross every edge."""
    monkeypatch.setattr(module, "_TIERS", module.Tiers(128, 64, 384, 128, 256))


def _split_edges() -> list[int]:
    """Lengths at which a new split begins, from the host's formula."""
    counts = [max_splits(n) for n in range(1, 300_000, 1)]
    return [n + 1 for n in range(1, len(counts)) if counts[n] != counts[n - 1]]


def test_split_edges_are_fixed_absolute_positions() -> None:
    edges = _split_edges()
    assert edges[:3] == [257, 513, 1025]
    assert all((e - 1) % 256 == 0 for e in edges)
    assert max_splits(262_144) == 141
    widths = {b - a for a, b in zip(edges, edges[1:], strict=False)}
    assert widths == {256, 512, 2048}


@pytest.mark.usefixtures("short_tiers")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_attention_accuracy(device: torch.device, dtype: torch.dtype) -> None:
    case = make_case(SMALL, [0, 63, 130, 700], 3, device, seed=1, dtype=dtype)
    out = case.verify().double()
    want = case.fp64()
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    # p is rounded to the cache's dtype: an error of unit relative to sum(p * |v|),
    # then one rounding of the output.
    values = case.v_buffer[~case.v_buffer.isnan()].abs().max().item()
    assert (out - want).abs().max().item() < unit * values
    assert (out - want).abs().mean().item() < unit * 0.25


def _host_decode(case: Case, rows: list[tuple[int, int]]) -> torch.Tensor:
    """The host's deterministic decode kernel on the same rows."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    q = torch.stack([case.q[r, i] for r, i in rows])
    slots = [case.row_slots(r, i) for r, i in rows]
    lengths = torch.tensor([0, *(len(s) for s in slots)], device=q.device)
    splits = -(-case.longest() // 256)
    out = torch.empty_like(q)
    decode_attention_fwd(
        q,
        case.k_buffer,
        case.v_buffer,
        out,
        lengths.cumsum(0).to(torch.int32),
        torch.cat(slots),
        torch.empty(len(q), case.heads.q, splits, case.heads.dim, device=q.device),
        torch.empty(len(q), case.heads.q, splits, device=q.device),
        ((lengths[1:] + 255) // 256).to(torch.int32),
        splits,
        case.heads.dim**-0.5,
        1.0,
        1.0,
    )
    return out


def _mean_errors(case: Case) -> tuple[float, float]:
    """Mean absolute error of our verify rows and of the host's decode rows."""
    want = case.fp64().flatten(0, 1)
    rows = [(r, i) for r in range(len(case.prefixes)) for i in range(case.T)]
    ours = (case.verify().flatten(0, 1).double() - want).abs().mean().item()
    theirs = (_host_decode(case, rows).double() - want).abs().mean().item()
    return ours, theirs


@pytest.mark.host
def test_decode_attention_errs_no_more_than_the_host(device: torch.device) -> None:
    ours, theirs = _mean_errors(make_case(SMALL, [3, 270, 520], 2, device, seed=12))
    assert ours <= 1.05 * theirs


@pytest.mark.usefixtures("short_tiers")
@pytest.mark.parametrize("T", [1, 2, 8, 16])
def test_verify_rows_equal_decode_rows(device: torch.device, T: int) -> None:
    """Prefixes end just before, on and after tile and split edges."""
    case = make_case(SMALL, [0, 1, 60, 64, 121, 380], T, device, seed=T)
    out = case.verify()
    rows = [(r, i) for r in range(len(case.prefixes)) for i in range(T)]
    alone = case.decode(rows)
    assert_same_bits(out.flatten(0, 1), alone)


@pytest.mark.usefixtures("short_tiers")
def test_verify_comparison_can_fail(device: torch.device) -> None:
    """Row (r, 1) is not the decode row of (r, 0): a mask off by one is seen."""
    case = make_case(SMALL, [40, 100], 2, device, seed=5)
    out = case.verify()
    wrong = case._replace(q=case.q.flip(1)).decode([(0, 0), (1, 0)])
    assert different_elements(out[:, 1], wrong) > 0


@pytest.mark.usefixtures("short_tiers")
@pytest.mark.parametrize("lengths", [[0, 63, 130, 700], [1300, 5, 390, 390, 900]])
def test_number_of_programs_does_not_change_bits(
    device: torch.device, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every piece is computed once, whoever it is dealt to: what is left out is NaN.
    case = make_case(SMALL, lengths, 2, device, seed=11)
    found = []
    for count in (1, 2, 5, 13, 64):
        monkeypatch.setattr(arch, "multiprocessors", lambda _, n=count: n)
        found.append(case.verify())
    assert not found[0].isnan().any()
    assert all(different_elements(found[0], other) == 0 for other in found[1:])


@pytest.mark.usefixtures("short_tiers")
def test_decode_attention_row_subset_invariance(device: torch.device) -> None:
    case = make_case(SMALL, [5, 200, 64, 450], 4, device, seed=6)
    assert_row_subset_invariance(
        lambda rows: case.verify(list(rows)), 4, [[0], [3], [2, 0], [3, 1, 2, 0]]
    )


@pytest.mark.usefixtures("short_tiers")
def test_row_subset_invariance_can_fail(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splits that depend on the longest context in the batch change bits."""
    case = make_case(SMALL, [150, 450], 1, device, seed=7)

    def cut_by_batch(rows: Any) -> torch.Tensor:
        keys = 64 if len(list(rows)) == 2 else 128
        tiers = module._TIERS._replace(end_0=128, keys_0=keys)
        monkeypatch.setattr(module, "_TIERS", tiers)
        return case.verify(list(rows))

    with pytest.raises(AssertionError, match="elements differ in bits"):
        assert_row_subset_invariance(cut_by_batch, 2, [[0]])


@pytest.mark.usefixtures("short_tiers")
def test_context_bound_does_not_change_bits(device: torch.device) -> None:
    case = make_case(SMALL, [33, 300], 2, device, seed=8)
    assert_same_bits(case.verify(), case.verify(max_context_len=5000))


@pytest.mark.usefixtures("short_tiers")
def test_padding_requests_are_harmless(device: torch.device) -> None:
    case = make_case(SMALL, [70, 0, 1], 2, device, seed=9)
    out = case.verify()
    assert_same_bits(case.verify([0])[0], out[0])
    assert not bool(out.isnan().any())
    empty = case._run(
        case.q[:, 0].contiguous(), [case.prefixes[0], *case.prefixes[1:2] * 2]
    )
    assert_same_bits(empty[1:], torch.zeros_like(empty[1:]))


@pytest.mark.usefixtures("short_tiers")
def test_slots_may_come_as_an_unaligned_slice(device: torch.device) -> None:
    case = make_case(SMALL, [70, 33], 2, device, seed=13)
    block = case.blocks[0]
    shifted = torch.cat([block[:1], block])[1:]
    assert shifted.data_ptr() % 16
    outs = [
        case._run(
            case.q[0].contiguous(),
            case.prefixes[:1],
            num_draft_tokens=2,
            out_cache_loc=loc,
        )
        for loc in (block.clone(), shifted)
    ]
    assert_same_bits(outs[0], outs[1])


def test_no_key_past_the_block_is_loaded(device: torch.device) -> None:
    """A slot of NaN right behind the last draft's; as that draft's own it shows."""
    case = make_case(SMALL, [5, 70], 3, device, seed=9)
    poison = case.v_buffer[:, 0, 0].isnan().nonzero()[0]
    slots = torch.cat([*case.blocks, poison])

    def verify(slots: torch.Tensor) -> torch.Tensor:
        q = case.q.flatten(0, 1).contiguous()
        more = {"num_draft_tokens": case.T, "out_cache_loc": slots}
        return case._run(q, case.prefixes, **more).view(case.q.shape)

    assert_same_bits(verify(slots), case.verify())
    slots[-2] = poison[0]
    assert verify(slots)[1].isnan().any()


@pytest.mark.usefixtures("short_tiers")
def test_decode_attention_repeats(device: torch.device) -> None:
    case = make_case(SMALL, [129, 400], 3, device, seed=10)
    first = case.verify()
    for _ in range(3):
        assert_same_bits(case.verify(), first)


def test_decode_attention_refuses(device: torch.device) -> None:
    case = make_case(SMALL, [10], 2, device, seed=11)
    with pytest.raises(ValueError, match="out_cache_loc .decode.: found 2"):
        case._run(case.q.flatten(0, 1).contiguous(), case.prefixes, num_draft_tokens=2)
    with pytest.raises(ValueError, match="quantised caches are not covered"):
        case._replace(k_buffer=case.k_buffer.float()).verify()
    with pytest.raises(ValueError, match="q rows: found 2, expected 3"):
        case._run(
            case.q.flatten(0, 1).contiguous(),
            case.prefixes,
            num_draft_tokens=3,
            out_cache_loc=torch.cat(case.blocks * 2),
        )
    small = case._replace(q=case.q.flatten(0, 1)[:1])
    with pytest.raises(ValueError, match="size it with scratch_shapes"):
        q = small.q.contiguous()
        acc, stat = scratch_shapes(1, SMALL.q, SMALL.dim, 12)
        decode_attention(
            q,
            case.k_buffer,
            case.v_buffer,
            torch.empty_like(q),
            kv_indptr=torch.tensor([0, 10], dtype=torch.int32, device=device),
            kv_indices=case.prefixes[0],
            part_acc=torch.empty(acc, device=device),
            part_stat=torch.empty(stat, device=device),
            sm_scale=1.0,
            max_context_len=4096,
        )
    assert bits(case.q).dtype == torch.int16


@pytest.mark.gpu
@pytest.mark.parametrize("T", [2, 8, 16])
@pytest.mark.parametrize(
    "lengths",
    [
        [0, 1, 50, 56, 63, 64, 65, 248],
        [249, 255, 256, 257, 505, 512, 1016, 4090],
        [8185, 8192, 8200, 10_239],
        [32_760, 40_000],
    ],
)
def test_verify_rows_equal_decode_rows_27b(
    device: torch.device, T: int, lengths: list[int]
) -> None:
    case = make_case(MODEL_27B, lengths, T, device, seed=20 + T)
    out = case.verify()
    for i in range(T):
        alone = case.decode([(r, i) for r in range(len(lengths))])
        assert_same_bits(out[:, i], alone, f"position {i}")
    for r in (0, len(lengths) - 1):
        assert_same_bits(case.verify([r])[0], out[r], f"request {r} alone")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads",
    [
        *(Heads(32, 8, 128), Heads(16, 16, 64), Heads(16, 2, 80), Heads(64, 4, 128)),
        *(Heads(32, 8, 64), Heads(32, 8, 96), Heads(14, 2, 64), Heads(64, 1, 128)),
    ],
)
def test_verify_rows_equal_decode_rows_other_shapes(
    device: torch.device, heads: Heads
) -> None:
    case = make_case(heads, [3, 250, 1021], 8, device, seed=30)
    out = case.verify()
    rows = [(r, i) for r in range(3) for i in range(8)]
    assert_same_bits(out.flatten(0, 1), case.decode(rows))


@pytest.mark.gpu
def test_decode_attention_accuracy_27b(device: torch.device) -> None:
    case = make_case(MODEL_27B, [1, 777, 9001], 8, device, seed=40)
    error = (case.verify().double() - case.fp64()).abs()
    assert error.mean().item() < 2.0**-10
    assert error.max().item() < 2.0**-7 * 4


@pytest.mark.gpu
@pytest.mark.host
def test_decode_attention_errs_no_more_than_the_host_27b(device: torch.device) -> None:
    ours, theirs = _mean_errors(make_case(MODEL_27B, [5, 999, 12_345], 4, device, 41))
    assert ours <= 1.05 * theirs


@pytest.mark.gpu
def test_decode_attention_under_a_cuda_graph(device: torch.device) -> None:
    case = make_case(MODEL_27B, [500, 3000], 8, device, seed=50)
    want = case.verify()
    heads = case.heads
    acc, stat = scratch_shapes(16, heads.q, heads.dim, case.longest())
    q = case.q.flatten(0, 1).contiguous()
    lengths = torch.tensor([0, 500, 3000], device=device).cumsum(0).to(torch.int32)
    arguments = {
        "kv_indptr": lengths,
        "kv_indices": torch.cat(case.prefixes),
        "part_acc": torch.empty(acc, device=device),
        "part_stat": torch.empty(stat, device=device),
        "sm_scale": heads.dim**-0.5,
        "max_context_len": case.longest(),
        "num_draft_tokens": 8,
        "out_cache_loc": torch.cat(case.blocks),
    }
    out = torch.empty_like(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_attention(q, case.k_buffer, case.v_buffer, out, **arguments)
    for _ in range(3):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(out.view_as(want), want)
