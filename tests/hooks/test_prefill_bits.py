# SPDX-License-Identifier: Apache-2.0
"""The host's GDN prefill kernels: which cuts and which tiles keep the bits.

In the interpreter this proves the order of operations; the gpu variants prove bits at
the shapes of the 27B model.
"""

from __future__ import annotations

import ast
import contextlib
import random
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sglang_exact.hooks import autotune  # noqa: E402
from sglang_exact.host import source as host  # noqa: E402
from sglang_exact.scope_families import FAMILIES  # noqa: E402

GRID = FAMILIES[0].grid

pytestmark = pytest.mark.host


class Shape(NamedTuple):
    """tokens, k heads, v heads, head_dim (k and v alike) on a device."""

    device: str
    tokens: int
    heads: int
    v_heads: int
    head_dim: int


SHAPES = [
    pytest.param(Shape("cpu", 150, 1, 2, 64), id="interpreted"),
    pytest.param(Shape("cuda", 1000, 16, 48, 128), id="27b", marks=pytest.mark.gpu),
]


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shape:
    found: Shape = request.param
    if found.device == "cpu":
        if torch.cuda.is_available():
            pytest.skip("Triton compiles here; the gpu variant runs")
        import triton

        from sglang_exact.rehearsal.interpreter import mend

        mend(triton)
        null = contextlib.nullcontext
        monkeypatch.setattr(torch.cpu, "device", lambda i=None: null(), raising=False)
    return found


@pytest.fixture
def kernel() -> Any:
    """The host's autotuned kernel; its configurations are restored."""
    from sglang.kernels.ops.attention.fla import chunk_fwd

    found = chunk_fwd.chunk_gated_delta_rule_fwd_kkt_solve_kernel
    tuner = autotune._autotuner(found)
    before = list(tuner.configs)
    yield found
    tuner.configs = before
    tuner.cache.clear()


def inputs(shape: Shape, seed: int, tokens: int | None = None) -> list[Any]:
    """q, k, v [1, T, heads, D] bf16, log gates and beta [1, T, v_heads] float32."""
    torch.manual_seed(seed)
    t, d = tokens or shape.tokens, shape.head_dim
    q, k = (torch.randn(1, t, shape.heads, d).bfloat16() for _ in range(2))
    v = torch.randn(1, t, shape.v_heads, d).bfloat16()
    gate = -2 * torch.rand(1, t, shape.v_heads)
    beta = torch.rand(1, t, shape.v_heads).bfloat16().float()
    return [x.to(shape.device) for x in (q, k, v, gate, beta)]


def prefill(shape: Shape, tensors: list[Any], lengths: list[int], states: Any) -> Any:
    """One call over sequences of `lengths`, packed; `states` is updated in place."""
    from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule

    starts = torch.tensor([0, *lengths]).cumsum(0).int().to(shape.device)
    rows = torch.arange(len(lengths), dtype=torch.int32, device=shape.device)
    return chunk_gated_delta_rule(
        *tensors,
        initial_state=states,
        initial_state_indices=rows,
        cu_seqlens=starts,
        use_qk_l2norm_in_kernel=True,
    )[0]


def empty_states(shape: Shape, count: int) -> Any:
    size = (count, shape.v_heads, shape.head_dim, shape.head_dim)
    return torch.zeros(size, dtype=torch.float32, device=shape.device)


def in_pieces(shape: Shape, tensors: list[Any], cuts: list[int]) -> tuple[Any, Any]:
    """Outputs and final state, bits as integers, prefilled in steps."""
    state, outputs = empty_states(shape, 1), []
    edges = [0, *cuts, tensors[0].shape[1]]
    for a, b in zip(edges, edges[1:], strict=False):
        part = [x[:, a:b].contiguous() for x in tensors]
        outputs.append(prefill(shape, part, [b - a], state))
    return torch.cat(outputs, 1).view(torch.int16), state.view(torch.int32)


