# SPDX-License-Identifier: Apache-2.0
"""prefill_attention: accuracy, cuts and neighbours keep the bits, refusal."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from prefill_cases import MODEL_27B, SHARD_27B, SMALL, Heads, make_case

from sglang_exact_kernels import prefill_attention as module
from sglang_exact_kernels.invariance import (
    assert_row_subset_invariance,
    assert_same_bits,
    different_elements,
)
from sglang_exact_kernels.prefill_attention import (
    copies,
    dense_shape,
    prefill_attention,
)


@pytest.fixture
def exact_dot(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, dots in float64: BLAS sums a row by its place in the tile."""
    if device.type != "cpu":
        return
    import numpy as np
    from triton.runtime import interpreter

    from sglang_exact.rehearsal.interpreter import bf16_to_f32

    def wide(x: Any) -> Any:
        data = x.data if x.data.dtype != np.uint16 else bf16_to_f32(x.data)
        return data.astype(np.float64)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *more: Any) -> Any:
        out = np.matmul(wide(a), wide(b)) + d.data
        return interpreter.TensorHandle(out.astype(np.float32), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def small_tile(exact_dot: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles small enough that some forty tokens cross several of both kinds."""
    tile = module._Tile(block_m=16, block_n=16, num_warps=4, num_stages=2)
    monkeypatch.setattr(module, "_TILES", dict.fromkeys(module._TILES, tile))
    monkeypatch.setattr(module, "_DENSE_TILES", dict.fromkeys(module._TILES, tile))


@pytest.mark.usefixtures("small_tile")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prefill_attention_accuracy(device: torch.device, dtype: torch.dtype) -> None:
    case = make_case(SMALL, [45, 1, 16], device, seed=1, dtype=dtype)
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    values = case.v_buffer[~case.v_buffer.isnan()].abs().max().item()
    outs = case.step([(0, 0, 45), (1, 0, 1), (2, 0, 16)])
    for r, out in enumerate(outs):
        error = (out.double() - case.fp64(r)).abs()
        # P is rounded to the cache's dtype, then the output is.
        assert error.max().item() < unit * values
        assert error.mean().item() < unit * 0.25


def test_prefill_attention_accuracy_with_the_served_tile(device: torch.device) -> None:
    case = make_case(SMALL, [150], device, seed=2)
    error = (case.whole(0).double() - case.fp64(0)).abs()
    assert error.mean().item() < 2.0**-10


@pytest.mark.usefixtures("small_tile")
def test_every_cut_keeps_the_bits(device: torch.device) -> None:
    """A row meets a tile masked, whole, as prefix or as new: the same bits."""
    case = make_case(SMALL, [40], device, seed=3)
    want = case.whole(0)
    for cut in (1, 2, 5, 15, 16, 17, 31, 32, 33, 39):
        assert_same_bits(case.in_pieces(0, [cut]), want, f"cut at {cut}")
    assert_same_bits(case.in_pieces(0, list(range(1, 40))), want, "token by token")
    assert_same_bits(case.in_pieces(0, [7, 16, 23, 33]), want, "five steps")


@pytest.mark.usefixtures("small_tile")
def test_cuts_move_bits_when_tiles_start_at_the_cut(device: torch.device) -> None:
    """Control: keys in another order of tiles are another sum."""
    case = make_case(SMALL, [40], device, seed=3)
    rolled = case._replace(slots=[case.slots[0].roll(5)])
    last = case.whole(0)[-1:]
    assert different_elements(rolled.step([(0, 39, 40)])[0], last) > 0


@pytest.mark.usefixtures("small_tile")
def test_tiles_decide_bits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: BLOCK_N chosen by the step's length would be seen."""
    case = make_case(SMALL, [40], device, seed=3)
    want = case.whole(0)
    wide = module._Tile(block_m=16, block_n=32, num_warps=4, num_stages=2)
    monkeypatch.setattr(module, "_TILES", dict.fromkeys(module._TILES, wide))
    assert different_elements(case.in_pieces(0, [20]), want) > 0


@pytest.mark.usefixtures("small_tile")
def test_prefill_attention_row_subset_invariance(device: torch.device) -> None:
    lengths = [40, 6, 17, 64]
    case = make_case(SMALL, lengths, device, seed=4)

    def run(requests: Any) -> torch.Tensor:
        outs = case.step([(r, lengths[r] // 3, lengths[r]) for r in requests])
        return torch.stack([torch.cat([out[:2], out[-2:]]) for out in outs])

    assert_row_subset_invariance(run, 4, [[0], [3], [2, 0], [3, 1, 2, 0], [1, 3]])


@pytest.mark.usefixtures("small_tile")
def test_rows_do_not_depend_on_their_place_in_a_program(device: torch.device) -> None:
    case = make_case(SMALL, [50], device, seed=5)
    want = case.whole(0)
    for first in (1, 2, 5, 15, 16, 31):
        got = case.step([(0, first, 50)])[0]
        assert_same_bits(got, want[first:], f"from {first}")


@pytest.mark.usefixtures("small_tile")
def test_a_leak_from_a_later_token_is_seen(device: torch.device) -> None:
    """Control: the mask is real, an earlier row does not see a later key."""
    case = make_case(SMALL, [20], device, seed=6)
    want = case.whole(0)
    changed = case._replace(v_buffer=case.v_buffer.clone())
    changed.v_buffer[case.slots[0][12]] += 1
    got = changed.whole(0)
    assert_same_bits(got[:12], want[:12])
    assert different_elements(got[12:13], want[12:13]) > 0


@pytest.mark.usefixtures("small_tile")
@pytest.mark.parametrize("heads", [Heads(8, 8, 16), Heads(5, 1, 40), Heads(24, 4, 64)])
def test_other_head_shapes(device: torch.device, heads: Heads) -> None:
    case = make_case(heads, [35], device, seed=7)
    want = case.whole(0)
    assert (want.double() - case.fp64(0)).abs().mean().item() < 2.0**-10
    assert_same_bits(case.in_pieces(0, [13, 32]), want)


def test_prefill_attention_refuses(device: torch.device) -> None:
    case = make_case(SMALL, [10], device, seed=8)
    with pytest.raises(ValueError, match="quantised caches are not covered"):
        case._replace(k_buffer=case.k_buffer.float()).whole(0)
    with pytest.raises(ValueError, match="v_buffer slots, heads"):
        case._replace(v_buffer=case.v_buffer[:-1]).whole(0)
    q = case.q[0]
    starts = torch.tensor([0, 10], dtype=torch.int32, device=device)
    dense = q.new_empty(dense_shape(10, 1, SMALL.kv, SMALL.dim))
    given = {
        "qo_indptr": starts,
        "kv_indptr": torch.zeros_like(starts),
        "kv_indices": case.slots[0][:0],
        "out_cache_loc": case.slots[0],
        "max_extend_len": 10,
        "sm_scale": 1.0,
    }
    for change, text in (
        (
            {"max_extend_len": 11},
            "max_extend_len, .*: found 11, expected at least 1 and at most 10",
        ),
        ({"sm_scale": 0.0}, "expected a positive number"),
        ({"out_cache_loc": case.slots[0][:9]}, "slots: found 9, expected at least 10"),
        ({"qo_indptr": starts.long()}, "qo_indptr dtype"),
        ({"kv_indptr": starts[:1]}, "kv_indptr entries"),
        ({"dense": dense[:, :, 1:]}, "dense contiguous"),
        (
            {"dense": dense[:, :, 1:].contiguous()},
            "found 73, expected at least 74 and ",
        ),
        ({"dense": dense.float()}, "dense dtype"),
    ):
        with pytest.raises(ValueError, match=text):
            prefill_attention(
                q, case.k_buffer, case.v_buffer, torch.empty_like(q), **given | change
            )


@pytest.mark.usefixtures("small_tile")
@pytest.mark.parametrize("heads", [SMALL, Heads(8, 8, 16), Heads(24, 4, 64)])
def test_a_copy_of_the_keys_keeps_the_bits(device: torch.device, heads: Heads) -> None:
    """With and without a copy, in pieces, and in a batch; unused slots hold NaN."""
    lengths = [40, 6, 65]
    case = make_case(heads, lengths, device, seed=9)
    for r, length in enumerate(lengths):
        want = case.whole(r)
        assert_same_bits(case.whole(r, copied=True), want, "whole")
        cuts = [length // 3, length // 2]
        assert_same_bits(case.in_pieces(r, cuts, copied=True), want, "pieces")
    spans = [(r, length // 2, length) for r, length in enumerate(lengths)]
    copied, read = case.step(spans, copied=True), case.step(spans)
    for r in range(len(lengths)):
        assert_same_bits(copied[r], read[r], f"request {r} of three")


@pytest.mark.usefixtures("small_tile")
def test_a_copy_with_another_tile_is_seen(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the copy's tile must walk the keys as the other one does."""
    case = make_case(SMALL, [40], device, seed=9)
    wide = module._Tile(block_m=16, block_n=32, num_warps=4, num_stages=2)
    monkeypatch.setattr(module, "_DENSE_TILES", dict.fromkeys(module._TILES, wide))
    assert different_elements(case.whole(0, copied=True), case.whole(0)) > 0


def test_served_tiles_walk_the_same_keys() -> None:
    for capability, dense in module._DENSE_TILES.items():
        read = module._TILES[capability]
        assert dense[:3] == read[:3]
        assert module.PAD % dense.block_n == 0


def test_heads_without_a_copy(device: torch.device) -> None:
    assert not copies(device, 40, 40)
    assert not copies(device, 64, 128)
    case = make_case(Heads(5, 1, 40), [35], device, seed=7)
    with pytest.raises(ValueError, match="found head_dim 40 and 40"):
        case.whole(0, copied=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads",
    [
        *(MODEL_27B, SHARD_27B, Heads(32, 8, 128)),
        *(Heads(32, 8, 64), Heads(32, 8, 96), Heads(14, 2, 64)),
    ],
)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 700, 4100])
def test_cuts_keep_the_bits_on_the_device(
    device: torch.device, heads: Heads, length: int
) -> None:
    case = make_case(heads, [length, 130], device, seed=length)
    want = case.whole(0)
    generator = random.Random(length)
    for _ in range(6):
        count = min(length - 1, generator.randint(1, 5))
        cuts = sorted(generator.sample(range(1, length), count)) if count else []
        assert_same_bits(case.in_pieces(0, cuts), want, f"cuts {cuts}")
        if copies(device, heads.dim, heads.dim):
            copied = case.in_pieces(0, cuts, copied=True)
            assert_same_bits(copied, want, f"cuts {cuts}, copied")
    first = length // 2
    for copied in {False, copies(device, heads.dim, heads.dim)}:
        beside = case.step([(1, 64, 130), (0, first, length)], copied)[1]
        assert_same_bits(beside, want[first:], "beside a neighbour")


@pytest.mark.gpu
def test_prefill_attention_accuracy_27b(device: torch.device) -> None:
    case = make_case(MODEL_27B, [1500], device, seed=40)
    error = (case.whole(0).double() - case.fp64(0)).abs()
    assert error.mean().item() < 2.0**-10
