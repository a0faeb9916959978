# SPDX-License-Identifier: Apache-2.0
"""The host's convolution of a verified block is the decode convolution, step by step.

Other kernels (the block's one, and decode's, fused with the projection), one order of
operations. The interpreter proves the order; the gpu variant proves bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = pytest.mark.host

WIDTH = 4
HEADS = 48


class Shape(NamedTuple):
    """Requests, tokens per block, channels of the convolution, channels of v."""

    device: str
    bs: int
    tokens: int
    channels: int
    v_dim: int


SHAPES = [
    pytest.param(Shape("cpu", 2, 4, 300, 96), id="interpreted"),
    pytest.param(Shape("cuda", 8, 8, 10240, 6144), id="27b", marks=pytest.mark.gpu),
    pytest.param(Shape("cuda", 3, 16, 10240, 6144), id="wide", marks=pytest.mark.gpu),
]


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shape:
    found: Shape = request.param
    if found.device == "cpu":
        if torch.cuda.is_available():
            pytest.skip("Triton compiles here; the gpu variants run")
        import triton

        from sglang_exact.rehearsal.interpreter import mend

        mend(triton)
        from sglang.kernels.ops.attention import triton_gdn_fused_proj as fused

        # It asks for CUDA tensors; nothing else in it does.
        name = "can_use_fused_qkvzba_causal_conv1d_update_contiguous"
        monkeypatch.setattr(fused, name, lambda *a, **k: (True, ""))
    return found


class Block(NamedTuple):
    """Rows of a block [bs, tokens, channels], weights and the state before it."""

    x: Any
    weight: Any
    state: Any


def block(shape: Shape) -> Block:
    made = torch.Generator().manual_seed(11)

    def values(*size: int) -> Any:
        return torch.randn(*size, generator=made).bfloat16().to(shape.device)

    state = values(shape.bs + 2, WIDTH - 1, shape.channels).transpose(1, 2)
    return Block(
        values(shape.bs, shape.tokens, shape.channels),
        values(shape.channels, WIDTH),
        state,
    )


def slots(shape: Shape) -> Any:
    """Slots of the state pool, in another order than the rows."""
    last = shape.bs + 1
    return torch.arange(last, 1, -1, dtype=torch.int32, device=shape.device)


def decoded(shape: Shape, given: Block) -> tuple[Any, Any]:
    """Decode, one token after the other: outputs, state after each."""
    from sglang.kernels.ops.attention.triton_gdn_fused_proj import (
        fused_qkvzba_causal_conv1d_update_contiguous as decode,
    )

    state, index = given.state.clone(), slots(shape)
    z = torch.zeros(shape.bs, shape.v_dim, dtype=torch.bfloat16, device=shape.device)
    gates = torch.zeros(shape.bs, 2 * HEADS, dtype=z.dtype, device=shape.device)
    out, states = [], []
    for t in range(shape.tokens):
        row, *_ = decode(
            torch.cat([given.x[:, t], z], dim=1),
            gates,
            state,
            given.weight,
            None,
            index,
            qkv_dim=shape.channels,
            v_dim=shape.v_dim,
            num_v_heads=HEADS,
            head_v_dim=shape.v_dim // HEADS,
            activation="silu",
        )
        out.append(row)
        states.append(state[index.long()].clone())
    return torch.stack(out, 1), torch.stack(states, 1)


def verified(shape: Shape, given: Block) -> tuple[Any, Any]:
    """Verify, the whole block at once: outputs, state after each token."""
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update

    windows = torch.zeros(
        shape.bs, shape.tokens, shape.channels, WIDTH - 1,
        dtype=torch.bfloat16, device=shape.device,
    )  # fmt: skip
    out = causal_conv1d_update(
        given.x.transpose(1, 2),
        given.state.clone(),
        given.weight,
        None,
        "silu",
        conv_state_indices=slots(shape),
        intermediate_conv_window=windows,
        intermediate_state_indices=torch.arange(
            shape.bs, dtype=torch.int32, device=shape.device
        ),
    )
    return out.transpose(1, 2), windows


def same(x: Any, y: Any) -> bool:
    return torch.equal(
        x.contiguous().view(torch.int16), y.contiguous().view(torch.int16)
    )


def test_block_convolution_is_the_decode_steps(shape: Shape) -> None:
    given = block(shape)
    rows, states = decoded(shape, given)
    found, windows = verified(shape, given)
    assert same(found, rows)
    assert same(windows, states)


def test_block_comparison_can_fail(shape: Shape) -> None:
    """Control: one bit of one state, and the block without its first token."""
    given = block(shape)
    rows, _ = decoded(shape, given)
    state = given.state.clone()
    state.view(torch.int16)[-1, 5, 1] ^= 64
    assert not same(verified(shape, given._replace(state=state))[0], rows)
    late = given._replace(x=given.x.roll(1, dims=1))
    assert not same(verified(shape, late)[0], rows)
