# SPDX-License-Identifier: Apache-2.0
"""Prefill attention for bench_kernels.py: tile sweep, and times beside the host's.

A step prefills `tokens` new tokens after `prefix` cached ones, one request. Slots
ascend, as a server without a prefix cache mostly has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton

from sglang_exact_kernels import arch
from sglang_exact_kernels import prefill_attention as prefill
from sglang_exact_kernels.invariance import different_elements
from sglang_exact_kernels.reference import attention_fp64
from tools.kernels.timing import Budget, show, time_steady_us

CUTS = ((1,), (64,), (63, 128), (100, 1000, 2049), (4099,))
CUT_LENGTH = 4100

# sm90 by shared memory (227 KiB) and registers, checked ahead of time. The product's
# own tile is measured first.
CANDIDATES = {
    90: ((128, 64, 8, 3), (128, 32, 8, 5), (128, 32, 8, 7), (64, 64, 8, 3)),
    120: ((64, 32, 4, 2), (64, 64, 8, 1), (64, 32, 8, 2), (64, 16, 4, 3)),
}

GATHERED = {
    90: ((128, 64, 8, 2), (128, 32, 8, 4)),
    120: ((64, 32, 8, 2), (64, 32, 4, 2)),
}


Attend = Callable[..., None]
"""prefill_attention, or a variant with its arguments."""


class Shape(NamedTuple):
    q_heads: int
    kv_heads: int
    dim: int


class Prompt(NamedTuple):
    """One request: q [tokens, heads, dim] of all its tokens, and the cache."""

    shape: Shape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor

    def starts(self, size: int) -> torch.Tensor:
        return torch.tensor([0, size], dtype=torch.int32, device=self.q.device)

    def launch(
        self, first: int, last: int, out: torch.Tensor, attend: Attend
    ) -> Callable[[], None]:
        """`attend` for tokens first .. last; `out` [last - first, heads, dim]."""
        ahead = len(self.slots) - len(self.q)
        q, loc = self.q[first - ahead : last - ahead], self.slots[first:last]
        qo, kv = self.starts(last - first), self.starts(first)

        def run() -> None:
            attend(
                q,
                self.k,
                self.v,
                out,
                qo_indptr=qo,
                kv_indptr=kv,
                kv_indices=self.slots[:first],
                out_cache_loc=loc,
                max_extend_len=last - first,
                sm_scale=self.shape.dim**-0.5,
            )

        return run

    def pieces(
        self, cuts: tuple[int, ...], attend: Attend, first: int = 0
    ) -> torch.Tensor:
        edges = [first, *cuts, len(self.slots)]
        outs = []
        for a, b in zip(edges, edges[1:], strict=False):
            outs.append(torch.empty_like(self.q[: b - a]))
            self.launch(a, b, outs[-1], attend)()
        return torch.cat(outs)


def make_prompt(shape: Shape, prefix: int, tokens: int, device: str) -> Prompt:
    """q for the last `tokens` only; K and V for all."""
    keys = prefix + tokens

    def normal(rows: int, heads: int) -> torch.Tensor:
        size = (rows, heads, shape.dim)
        return torch.randn(size, device=device, dtype=torch.bfloat16)

    k, v = normal(keys, shape.kv_heads), normal(keys, shape.kv_heads)
    slots = torch.arange(keys, device=device)
    return Prompt(shape, normal(tokens, shape.q_heads), k, v, slots)


def flops(shape: Shape, prefix: int, tokens: int) -> float:
    """Both dots over the causal triangle and the prefix."""
    pairs = tokens * prefix + tokens * (tokens + 1) / 2
    return 4.0 * shape.q_heads * shape.dim * pairs


def bits_report(
    shape: Shape, length: int, device: str, attend: Attend
) -> dict[str, Any]:
    """Elements that differ between cuts of one prompt, and the error against fp64."""
    prompt = make_prompt(shape, 0, length, device)
    want = prompt.pieces((), attend)
    cuts = [tuple(c for c in cut if c < length) for cut in CUTS]
    differing = {
        str(cut): different_elements(prompt.pieces(cut, attend), want)
        for cut in cuts
        if cut
    }
    rows = torch.linspace(0, min(length, 700) - 1, 7).long().tolist()
    reference = attention_fp64(
        prompt.q[rows],
        prompt.k,
        prompt.v,
        [prompt.slots[: i + 1] for i in rows],
        shape.dim**-0.5,
    )
    error = (want[rows].double() - reference).abs()
    return {
        "differing_elements": differing,
        "mean_error": error.mean().item(),
        "max_error": error.max().item(),
    }


def long_cut(
    shape: Shape, prefix: int, tokens: int, device: str, attend: Attend
) -> dict[str, int]:
    """Differing elements after a long prefix: in two pieces, and beside ours."""
    prompt = make_prompt(shape, prefix, tokens, device)
    middle = prefix + tokens // 2 + 1
    whole = prompt.pieces((), attend, prefix)
    ours = prompt.pieces((), prefill.prefill_attention, prefix)
    return {
        "differing_long": different_elements(
            prompt.pieces((middle,), attend, prefix), whole
        ),
        "differing_from_ours": different_elements(whole, ours),
    }


def measure(
    shape: Shape, steps: list[tuple[int, int]], device: str, attend: Attend
) -> Iterator[dict[str, Any]]:
    """Bits, error and microseconds per step of one kernel, piece by piece.

    A kernel that does not fit the chip or fails is recorded.
    """
    try:
        yield bits_report(
            shape, min(CUT_LENGTH, max(t for _, t in steps)), device, attend
        )
        yield long_cut(shape, *steps[-1], device, attend)
        for prefix, tokens in steps:
            prompt = make_prompt(shape, prefix, tokens, device)
            out = torch.empty_like(prompt.q)
            run = prompt.launch(prefix, prefix + tokens, out, attend)
            time_us = time_steady_us(run, device)
            work = flops(shape, prefix, tokens)
            yield {
                f"{tokens}@{prefix}_us": time_us,
                f"{tokens}@{prefix}_tflops": work / time_us / 1e6,
            }
    except (triton.runtime.errors.OutOfResources, RuntimeError) as error:
        yield {"error": f"{type(error).__name__}: {error}"[:300]}


def sweep(
    shape: Shape, steps: list[tuple[int, int]], device: str, budget: Budget
) -> Iterator[dict[str, Any]]:
    """Every candidate tile; the product never tries one."""
    key = arch.capability(torch.device(device)) or 90
    kept = prefill._TILES[key]
    candidates = [kept]
    candidates += [tile for c in CANDIDATES[key] if (tile := prefill._Tile(*c)) != kept]
    for tile in candidates:
        if not budget.allows(f"sweep of {tuple(tile)}"):
            continue
        prefill._TILES[key] = tile
        entry: dict[str, Any] = {"tile": list(tile), "product": tile == kept}
        try:
            for part in measure(shape, steps, device, prefill.prefill_attention):
                entry |= part
        finally:
            prefill._TILES[key] = kept
        show(entry)
        yield entry


class Copying:
    """prefill_attention with scratch for a copy of the keys, kept between calls.

    served: only for steps for which the product copies.
    """

    def __init__(self, served: bool = False) -> None:
        self._least = prefill.GATHER_KEYS if served else 0
        self._dense: torch.Tensor | None = None

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, *given: torch.Tensor, **more: Any
    ) -> None:
        keys, bs = more["kv_indices"].numel() + len(q), more["qo_indptr"].numel() - 1
        dense = None
        if keys >= self._least and prefill.copies(q.device, q.shape[2], q.shape[2]):
            shape = prefill.dense_shape(keys, bs, *k.shape[1:])
            if self._dense is None or self._dense.shape[2] < shape[2]:
                self._dense = q.new_empty(shape)
            dense = self._dense
        prefill.prefill_attention(q, k, *given, **more, dense=dense)


def sweep_gathered(
    shape: Shape, steps: list[tuple[int, int]], device: str, budget: Budget
) -> Iterator[dict[str, Any]]:
    """Every tile for a copy of the keys, without the kernel of sm90's own.

    product: whether the product would run it for these heads.
    """
    key = arch.capability(torch.device(device)) or 90
    kept, rule = prefill._DENSE_TILES.get(key), prefill._specialises
    served = torch.empty(0, dtype=torch.bfloat16, device=device)
    replaced = rule(served, shape.dim)
    for candidate in GATHERED[key]:
        if not budget.allows(f"gathering sweep of {candidate}"):
            continue
        tile = prefill._Tile(*candidate)
        prefill._DENSE_TILES[key] = tile
        product = tile == kept and not replaced
        entry: dict[str, Any] = {"tile": list(tile), "product": product}
        prefill._specialises = lambda *_: False
        try:
            for part in measure(shape, steps, device, Copying()):
                entry |= part
        finally:
            prefill._specialises = rule
            del prefill._DENSE_TILES[key]
            if kept is not None:
                prefill._DENSE_TILES[key] = kept
        show(entry)
        yield entry


def specialised(
    shape: Shape, steps: list[tuple[int, int]], device: str, budget: Budget
) -> Iterator[dict[str, Any]]:
    """The product on a copy of the keys in every step; sm90 only."""
    query = torch.empty(0, dtype=torch.bfloat16, device=device)
    if not prefill._specialises(query, shape.dim):
        budget.left_out.append("specialised: needs sm90 and head_dim 256")
        return
    entry: dict[str, Any] = {}
    for part in measure(shape, steps, device, Copying()):
        entry |= part
        show(part)
    yield entry


def best(entries: list[dict[str, Any]]) -> list[int] | None:
    """Tile with the least time over the steps among those that kept their bits."""
    sound = [
        e
        for e in entries
        if "error" not in e
        and not any(e["differing_elements"].values())
        and not e["differing_long"]
    ]
    if not sound:
        return None

    def total(entry: dict[str, Any]) -> float:
        return float(sum(v for name, v in entry.items() if name.endswith("_us")))

    found: list[int] = min(sound, key=total)["tile"]
    return found


def host_unified(prompt: Prompt, prefix: int, tokens: int) -> Callable[[], None] | None:
    """The host's deterministic kernel, as its backend calls it; None without a host."""
    try:
        from sglang.kernels.ops.attention import extend_attention
    except ImportError:
        return None
    out = torch.empty_like(prompt.q)
    qo, kv = prompt.starts(tokens), prompt.starts(prefix + tokens)
    lens = torch.tensor([prefix], dtype=torch.int32, device=prompt.q.device)
    return lambda: extend_attention.extend_attention_fwd_unified(
        prompt.q,
        out,
        prompt.k,
        prompt.v,
        1.0,
        1.0,
        qo,
        kv,
        prompt.slots,
        lens,
        tokens,
        sm_scale=prompt.shape.dim**-0.5,
    )


