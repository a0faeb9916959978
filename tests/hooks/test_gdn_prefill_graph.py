# SPDX-License-Identifier: Apache-2.0
"""GDN's prefill on a bucket's tables against the step without a graph.

Interpreted here; the gpu variant captures a graph at the 27B's shape and replays it.
`scripts/gpu_prefill_graphs` asks the same of whole models.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from test_prefill_bits import SHAPES, Shape, kernel, shape  # noqa: E402

from sglang_exact.hooks import (  # noqa: E402
    autotune,
    gdn_prefill_graph,
    prefix_snapshot,
)

__all__ = ["kernel", "shape"]
pytestmark = [pytest.mark.host]
if not torch.cuda.is_available():
    # Without a GPU the host's backends are importable there alone.
    pytestmark += [pytest.mark.rehearsal]
SLOTS, WIDTH = 40, 3
STEPS = (
    (4, [1], [0]),
    (4, [3], [70]),
    (32, [32], [0]),
    (48, [5, 1, 30], [0, 64, 0]),
    (80, [64, 3], [64, 0]),
    (144, [130], [0]),
    (208, [70, 130], [0, 64]),
    (48, [3] * gdn_prefill_graph.MAX_REQUESTS, [0, 64] * 8),
)
"""Bucket, tokens of each request, and how many came before. A request that ends on the
grid keeps its last state, one that ends elsewhere the state before a chunk."""


class Step(NamedTuple):
    """What a layer is given, and the pools before it."""

    qkv: Any
    a: Any
    b: Any
    conv: Any
    states: Any
    slots: list[int]


def layer_of(shape: Shape) -> Any:
    torch.manual_seed(3)
    d = shape.head_dim
    qk, v = shape.heads * d, shape.v_heads * d
    weights = torch.randn(2 * qk + v, WIDTH + 1).bfloat16().to(shape.device)
    return SimpleNamespace(
        layer_id=0, conv_weights=weights, bias=None, activation="silu",
        q_dim=qk, k_dim=qk, v_dim=v, num_q_heads=shape.heads, num_k_heads=shape.heads,
        num_v_heads=shape.v_heads, head_q_dim=d, head_k_dim=d, head_v_dim=d,
        A_log=torch.full((shape.v_heads,), -4.0, device=shape.device),
        dt_bias=torch.zeros(shape.v_heads, device=shape.device),
    )  # fmt: skip


def make(shape: Shape, layer: Any, tokens: int, count: int, seed: int) -> Step:
    torch.manual_seed(seed)
    dim = layer.q_dim + layer.k_dim + layer.v_dim
    square = (shape.head_dim, shape.head_dim)
    made = (
        torch.randn(tokens, dim).bfloat16(),
        *(torch.randn(tokens, shape.v_heads).bfloat16() for _ in range(2)),
        torch.randn(SLOTS, dim, WIDTH).bfloat16(),
        torch.randn(SLOTS, shape.v_heads, *square),
    )
    slots = random.Random(seed).sample(range(1, SLOTS // 2), count)
    return Step(*(tensor.to(shape.device) for tensor in made), slots)


class Backend:
    """Stands in for GDNAttnBackend: pools, and the kernel."""

    enable_mis = is_draft_worker = False
    mamba_chunk_size = 64

    def __init__(self, shape: Shape, step: Step) -> None:
        kernel = type("TritonGDNKernel", (), {})()
        self.device, self.conv_states_shape = shape.device, step.conv.shape
        self.conv, self.states = step.conv.clone(), step.states.clone()
        self.kernel_dispatcher = SimpleNamespace(
            extend_kernel=kernel,
            extend=lambda **given: prefix_snapshot.kept(kernel, **given),
        )
        self.slots = torch.zeros(SLOTS, dtype=torch.int32, device=shape.device)
        cache = SimpleNamespace(conv=[self.conv], temporal=self.states)
        self.req_to_token_pool = SimpleNamespace(
            get_mamba_indices=lambda rows: self.slots[rows],
            mamba2_layer_cache=lambda _: cache,
        )

    @staticmethod
    def _translate_mamba_indices(found: Any) -> Any:
        return found

    @staticmethod
    def _has_cpu_prefill_track_metadata(_: Any) -> bool:
        return True

    @staticmethod
    def _prefill_gates(layer: Any, a: Any, b: Any) -> Any:
        from sglang.kernels.ops.attention.linear.fused_gdn_gating import (
            fused_gdn_gating,
        )

        return fused_gdn_gating(layer.A_log, a, b, layer.dt_bias)


@pytest.fixture(autouse=True)
def offered(monkeypatch: pytest.MonkeyPatch, shape: Shape, kernel: Any) -> None:
    from sglang.srt.layers.attention.linear import kda_backend

    autotune.pin(kernel)
    gdn_prefill_graph.offer(Backend)
    assert gdn_prefill_graph._captures(Backend)
    monkeypatch.setattr(kda_backend, "mamba_cache_chunk_size", lambda: 64)
    if shape.device == "cpu":
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)


def batch_of(
    backend: Backend, step: Step, lengths: list[int], before: list[int]
) -> Any:
    """A ForwardBatch of these requests; each is kept at its last 64 in the step.

    As the host's scheduler says it: the end of the step, on the grid or not.
    """
    count, device = len(lengths), step.conv.device
    backend.slots[:count] = torch.tensor(step.slots[:count], dtype=torch.int32)
    ends = [old + new for old, new in zip(before, lengths, strict=True)]
    kept = [new >= 64 for new in lengths]
    return SimpleNamespace(
        req_pool_indices=torch.arange(count, device=device),
        _original_batch_size=None,
        batch_size=count,
        extend_num_tokens=sum(lengths),
        extend_seq_lens_cpu=lengths,
        extend_prefix_lens=torch.tensor(before, device=device),
        extend_prefix_lens_cpu=before,
        mamba_track_mask=torch.tensor(kept),
        mamba_prefill_track_mask_cpu=kept,
        mamba_track_seqlens_cpu=ends,
        mamba_track_indices=torch.arange(count, device=device) + SLOTS // 2,
        forward_mode=SimpleNamespace(is_target_verify=lambda: False),
    )


def without(layer: Any, step: Step, backend: Backend, batch: Any) -> Any:
    """The launches of the step without a graph, and what the host then keeps."""
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn

    lengths, device = batch.extend_seq_lens_cpu, step.conv.device
    tokens, conv, states = sum(lengths), backend.conv, backend.states
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    cuts = [length // 64 * 64 for length in lengths]
    for row, kept in enumerate(batch.mamba_prefill_track_mask_cpu):
        if kept:
            begin = int(starts[row]) + cuts[row] - WIDTH
            window = torch.arange(begin, begin + WIDTH).clamp(0, tokens - 1)
            conv[SLOTS // 2 + row] = step.qkv[window.to(device)].T
    slots, starts = backend.slots[: len(lengths)], starts.to(device)
    qkv = causal_conv1d_fn(
        step.qkv[:tokens].transpose(0, 1), layer.conv_weights, None, activation="silu",
        conv_states=conv, has_initial_state=batch.extend_prefix_lens > 0,
        cache_indices=slots, query_start_loc=starts, seq_lens_cpu=lengths,
    ).transpose(0, 1)  # fmt: skip
    parts = qkv.split([layer.q_dim, layer.k_dim, layer.v_dim], -1)
    q, k, v = (part.unflatten(-1, (-1, layer.head_q_dim))[None] for part in parts)
    gates, beta = backend._prefill_gates(layer, step.a[:tokens], step.b[:tokens])
    track = torch.zeros(len(lengths), *states.shape[1:], device=device)
    tracked = batch.mamba_prefill_track_mask_cpu
    inner = [
        cut // 64 if kept and cut < length else -1
        for cut, length, kept in zip(cuts, lengths, tracked, strict=True)
    ]
    out, _, _ = prefix_snapshot.kept(
        SimpleNamespace(), q, k, v, gates, beta, ssm_states=states, cache_indices=slots,
        query_start_loc=starts, track_state=track,
        track_chunk_idx=torch.tensor(inner, dtype=torch.int32, device=device),
    )  # fmt: skip
    for row, kept in enumerate(tracked):
        if kept:
            last = track[row] if inner[row] >= 0 else states[slots[row].long()]
            states[SLOTS // 2 + row] = last
    return out


def bits(*tensors: Any) -> list[Any]:
    kinds = {2: torch.int16, 4: torch.int32}
    return [t.contiguous().view(kinds[t.element_size()]) for t in tensors]


def run(
    shape: Shape,
    bucket: int,
    lengths: list[int],
    before: list[int],
    stale: bool = False,
) -> tuple[list[Any], list[Any]]:
    """Bits of outputs and pools: on the bucket's tables, and without."""
    layer, tokens = layer_of(shape), sum(lengths)
    step = make(shape, layer, bucket, len(lengths) + 2, seed=tokens)
    # Rows of no request hold anything.
    for tensor in (step.qkv, step.a, step.b):
        tensor[tokens:] = float("nan")
    ours, theirs = Backend(shape, step), Backend(shape, step)
    dummy = batch_of(ours, step, [bucket], [0])
    dummy.mamba_track_mask = None
    tables = gdn_prefill_graph.allocate(ours, dummy)

    def forward() -> Any:
        none = SimpleNamespace(forward_mode=dummy.forward_mode)
        return gdn_prefill_graph.extend(_never, ours, layer, none, *step[:3])

    if shape.device == "cuda":
        forward = _capture(forward)
        ours.conv.copy_(step.conv)
        ours.states.copy_(step.states)
    batch = batch_of(ours, step, lengths, before)
    if not stale:
        gdn_prefill_graph.refresh(ours, tables, batch)
    out = forward()
    assert not bool(out[:, tokens:].any()), "rows of no request"
    batch_of(theirs, step, lengths, before)
    want = without(layer, step, theirs, batch)
    return (
        bits(out[:, :tokens], ours.conv, ours.states),
        bits(want, theirs.conv, theirs.states),
    )


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("the step without a graph was taken")


