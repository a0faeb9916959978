# SPDX-License-Identifier: Apache-2.0
"""Check and time candidate tiles of the small-M GEMM on this machine's GPU.

One run, about a minute: for every (N, K) of the 27B target and of its draft, at one
rank or with `--tp 2` at one of two (on one GPU: ranks do not meet in a GEMM)

1. bits: DeepGEMM (deterministic) row by row at M = 1..16, 17, 24 and 64, and every
   candidate tile at the same M, against DeepGEMM's rows at M = 64, as integers;
2. time at M = 1 and 8, as a CUDA graph over weights that together exceed L2: tiles,
   DeepGEMM and cuBLAS; then again with a small kernel before each GEMM, as in a model
   (``chain``), for the leaders, with and without programmatic launch.

Prints one table and writes JSON; rows for tiles.py are printed last. Exit code 1 if
any candidate's bits differ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from sglang_exact_kernels.small_m_gemm import small_m_gemm
from sglang_exact_kernels.tiles import (
    SHAPES_27B,
    SHAPES_27B_TP2,
    SHAPES_DRAFT,
    SHAPES_DRAFT_TP2,
    SMEM_LIMIT,
    Tile,
)
from tools import ROOT, SCRIPTS

ONE_RANK = tuple(dict.fromkeys(SHAPES_27B + SHAPES_DRAFT))
SHAPES = {
    1: ONE_RANK,
    2: tuple(s for s in dict.fromkeys(SHAPES_27B_TP2 + SHAPES_DRAFT_TP2)
             if s not in ONE_RANK),
}  # fmt: skip
"""(N, K) by the number of ranks; what is whole on each of two is in one rank's."""
CHECK_M = (*range(1, 17), 17, 24, 64)
TIME_M = (1, 8)
L2_BYTES = 128 << 20
"""Rotated weights exceed this: 50 MiB of L2 on an H200, 128 MiB on a 12.0 card."""

CANDIDATES = (
    Tile(16, 256, 2, 5),
    Tile(16, 256, 4, 6),
    Tile(16, 512, 2, 4),
    Tile(16, 512, 4, 4),
    Tile(32, 128, 4, 5),
    Tile(32, 128, 4, 8),
    Tile(32, 256, 4, 3),
    Tile(32, 256, 4, 4),
    Tile(32, 256, 4, 5),
    Tile(32, 512, 4, 3),
    Tile(64, 128, 4, 5),
    Tile(64, 256, 4, 4),
    Tile(64, 256, 8, 4),
    Tile(64, 64, 4, 8, swap_ab=True),
    Tile(64, 128, 4, 5, swap_ab=True),
    Tile(64, 256, 4, 3, swap_ab=True),
    Tile(128, 64, 4, 6, swap_ab=True),
)


def label(tile: Tile) -> str:
    """Short name of a tile, e.g. 32x256 w4 s4 or 64x128 w4 s5 swap pdl."""
    return str(
        f"{tile.block_n}x{tile.block_k} w{tile.num_warps} s{tile.num_stages}"
        + " swap" * tile.swap_ab
        + " pdl" * tile.pdl
    )


def candidates(limit: int) -> list[Tile]:
    """Candidates whose pipeline fits into `limit` bytes, each without and with PDL."""
    fits = [t for t in CANDIDATES if t.smem_bytes <= limit]
    return fits + [t._replace(pdl=True) for t in fits]