def host_default(prompt: Prompt, prefix: int, tokens: int) -> Callable[[], None] | None:
    """FA3 over a page table of page size 1, the host's default on sm90; None else."""
    if prompt.q.device.type != "cuda" or torch.cuda.get_device_capability()[0] != 9:
        return None
    try:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache
    except ImportError:
        return None
    lens = torch.tensor([prefix + tokens], dtype=torch.int32, device="cuda")
    qo, kv = prompt.starts(tokens), prompt.starts(prefix + tokens)
    table = prompt.slots.to(torch.int32)[None]
    return lambda: flash_attn_with_kvcache(
        q=prompt.q,
        k_cache=prompt.k[:, None],
        v_cache=prompt.v[:, None],
        page_table=table,
        cache_seqlens=lens,
        cu_seqlens_q=qo,
        cu_seqlens_k_new=kv,
        max_seqlen_q=tokens,
        softmax_scale=prompt.shape.dim**-0.5,
        causal=True,
        num_splits=0,
    )


def compare(
    shape: Shape, steps: list[tuple[int, int]], device: str, budget: Budget
) -> Iterator[dict[str, Any]]:
    """Ours, the host's deterministic kernel and its default at every step."""
    for prefix, tokens in steps:
        if not budget.allows(f"prefill of {tokens} after {prefix}"):
            continue
        prompt = make_prompt(shape, prefix, tokens, device)
        out = torch.empty_like(prompt.q)
        ours = prompt.launch(prefix, prefix + tokens, out, Copying(served=True))
        entry: dict[str, Any] = {
            "prefix": prefix,
            "tokens": tokens,
            "ours_us": time_steady_us(ours, device),
        }
        work = flops(shape, prefix, tokens)
        entry["ours_tflops"] = work / entry["ours_us"] / 1e6
        for name, make in (("host", host_unified), ("default", host_default)):
            run = make(prompt, prefix, tokens)
            if run is None:
                entry[f"{name}_us"] = None
                continue
            try:
                entry[f"{name}_us"] = time_steady_us(run, device)
            except (RuntimeError, TypeError, NotImplementedError) as error:
                entry[f"{name}_error"] = f"{type(error).__name__}: {error}"[:300]
                continue
            entry[f"ours/{name}"] = entry["ours_us"] / entry[f"{name}_us"]
        show(entry)
        yield entry
