# SPDX-License-Identifier: Apache-2.0
"""The host's prefill convolution and attention: no cut and no neighbour moves bits.

In the interpreter this proves the order of operations; the gpu variants prove bits at
the shapes of the 27B model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = pytest.mark.host

WIDTH = 4


class Shape(NamedTuple):
    """tokens, channels of the convolution, q heads, kv heads, head_dim."""

    device: str
    tokens: int
    channels: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = [
    pytest.param(Shape("cpu", 70, 48, 2, 1, 32), id="interpreted"),
    pytest.param(
        Shape("cuda", 1000, 10240, 24, 4, 256), id="27b", marks=pytest.mark.gpu
    ),
]


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    found: Shape = request.param
    if found.device == "cpu":
        if torch.cuda.is_available():
            pytest.skip("Triton compiles here; the gpu variant runs")
        import triton

        from sglang_exact.rehearsal.interpreter import mend

        mend(triton)
    return found


def bits(x: Any) -> Any:
    return x.contiguous().view(torch.int16)


class Conv:
    """A convolution with the state of two slots."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(3)
        self.shape = shape
        size = (shape.channels, WIDTH)
        self.weight = torch.randn(size).bfloat16().to(shape.device)
        self.states = torch.zeros(2, shape.channels, WIDTH - 1, dtype=torch.bfloat16)
        # The kernel wants channels next to each other.
        self.states = self.states.transpose(1, 2).contiguous().transpose(1, 2)
        self.states = self.states.to(shape.device)

    def __call__(
        self, x: Any, lengths: list[int], slots: list[int], seen: list[bool]
    ) -> Any:
        """x [num_tokens, channels], packed sequences; returns the same shape."""
        from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn

        device = self.shape.device
        return causal_conv1d_fn(
            x.transpose(0, 1),
            self.weight,
            None,
            conv_states=self.states,
            query_start_loc=torch.tensor([0, *lengths]).cumsum(0).int().to(device),
            seq_lens_cpu=lengths,
            cache_indices=torch.tensor(slots, dtype=torch.int32, device=device),
            has_initial_state=torch.tensor(seen, device=device),
            activation="silu",
        ).transpose(0, 1)


def rows(shape: Shape, seed: int, *size: int) -> Any:
    torch.manual_seed(seed)
    return torch.randn(*size).bfloat16().to(shape.device)


@pytest.mark.parametrize("cut", [1, 2, 9, 64])
def test_convolution_in_two_steps(shape: Shape, cut: int) -> None:
    x = rows(shape, 1, shape.tokens, shape.channels)
    whole = Conv(shape)
    expected = whole(x, [shape.tokens], [0], [False])
    steps = Conv(shape)
    first = steps(x[:cut], [cut], [0], [False])
    second = steps(x[cut:], [shape.tokens - cut], [0], [True])
    assert torch.equal(bits(torch.cat([first, second])), bits(expected))
    assert torch.equal(bits(steps.states), bits(whole.states))
    # Control: the second step without the first one's state.
    forgot = Conv(shape)(x[cut:], [shape.tokens - cut], [0], [False])
    assert not torch.equal(bits(forgot), bits(expected[cut:]))


def test_convolution_beside_a_neighbour(shape: Shape) -> None:
    x = rows(shape, 1, shape.tokens, shape.channels)
    alone = Conv(shape)(x, [shape.tokens], [0], [False])
    packed = torch.cat([rows(shape, 2, 5, shape.channels), x])
    both = Conv(shape)(packed, [5, shape.tokens], [1, 0], [False, False])
    assert torch.equal(bits(both[5:]), bits(alone))


class Cache(NamedTuple):
    """Keys and values of two sequences in one pool, the second one first."""

    k: Any
    v: Any
    neighbour: int


def cache(shape: Shape, neighbour: int) -> Cache:
    size = (neighbour + shape.tokens, shape.kv_heads, shape.head_dim)
    return Cache(rows(shape, 4, *size), rows(shape, 5, *size), neighbour)


def attend(shape: Shape, q: Any, pool: Cache, parts: list[tuple[int, int, int]]) -> Any:
    """Extend attention; `parts` holds (first slot, prefix, extend length)."""
    from sglang.kernels.ops.attention.extend_attention import (
        extend_attention_fwd_unified,
    )

    device = shape.device
    out = torch.empty_like(q)
    extends = [extend for _, _, extend in parts]
    lengths = [prefix + extend for _, prefix, extend in parts]
    slots = [
        torch.arange(a, a + n) for (a, _, _), n in zip(parts, lengths, strict=True)
    ]
    extend_attention_fwd_unified(
        q,
        out,
        pool.k,
        pool.v,
        1.0,
        1.0,
        torch.tensor([0, *extends]).cumsum(0).int().to(device),
        torch.tensor([0, *lengths]).cumsum(0).int().to(device),
        torch.cat(slots).to(device),
        torch.tensor([p for _, p, _ in parts], dtype=torch.int32, device=device),
        max(extends),
        sm_scale=shape.head_dim**-0.5,
    )
    return out


@pytest.mark.parametrize("cut", [1, 33, 64])
def test_attention_in_two_steps(shape: Shape, cut: int) -> None:
    pool = cache(shape, 0)
    q = rows(shape, 6, shape.tokens, shape.heads, shape.head_dim)
    whole = attend(shape, q, pool, [(0, 0, shape.tokens)])
    first = attend(shape, q[:cut].contiguous(), pool, [(0, 0, cut)])
    rest = attend(shape, q[cut:].contiguous(), pool, [(0, cut, shape.tokens - cut)])
    assert torch.equal(bits(torch.cat([first, rest])), bits(whole))
    # Control: the second step without its first key.
    short = attend(
        shape, q[cut:].contiguous(), pool, [(1, cut - 1, shape.tokens - cut)]
    )
    assert not torch.equal(bits(short), bits(whole[cut:]))


def test_attention_beside_a_neighbour(shape: Shape) -> None:
    pool = cache(shape, 37)
    q = rows(shape, 6, 37 + shape.tokens, shape.heads, shape.head_dim)
    both = attend(shape, q, pool, [(0, 0, 37), (37, 0, shape.tokens)])
    alone = attend(shape, q[37:].contiguous(), pool, [(37, 0, shape.tokens)])
    assert torch.equal(bits(both[37:]), bits(alone))