def failure(tile: Tile, n: int, k: int) -> str | None:
    """Why `tile` does not run on this device, or None; compiles it if need be."""
    a, w = random_inputs(n, k, 1)
    try:
        small_m_gemm(a[:1].contiguous(), w[0], tile=tile)
        torch.cuda.synchronize()
    except (OutOfResources, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def deep_gemm_nt(a: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """DeepGEMM's bf16 kernel in its deterministic mode: out = a @ w^T."""
    import deep_gemm

    deep_gemm.use_deterministic_algorithms(True)
    deep_gemm.bf16_gemm_nt(a, w, out)


def bits_equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Compare as integers: 0.0 and -0.0 differ, equal NaNs do not."""
    return bool(torch.equal(x.view(torch.int16), y.view(torch.int16)))


def random_inputs(n: int, k: int, copies: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A[64, K] and W[copies, N, K], N(0, 1) and N(0, 1/K), seed 0."""
    gen = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(64, k, device="cuda", dtype=torch.bfloat16, generator=gen)
    w = torch.randn(copies, n, k, device="cuda", dtype=torch.bfloat16, generator=gen)
    return a, w.mul_(k**-0.5)


def check_bits(n: int, k: int, tiles: list[Tile]) -> dict[str, Any]:
    """M at which DeepGEMM, cuBLAS and each tile part from DeepGEMM's rows at M = 64."""
    a, ws = random_inputs(n, k, 1)
    w = ws[0]
    want = torch.empty(64, n, device="cuda", dtype=torch.bfloat16)
    deep_gemm_nt(a, w, want)
    differs: dict[str, list[int]] = {}
    for m in CHECK_M:
        rows = a[:m].contiguous()
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        deep_gemm_nt(rows, w, out)
        outs = {"deep_gemm": out, "cublas": rows @ w.t()}
        outs.update((label(t), small_m_gemm(rows, w, tile=t)) for t in tiles)
        for name, got in outs.items():
            if not bits_equal(got, want[:m]):
                differs.setdefault(name, []).append(m)
    return differs


def time_graph(fn: Any, copies: int, rounds: int = 6) -> float:
    """Microseconds per call of fn(i), i over `copies`, replayed as one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fn(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            fn(i)
    graph.replay()
    spans = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3 / copies)
    return float(sorted(spans)[len(spans) // 2])


def time_shape(n: int, k: int, tiles: list[Tile]) -> dict[str, dict[str, Any]]:
    """Times in us of one shape by M: `alone` for all, `chain` for the leaders."""
    copies = max(1, min(160, -(-4 * L2_BYTES // (n * k * 2))))
    a64, w = random_inputs(n, k, copies)
    result: dict[str, dict[str, Any]] = {}
    runs: dict[int, dict[str, Any]] = {}
    for m in TIME_M:
        a = a64[:m].clone()
        out = torch.empty(m, n, device="cuda", dtype=a64.dtype)
        runs[m] = {
            "cublas": lambda i, a=a, out=out: torch.mm(a, w[i].t(), out=out),
            "deep_gemm": lambda i, a=a, out=out: deep_gemm_nt(a, w[i], out),
        }
        for t in tiles:
            runs[m][label(t)] = lambda i, a=a, out=out, t=t: small_m_gemm(
                a, w[i], out=out, tile=t
            )
        alone = {name: time_graph(fn, copies) for name, fn in runs[m].items()}
        result[str(m)] = {"alone": alone}
    names = ["cublas", "deep_gemm", *leaders(tiles, result)]
    for m in TIME_M:
        source, scratch = a64[:m].clone(), torch.empty_like(a64[:m])

        def before(i: int, s: Any = source, x: Any = scratch) -> None:
            torch.mul(s, 1.0, out=x)

        chain = {x: time_pair(before, runs[m][x], copies) for x in names}
        result[str(m)].update(chain=chain, chain_base_us=time_graph(before, copies))
    return result


def time_pair(before: Any, fn: Any, copies: int) -> float:
    """Microseconds per call of before(i) and fn(i) in turn."""

    def pair(i: int) -> None:
        before(i)
        fn(i)

    return time_graph(pair, copies)


def leaders(tiles: list[Tile], times: dict[str, dict[str, Any]]) -> list[str]:
    """The five plain tiles with the least summed time, each also with PDL."""

    def cost(tile: Tile) -> float:
        return float(sum(t["alone"][label(tile)] for t in times.values()))

    best = sorted((t for t in tiles if not t.pdl), key=cost)[:5]
    return [label(t._replace(pdl=pdl)) for t in best for pdl in (False, True)]


def choose(times: dict[str, dict[str, Any]], differs: dict[str, Any]) -> str | None:
    """The tile with the least summed chain time among those with DeepGEMM's bits.

    PDL is chosen only where it saves 1 % or more: less is noise. None where DeepGEMM
    is faster by more than 3 %.
    """
    names = [x for x in times["1"]["chain"] if x[0].isdigit() and x not in differs]
    if not names:
        return None

    def cost(name: str) -> float:
        handicap = 1.01 if name.endswith("pdl") else 1.0
        return float(handicap * sum(t["chain"][name] for t in times.values()))

    best = min(names, key=cost)
    return best if cost(best) <= 1.03 * cost("deep_gemm") else None


def table_row(shape: str, name: str | None, tiles: list[Tile]) -> str:
    """The line for tiles.py; `_SWEEP` there says where the numbers come from."""
    if name is None:
        return f"({shape.replace('x', ', ')}): None,"
    tile = next(t for t in tiles if label(t) == name)
    n, k = shape.split("x")
    flags = "".join(
        f", {flag}=True" for flag in ("swap_ab", "pdl") if getattr(tile, flag)
    )
    numbers = ", ".join(map(str, tile[:4]))
    return f"({n}, {k}): _swept({numbers}{flags}),"


def write_tiles(path: Path, result: dict[str, Any], tiles: list[Tile], tp: int) -> None:
    """Put the chosen rows between the markers of tiles.py.

    Raises RuntimeError when the markers are not there once each.
    """
    text = path.read_text()
    mark, suffix = ("sweep", "") if tp == 1 else (f"sweep tp{tp}", f"_TP{tp}")
    begin, end = f"# {mark}: begin", f"# {mark}: end"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise RuntimeError(f"{path}: expected one line each of {begin!r} and {end!r}")
    head, rest = text.split(begin)
    first, _, rest = rest.partition("\n")
    tail = rest.split(end)[1]
    about = result["facts"]
    script = "scripts/sweep_small_m.py" + (f" --tp {tp}" if tp > 1 else "")
    source = f"{about['gpu']}, {about['date']}, {script}"
    rows = [
        f"    {table_row(shape, row['choice'], tiles)}"
        for shape, row in result["shapes"].items()
    ]
    lines = [
        f"{begin}{first}",
        f'_SWEEP{suffix} = "{source}"',
        f"_SWEPT_90{suffix}: dict[tuple[int, int], Tile | None] = {{",
        *rows,
        "}",
        end,
    ]
    path.write_text(head + "\n".join(lines) + tail)


def warm_up(slot: int, slots: int, tp: int, tiles: list[Tile]) -> None:
    """Fill the compile caches with this worker's share."""
    jobs = list(itertools.product((1, 64, 16, 24), SHAPES[tp]))
    for m, (n, k) in jobs[slot::slots]:
        a, w = random_inputs(n, k, 1)
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        deep_gemm_nt(a[:m].contiguous(), w[0], out)
    pairs = itertools.product(tiles, ((96, 5120), (5120, 6144)))
    for tile, (n, k) in list(pairs)[slot::slots]:
        failure(tile, n, k)
    torch.cuda.synchronize()


def start_workers(slots: int, tp: int) -> None:
    """Compile in parallel; a worker that fails ends the run."""
    program = str(SCRIPTS / "sweep_small_m.py")
    args = [sys.executable, program, "--tp", str(tp), "--slots", str(slots)]
    args += ["--warm-up"]
    jobs = [subprocess.Popen([*args, str(i)]) for i in range(slots)]
    failed = sum(job.wait() != 0 for job in jobs)
    if failed:
        raise RuntimeError(f"{failed} of {slots} compile workers failed, see above")


def report(n: int, k: int, row: dict[str, Any]) -> None:
    """Two lines per shape: GB/s by M of the best tile, DeepGEMM, cuBLAS; the choice."""
    mega = n * k * 2 / 1e6
    print(f"{n}x{k}: bits differ: {row['differs'] or 'none'}")
    for m, times in row["times"].items():
        tiles = {x: t for x, t in times["alone"].items() if x[0].isdigit()}
        best = sorted(tiles, key=lambda x: tiles[x])[:3]
        shown = sorted(times["chain"], key=times["chain"].__getitem__)
        kept = [x for i, x in enumerate(shown) if i < 4 or not x[0].isdigit()]
        chain = ", ".join(f"{x} {times['chain'][x]:.2f}" for x in kept)
        speeds = ", ".join(
            f"{x} {mega / times['alone'][x] * 1e3:.0f}"
            for x in ["deep_gemm", "cublas", *best]
        )
        print(f"  M={m} GB/s: {speeds}")
        print(f"       chain us (base {times['chain_base_us']:.2f}): {chain}")
    print(f"  choice: {row['choice']}", flush=True)


def facts() -> dict[str, Any]:
    """What a figure needs beside it: versions, device, date, command."""
    from sglang_exact.host.source import version

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False)
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.stdout.split("\n")[0].strip(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "sgl-deep-gemm": version("sgl-deep-gemm"),
        "seed": 0,
    }


def main(args: argparse.Namespace) -> int:
    """Run the sweep; 0 if every candidate has DeepGEMM's bits."""
    major, minor = torch.cuda.get_device_capability()
    tiles = candidates(SMEM_LIMIT[major * 10 + minor])
    if args.warm_up is not None:
        warm_up(args.warm_up, args.slots, args.tp, tiles)
        return 0
    begin = time.monotonic()
    start_workers(args.slots, args.tp)
    result: dict[str, Any] = {"facts": facts(), "shapes": {}}
    failed = {t: failure(t, 5120, 6144) for t in tiles}
    for tile, why in failed.items():
        if why is not None:
            print(f"left out: {label(tile)}: {why}")
    tiles = [t for t in tiles if failed[t] is None]
    result["left_out"] = {label(t): why for t, why in failed.items() if why}
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    wrong = 0
    for n, k in SHAPES[args.tp]:
        differs = check_bits(n, k, tiles)
        wrong += len(differs.keys() - {"cublas"})
        times = time_shape(n, k, tiles)
        row = {"differs": differs, "times": times, "choice": choose(times, differs)}
        result["shapes"][f"{n}x{k}"] = row
        report(n, k, row)
        args.output_file.write_text(json.dumps(result, indent=1))
        torch.cuda.empty_cache()
    if args.write_tiles:
        folder = ROOT / "kernels" / "sglang_exact_kernels"
        write_tiles(folder / "tiles.py", result, tiles, args.tp)
    print("rows for tiles.py:")
    for shape, row in result["shapes"].items():
        if row["choice"]:
            print(f"        {table_row(shape, row['choice'], tiles)}")
    controls = [s for s, r in result["shapes"].items() if "cublas" in r["differs"]]
    print(
        f"control: cuBLAS differs at {len(controls)} of {len(SHAPES[args.tp])} shapes"
    )
    print(f"tiles or DeepGEMM rows that differ: {wrong} (expected 0)")
    print(f"total {time.monotonic() - begin:.0f} s -> {args.output_file}")
    return 1 if wrong or not controls else 0