def _capture(forward: Any) -> Any:
    """A graph of it, after one run that compiles."""
    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = forward()

    def replay() -> Any:
        graph.replay()
        return held

    return replay


@pytest.mark.parametrize("shape", SHAPES, indirect=True)
@pytest.mark.parametrize(("bucket", "lengths", "before"), STEPS)
def test_tables_have_the_bits_of_the_step_without(
    shape: Shape, bucket: int, lengths: list[int], before: list[int]
) -> None:
    ours, theirs = run(shape, bucket, lengths, before)
    for name, a, b in zip(("outputs", "conv", "states"), ours, theirs, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("shape", SHAPES, indirect=True)
def test_tables_of_another_step_differ(shape: Shape) -> None:
    """The control: what was captured with is replayed."""
    ours, theirs = run(shape, 200, [70, 130], [0, 64], stale=True)
    for name, a, b in zip(("outputs", "conv", "states"), ours, theirs, strict=True):
        assert not torch.equal(a, b), name


def test_outputs_have_one_tile_whatever_the_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph knows its bucket, the step without it its tokens: both take 64."""
    from sglang.kernels.ops.attention.fla import chunk_o

    found: list[int] = []

    class Launcher:
        def __getitem__(self, _: Any) -> Any:
            return lambda *_, BT, **__: found.append(BT)

    monkeypatch.setattr(chunk_o, "chunk_fwd_kernel_o", Launcher())

    def tiles(host: bool) -> list[int]:
        found.clear()
        for tokens in (1, 20, 100):
            q = torch.zeros(1, tokens, 1, 64)
            starts, table = torch.tensor([0, tokens]), torch.zeros(2, 2)
            if host:
                chunk_o.chunk_fwd_o(q, q, q, q, q[..., 0], cu_seqlens=starts)
            else:
                prefix_snapshot._outputs(
                    *(q, q, q, q, q[..., 0], 64), cu_seqlens=starts, chunk_indices=table
                )
        return list(found)

    assert tiles(host=False) == [64, 64, 64]
    # The control: the host's own choice.
    assert tiles(host=True) == [16, 32, 64]


@pytest.mark.parametrize("shape", SHAPES[:1], indirect=True)
def test_verify_and_eager_steps_take_the_host(shape: Shape) -> None:
    layer = layer_of(shape)
    step = make(shape, layer, 4, 1, seed=1)
    backend, taken = Backend(shape, step), object()

    def forward(verify: bool) -> Any:
        mode = SimpleNamespace(is_target_verify=lambda: verify)
        given = SimpleNamespace(forward_mode=mode)
        return gdn_prefill_graph.extend(
            lambda *_: taken, backend, layer, given, *step[:3]
        )

    assert forward(verify=False) is taken
    dummy = batch_of(backend, step, [4], [0])
    dummy.mamba_track_mask = None
    gdn_prefill_graph.allocate(backend, dummy)
    assert backend.prefill_graph_extend_active()
    assert forward(verify=True) is taken
    assert forward(verify=False) is not taken
    gdn_prefill_graph.leave(backend, None)
    assert forward(verify=False) is taken


@pytest.mark.parametrize("shape", SHAPES[:1], indirect=True)
def test_only_the_kernels_it_knows_are_captured(shape: Shape) -> None:
    backend = Backend(shape, make(shape, layer_of(shape), 4, 1, seed=1))
    assert backend.supports_prefill_graph_extend()
    for other in ("enable_mis", "is_draft_worker"):
        setattr(backend, other, True)
        assert not backend.supports_prefill_graph_extend()
        setattr(backend, other, False)
    assert backend.supports_prefill_graph_extend()
    backend.kernel_dispatcher.extend_kernel = object()
    assert not backend.supports_prefill_graph_extend()
