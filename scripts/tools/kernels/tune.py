# SPDX-License-Identifier: Apache-2.0
"""Tiles and splits of decode_attention tried against each other and the host's kernel.

Every candidate runs at every batch size and length with 1 row and with T rows a
request, and its bits are compared: request 0 alone, in each batch, and as the last row
of a block. The best is the one that is never slower than the host's deterministic
decode, then the one with the least geometric mean over all times. The product picks
none of this: its table is edited by hand.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton

from sglang_exact_kernels import arch
from sglang_exact_kernels import decode_attention as attention
from sglang_exact_kernels.decode_attention import Tiers
from sglang_exact_kernels.invariance import different_elements
from tools import SCRIPTS
from tools.kernels import decode as bench_decode
from tools.kernels import model
from tools.kernels.timing import Budget, show, time_us


class Candidate(NamedTuple):
    tile: attention._Tile
    tiers: Tiers

    @property
    def name(self) -> str:
        block_n, warps, stages, programs = self.tile
        text = f"n{block_n} w{warps} s{stages} p{programs}"
        return f"{text} {'/'.join(map(str, self.tiers))}"


_A = Tiers(8192, 256, 32768, 512, 1024)
_D = Tiers(8192, 512, 32768, 1024, 2048)
_G = Tiers(512, 256, 8192, 512, 2048)
_H = Tiers(2048, 256, 8192, 1024, 2048)
_K = Tiers(8192, 1024, 32768, 2048, 4096)
_tile = attention._Tile
# What a program takes is known ahead of time at head_dim 256: two programs of 4 warps
# share a multiprocessor of sm90 (32 keys and two buffers, or 16 and four: 97 KiB) and
# hide each other's start and end of a split.
CANDIDATES = {
    90: [
        *(Candidate(_tile(64, 4, 5, 1), t) for t in (_G, _D, _H, _K)),
        *(Candidate(_tile(64, 8, 5, 1), t) for t in (_A, _G)),
        *(Candidate(_tile(32, 4, 3, 2), t) for t in (_D, _G)),
        *(Candidate(_tile(16, 4, 7, 2), t) for t in (_G, _H)),
    ],
    120: [
        Candidate(_tile(16, 8, 7, 1), _A),
        Candidate(_tile(16, 8, 5, 1), _A),
        Candidate(_tile(16, 4, 5, 1), _A),
        Candidate(_tile(16, 8, 7, 1), _G),
    ],
}


def candidates() -> list[Candidate]:
    """Those of this GPU; what is served comes first, if it is not among them."""
    key = arch.capability(torch.device(model.DEVICE)) or 90
    served = Candidate(attention._TILES[key], attention._TIERS)
    found = CANDIDATES[key]
    return found if served in found else [served, *found]


@contextlib.contextmanager
def tried(candidate: Candidate) -> Iterator[None]:
    """The kernel's tables with this candidate in them."""
    kept = attention._TILES, attention._TIERS
    tiles = dict.fromkeys(attention._TILES, candidate.tile)
    attention._TILES, attention._TIERS = tiles, candidate.tiers
    try:
        yield
    finally:
        attention._TILES, attention._TIERS = kept


def compile_all(workers: int) -> None:
    """Fill Triton's cache, `workers` processes at a time side by side."""
    count = len(candidates())
    shares = [range(w, count, workers) for w in range(min(workers, count))]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, share)], cwd=SCRIPTS
        )
        for share in shares
    ]
    for process in running:
        process.wait()
    print(f"{count} candidates compiled", flush=True)


def _compile(indices: list[int]) -> None:
    pool = bench_decode.make_pool(64)
    rows = bench_decode.make_rows(pool, 1, 1, 64)
    for index in indices:
        with (
            tried(candidates()[index]),
            contextlib.suppress(triton.runtime.errors.OutOfResources),
        ):
            bench_decode.ours(pool, rows)()


class Cell(NamedTuple):
    """One batch: `one` row a request, and blocks whose last row is the same."""

    one: bench_decode.Rows
    block: bench_decode.Rows


def make_cell(
    pool: bench_decode.Pool, queries: torch.Tensor, bs: int, length: int
) -> Cell:
    one = bench_decode.make_rows(pool, bs, 1, length)
    block = bench_decode.make_rows(pool, bs, model.T, length)
    one.q.copy_(queries[:bs])
    block.q[model.T - 1 :: model.T].copy_(queries[:bs])
    return Cell(one, block)


