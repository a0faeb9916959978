# SPDX-License-Identifier: Apache-2.0
"""Time gdn_verify and decode_attention beside the host's kernels, in one run.

    python scripts/bench_kernels.py [--output-file FILE] [--lengths 512,2048] [--tune]

Each time is one launch sequence replayed from a CUDA graph with a cold L2 (triton's
do_bench), median of about 20 ms of replays. Shapes are the 27B model's: GDN 16 key and
48 value heads of 128, attention 24 query and 4 KV heads of 256, bf16. Host columns need
an importable SGLang and are empty without one. Prints a table; JSON goes to FILE.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))

from gdn_cases import GdnShape, host_decode_step, make_case

from sglang_exact_kernels import decode_attention as attention
from sglang_exact_kernels.reference import verify_rows_reference

Q_HEADS, KV_HEADS, DIM = 24, 4, 256
T = 8
HOST_CONTEXT = 135_168
HOST_SPLIT = 256
"""The host's split tile in deterministic mode; it unrolls over HOST_CONTEXT."""


def time_us(launch: Callable[[], Any], rep_ms: int = 20) -> float:
    """Median microseconds of one graph replay of `launch`, L2 flushed in between."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return float(
        triton.testing.do_bench(
            graph.replay, warmup=5, rep=rep_ms, return_mode="median"
        )
        * 1000.0
    )


def host_attention() -> Any:
    """The host's decode and extend attention modules, or None without a host."""
    try:
        from sglang.kernels.ops.attention import decode_attention, extend_attention
    except ImportError:
        return None
    return decode_attention, extend_attention


class Pool(NamedTuple):
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor


def make_pool(keys: int) -> Pool:
    shape = (keys, KV_HEADS, DIM)
    k = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    v = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    return Pool(k, v, torch.arange(keys, device="cuda"))


class Rows(NamedTuple):
    """Static buffers of one attention measurement."""

    bs: int
    T: int
    length: int
    q: torch.Tensor
    out: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    loc: torch.Tensor


