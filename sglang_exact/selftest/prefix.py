# SPDX-License-Identifier: Apache-2.0
"""Self-test: a kept state is the state of a prompt that was cut there, on the GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_exact.reasons import Reason
from sglang_exact.selftest.gdn import FIX, SIZES, Shape, shape_of

TOKENS = 337
"""Five chunks and a tail."""


def _inputs(shape: Shape, tokens: int, seed: int, device: str) -> list[Any]:
    """q, k [1, T, H, K], v [1, T, HV, V] bf16, log gates and beta [1, T, HV] float32.

    Gates near 1: with fast ones the states forget what they started from.
    """
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    h, hv, k, v = shape

    def normal(heads: int, dim: int) -> torch.Tensor:
        size = (1, tokens, heads, dim)
        return torch.randn(size, generator=generator, device=device).bfloat16()

    gates = torch.rand((2, 1, tokens, hv), generator=generator, device=device)
    return [normal(h, k), normal(h, k), normal(hv, v), -0.05 * gates[0], gates[1]]


def _prefill(tensors: list[Any], states: Any, keep: int | None = None) -> list[Any]:
    """Outputs of one sequence, and the state before chunk `keep`; `states` is updated.

    states: [1, HV, V, K] float32.
    """
    import torch

    from sglang_exact.hooks.prefix_snapshot import kept as prefill

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=states.device)

    kept = None if keep is None else torch.full_like(states, float("nan"))
    outputs, _, _ = prefill(
        SimpleNamespace(),
        *(tensor.contiguous() for tensor in tensors),
        ssm_states=states,
        cache_indices=integers(0),
        query_start_loc=integers(0, tensors[0].shape[1]),
        track_state=kept,
        track_chunk_idx=None if keep is None else integers(keep),
    )
    return [outputs, kept]


def _differing(ours: Any, theirs: Any) -> int:
    import torch

    kind = torch.int16 if ours.dtype.itemsize == 2 else torch.int32
    return int((ours.contiguous().view(kind) != theirs.contiguous().view(kind)).sum())


def compare(shape: Shape, chunk: int, seed: int, device: str) -> list[str]:
    """Differences, as text, around a cut at `chunk`; empty if there are none."""
    import torch

    cut = 64 * chunk
    tensors = _inputs(shape, TOKENS, seed, device)
    size = (1, shape.num_v_heads, shape.head_v_dim, shape.head_k_dim)
    whole, head, found = (torch.zeros(size, device=device) for _ in range(3))
    outputs, kept = _prefill(tensors, whole, keep=chunk)
    untracked, _ = _prefill(tensors, found)
    _prefill([x[:, :cut] for x in tensors], head)
    resumed = kept.clone()
    tail, _ = _prefill([x[:, cut:] for x in tensors], resumed)
    pairs = {
        "output of a prefill that keeps nothing": (untracked, outputs),
        "state of a prefill that keeps nothing": (found, whole),
        "kept state against that of a prompt cut there": (kept, head),
        "output of the rest of the prompt": (tail, outputs[:, cut:]),
        "state after the rest of the prompt": (resumed, whole),
    }
    counts = {name: _differing(*pair) for name, pair in pairs.items()}
    return [
        f"{name}: {count} elements differ, cut at {cut} of {TOKENS} tokens"
        for name, count in counts.items()
        if count
    ]


def run(model_runner: Any) -> list[Reason]:
    """A prefix from the cache must give the bits of a computed one at this shape."""
    from sglang.srt.runtime_context import get_memory

    if get_memory().disable_radix_cache:
        return []
    config = model_runner.model_config.hf_text_config
    if not all(hasattr(config, name) for name in SIZES):
        return []
    shape, device = shape_of(model_runner), str(model_runner.device)
    found = compare(shape, 1, 1, device) + compare(shape, 4, 2, device)
    return [
        Reason(f"prefix cache self-test: {text}", "no difference", FIX)
        for text in found
    ]