def measure(
    pool: bench_decode.Pool, cell: Cell, alone: torch.Tensor | None
) -> tuple[dict[str, Any], torch.Tensor]:
    """Times and differing bits of the candidate in force; and request 0's row.

    alone: that row from a batch of one, None if this is the batch of one.
    """
    entry: dict[str, Any] = {}
    for name, rows in (("T1", cell.one), (f"T{model.T}", cell.block)):
        rows.out.fill_(float("nan"))
        entry[f"{name}_us"] = time_us(bench_decode.ours(pool, rows), model.DEVICE)
    want = cell.one.out[0].clone() if alone is None else alone
    last = cell.block.out[model.T - 1 :: model.T]
    entry["differing"] = different_elements(cell.one.out[0], want) + different_elements(
        last, cell.one.out
    )
    return entry, want


def tune(
    lengths: list[int], batch_sizes: list[int], budget: Budget
) -> Iterator[dict[str, Any]]:
    """One entry per batch size and length, then the summary of all."""
    if model.DEVICE == "cuda":
        compile_all(min(8, os.cpu_count() or 1))
    modules = bench_decode.host_attention()
    pool = bench_decode.make_pool(max(lengths) * max(batch_sizes))
    size = (max(batch_sizes), model.Q_HEADS, model.DIM)
    queries = torch.randn(size, device=model.DEVICE, dtype=torch.bfloat16)
    tries, entries = candidates(), []
    for length in lengths:
        alone: dict[str, torch.Tensor] = {}
        for bs in sorted(batch_sizes):
            if not budget.allows(f"tune at {bs} x {length}"):
                continue
            cell = make_cell(pool, queries, bs, length)
            entry: dict[str, Any] = {"bs": bs, "length": length, "host_us": None}
            if modules is not None:
                host = bench_decode.host_decode(modules, pool, cell.one)
                entry["host_us"] = time_us(host, model.DEVICE)
            for candidate in tries:
                name = candidate.name
                try:
                    with tried(candidate):
                        entry[name], alone[name] = measure(pool, cell, alone.get(name))
                except (triton.runtime.errors.OutOfResources, RuntimeError) as error:
                    entry[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
            entries.append(entry)
            _show(entry)
            yield entry
    found = summary(entries)
    show({"best": found["best"]})
    yield found


def _show(entry: dict[str, Any]) -> None:
    print(f"bs={entry['bs']} length={entry['length']} host_us={entry['host_us']}")
    for name, given in entry.items():
        if isinstance(given, dict):
            cells = "  ".join(
                f"{k}={v:.1f}" if isinstance(v, float) else f"{k}={v}"
                for k, v in given.items()
            )
            print(f"  {name:45} {cells}", flush=True)


def summary(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Per candidate: worst time over the host's, geometric mean; and the best.

    best: bits kept everywhere, worst ratio at most 1, then the least geometric mean of
    all times; without such a candidate the one with the least worst ratio.
    """
    names = (
        [n for n in entries[0] if isinstance(entries[0][n], dict)] if entries else []
    )
    table: dict[str, Any] = {}
    for name in names:
        given = [entry[name] for entry in entries]
        if any("error" in g or g["differing"] for g in given):
            table[name] = {"sound": False}
            continue
        times = [v for g in given for k, v in g.items() if k.endswith("_us")]
        ratios = [
            g["T1_us"] / e["host_us"]
            for g, e in zip(given, entries, strict=True)
            if e["host_us"]
        ]
        table[name] = {
            "sound": True,
            "worst_ratio": max(ratios, default=0.0),
            "geomean_us": math.exp(sum(map(math.log, times)) / len(times)),
        }
        show({"candidate": name, **table[name]})
    sound = {n: row for n, row in table.items() if row["sound"]}
    never = {n: row for n, row in sound.items() if row["worst_ratio"] <= 1.0}
    best = None
    if never:
        best = min(never, key=lambda n: never[n]["geomean_us"])
    elif sound:
        best = min(sound, key=lambda n: sound[n]["worst_ratio"])
    return {"best": best, "candidates": table}


if __name__ == "__main__":
    _compile([int(index) for index in sys.argv[1:]])