def make_rows(pool: Pool, bs: int, positions: int, length: int) -> Rows:
    """Requests of `length` keys each, the block's tokens included."""
    prefix = length - positions
    at = torch.arange(bs, device="cuda")[:, None] * length
    q = torch.randn(bs * positions, Q_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    return Rows(
        bs,
        positions,
        length,
        q,
        torch.empty_like(q),
        (torch.arange(bs + 1, device="cuda") * prefix).to(torch.int32),
        (at + torch.arange(prefix, device="cuda")).flatten().contiguous(),
        (at + prefix + torch.arange(positions, device="cuda")).flatten().contiguous(),
    )


def ours(pool: Pool, rows: Rows) -> Callable[[], None]:
    context = rows.length
    acc, stat = attention.scratch_shapes(len(rows.q), Q_HEADS, DIM, context)
    part_acc = torch.empty(acc, device="cuda")
    part_stat = torch.empty(stat, device="cuda")

    def launch() -> None:
        attention.decode_attention(
            rows.q,
            pool.k,
            pool.v,
            rows.out,
            kv_indptr=rows.indptr,
            kv_indices=rows.indices,
            part_acc=part_acc,
            part_stat=part_stat,
            sm_scale=DIM**-0.5,
            max_context_len=context,
            num_draft_tokens=rows.T,
            out_cache_loc=rows.loc,
        )

    return launch


def host_decode(modules: Any, pool: Pool, rows: Rows) -> Callable[[], None]:
    """The host's deterministic decode kernel; verify positions as rows of their own."""
    count = rows.bs * rows.T
    splits = -(-HOST_CONTEXT // HOST_SPLIT)
    row_indptr, row_splits, row_indices = (
        x.to("cuda")
        for x in verify_rows_reference(
            rows.indptr, rows.indices, rows.loc, rows.T, HOST_SPLIT
        )
    )
    logits = torch.empty(count, Q_HEADS, splits, DIM, device="cuda")
    lse = torch.empty(count, Q_HEADS, splits, device="cuda")

    def launch() -> None:
        modules[0].decode_attention_fwd(
            rows.q,
            pool.k,
            pool.v,
            rows.out,
            row_indptr,
            row_indices,
            logits,
            lse,
            row_splits,
            splits,
            DIM**-0.5,
            1.0,
            1.0,
        )

    return launch


def host_extend(modules: Any, pool: Pool, rows: Rows) -> Callable[[], None]:
    """The host's deterministic verify path: one unified extend launch."""
    steps = torch.arange(rows.bs + 1, device="cuda")
    kv_indptr = (steps * rows.length).to(torch.int32)
    qo_indptr = (steps * rows.T).to(torch.int32)
    prefix = torch.full((rows.bs,), rows.length - rows.T, device="cuda").int()
    indices = torch.arange(rows.bs * rows.length, device="cuda")

    def launch() -> None:
        modules[1].extend_attention_fwd_unified(
            rows.q,
            rows.out,
            pool.k,
            pool.v,
            1.0,
            1.0,
            qo_indptr,
            kv_indptr,
            indices,
            prefix,
            rows.T,
            sm_scale=DIM**-0.5,
        )

    return launch


def bench_attention(lengths: list[int], batch_sizes: list[int]) -> list[dict[str, Any]]:
    pool = make_pool(max(lengths) * max(batch_sizes))
    modules = host_attention()
    found = []
    for bs in batch_sizes:
        for length in lengths:
            one = make_rows(pool, bs, 1, length)
            block = make_rows(pool, bs, T, length)
            entry: dict[str, Any] = {
                "bs": bs,
                "length": length,
                "decode_us": time_us(ours(pool, one)),
                "verify_us": time_us(ours(pool, block)),
            }
            if modules is not None:
                entry["host_decode_us"] = time_us(host_decode(modules, pool, one))
                entry["host_extend_us"] = time_us(host_extend(modules, pool, block))
                if bs * T * length <= 2**21:
                    rows = host_decode(modules, pool, block)
                    entry["host_rows_us"] = time_us(rows)
            keys_bytes = bs * length * KV_HEADS * DIM * 4
            entry["decode_tb_s"] = keys_bytes / entry["decode_us"] / 1e6
            found.append(entry)
            show(entry)
    return found


def bench_gdn(batch_sizes: list[int]) -> list[dict[str, Any]]:
    found = []
    for bs in batch_sizes:
        case = make_case(
            GdnShape(bs, T, 16, 48, 128, 128), torch.device("cuda"), seed=0
        )
        inter, rows = case.buffers()
        out = torch.empty(1, bs * T, 48, 128, device="cuda", dtype=torch.bfloat16)
        entry: dict[str, Any] = {
            "bs": bs,
            "gdn_verify_us": time_us(
                lambda case=case, inter=inter, out=out: case.verify(
                    intermediate_states=inter, out=out
                )
            ),
        }
        if host_attention() is not None:
            entry["host_gdn_decode_us"] = time_us(
                lambda case=case, out=out, rows=rows: host_decode_step(
                    mixed_qkv=case.mixed_qkv[::T],
                    a=case.a[::T],
                    b=case.b[::T],
                    A_log=case.A_log,
                    dt_bias=case.dt_bias,
                    scale=case.scale,
                    source=case.ssm_states,
                    target=case.ssm_states,
                    out=out,
                    indices=rows,
                )
            )
        found.append(entry)
        show(entry)
    return found


def tune(lengths: list[int]) -> list[dict[str, Any]]:
    """Other tiles of decode_attention at each length; none of them is ever picked."""
    capability = torch.cuda.get_device_capability()
    key = capability[0] * 10 + capability[1]
    kept = attention._TILES[key]
    pool = make_pool(max(lengths))
    found = []
    tiers = dict(attention._TIERS)
    candidates = [
        (kept, 1024),
        (kept, 2048),
        (attention._Tile(64, 8, 3, 1), 1024),
        (attention._Tile(32, 8, 5, 1), 1024),
        (attention._Tile(32, 8, 7, 1), 1024),
        (attention._Tile(32, 8, 9, 1), 1024),
        (attention._Tile(32, 4, 3, 2), 1024),
    ]
    for tile, keys in candidates:
        attention._TILES[key] = tile
        attention._TIERS["KEYS_2"] = keys
        for length in lengths:
            entry: dict[str, Any] = {"tile": list(tile), "keys": keys, "length": length}
            for positions in (1, T):
                rows = make_rows(pool, 1, positions, length)
                try:
                    entry[f"T{positions}_us"] = time_us(ours(pool, rows))
                except triton.runtime.errors.OutOfResources as error:
                    entry["error"] = str(error)
            found.append(entry)
            show(entry)
    attention._TIERS.update(tiers)
    attention._TILES[key] = kept
    return found


def show(entry: dict[str, Any]) -> None:
    cells = [
        f"{name}={value:.1f}" if isinstance(value, float) else f"{name}={value}"
        for name, value in entry.items()
    ]
    print("  ".join(cells), flush=True)


def versions() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(sys.argv),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--lengths", default="512,2048,8192,32768,131072")
    parser.add_argument("--batch-sizes", default="1,8")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--output-file", type=Path)
    options = parser.parse_args()
    lengths = [int(n) for n in options.lengths.split(",")]
    batch_sizes = [int(n) for n in options.batch_sizes.split(",")]

    torch.manual_seed(0)
    report: dict[str, Any] = {"versions": versions(), "draft_tokens": T}
    report["gdn"] = bench_gdn(batch_sizes)
    report["attention"] = bench_attention(lengths, batch_sizes)
    if options.tune:
        report["tune"] = tune([lengths[0], lengths[-1]])
    if options.output_file:
        options.output_file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