def same(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_cuts_on_the_grid_keep_the_bits(shape: Shape, kernel: Any) -> None:
    autotune.pin(kernel)
    tensors = inputs(shape, seed=1)
    whole = in_pieces(shape, tensors, [])
    every = list(range(GRID, shape.tokens, GRID))
    assert same(in_pieces(shape, tensors, every), whole)
    some = sorted(random.Random(1).sample(every, len(every) // 2))
    assert same(in_pieces(shape, tensors, some), whole)
    # Control: one token off the grid is another sum.
    assert not same(in_pieces(shape, tensors, [GRID + 1]), whole)


def test_neighbours_in_the_batch_keep_the_bits(shape: Shape, kernel: Any) -> None:
    autotune.pin(kernel)
    lengths = [5, shape.tokens, GRID]
    parts = [inputs(shape, seed, length) for seed, length in enumerate(lengths)]
    packed = [torch.cat(x, 1) for x in zip(*parts, strict=True)]
    states = empty_states(shape, len(lengths))
    output = prefill(shape, packed, lengths, states)
    alone = in_pieces(shape, parts[1], [])
    mine = output[:, 5 : 5 + shape.tokens].contiguous().view(torch.int16)
    assert same((mine, states[1:2].view(torch.int32)), alone)


def solved(shape: Shape, kernel: Any, tensors: list[Any]) -> Any:
    """The kernel's matrix [1, T, v_heads, 64], kept in float32; bits as integers."""
    _, k, _, gate, beta = tensors
    out = torch.zeros(*beta.shape, GRID, device=shape.device)
    grid = (-(-k.shape[1] // GRID), shape.v_heads)
    kernel[grid](
        k=k, g=gate, beta=beta, A=out, cu_seqlens=None, chunk_indices=None,
        T=k.shape[1], H=shape.v_heads, Hg=shape.heads, K=shape.head_dim, BT=GRID, BC=16,
    )  # fmt: skip
    return out.view(torch.int32)


@pytest.mark.parametrize("shape", SHAPES[:1], indirect=True)
def test_tiles_sum_in_another_order(shape: Shape, kernel: Any) -> None:
    """Why the tile is pinned: the host's candidates are not one computation."""
    tuner = autotune._autotuner(kernel)
    candidates = [c for c in tuner.configs if c.num_warps == autotune.NUM_WARPS]
    tensors = inputs(shape, seed=2)
    found = {}
    for config in candidates:
        tuner.configs = [config]
        found[config.kwargs["BK"]] = solved(shape, kernel, tensors)
    assert sorted(found) == [32, 64]
    assert not torch.equal(found[32], found[64])
    assert torch.equal(found[64], solved(shape, kernel, tensors))


def test_pin_leaves_one_configuration(kernel: Any) -> None:
    assert not autotune.is_pinned(kernel)
    autotune.pin(kernel)
    assert autotune.is_pinned(kernel)
    autotune.pin(kernel)
    tuner = autotune._autotuner(kernel)
    assert [c.kwargs for c in tuner.configs] == [{"BK": autotune.BLOCK_K}]


def test_pin_refuses_a_kernel_without_our_tile(kernel: Any) -> None:
    tuner = autotune._autotuner(kernel)
    tuner.configs = tuner.configs[:1]
    with pytest.raises(LookupError, match="expected one with BK=64"):
        autotune.pin(kernel)
    with pytest.raises(LookupError, match="no autotuner"):
        autotune.pin(object())


# Modules whose kernels a plain or verified token can pass through.
SERVED = (
    "sglang.kernels.ops.attention.decode_attention",
    "sglang.kernels.ops.attention.extend_attention",
    "sglang.kernels.ops.attention.fused_qk_rmsnorm_rope_gate",
    "sglang.kernels.ops.attention.triton_gdn_fused_proj",
    "sglang.kernels.ops.attention.fla.chunk_delta_h",
    "sglang.kernels.ops.attention.fla.chunk_fwd",
    "sglang.kernels.ops.attention.fla.chunk_o",
    "sglang.kernels.ops.attention.fla.cumsum",
    "sglang.kernels.ops.attention.fla.fused_recurrent",
    "sglang.kernels.ops.attention.fla.l2norm",
    "sglang.kernels.ops.attention.fla.layernorm_gated",
    "sglang.kernels.ops.attention.fla.wy_fast",
    "sglang.kernels.ops.attention.linear.fused_gdn_gating",
    "sglang.kernels.ops.elementwise.elementwise",
    "sglang.kernels.ops.mamba.causal_conv1d_triton",
    "sglang.kernels.ops.mamba.mamba_state_scatter_triton",
    "sglang.srt.batch_invariant_ops.batch_invariant_ops",
)
TUNED = {
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel",  # pinned by the hook
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",  # one configuration
    "chunk_local_cumsum_vector_kernel",  # for gates per channel, which GDN has not
}


def test_no_other_served_kernel_is_tuned() -> None:
    found = set()
    for module in SERVED:
        file, names = host.module_file(module)
        assert not names
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(
                "autotune" in ast.dump(decorator) for decorator in node.decorator_list
            ):
                found.add(node.name)
    assert found == TUNED


def test_state_kernel_has_one_configuration() -> None:
    from sglang.kernels.ops.attention.fla import chunk_delta_h

    kernel = chunk_delta_h.chunk_gated_delta_rule_fwd_kernel_h_blockdim64
    assert len(autotune._autotuner(kernel).configs) == 1
