# SPDX-License-Identifier: Apache-2.0
"""Time the overlay's kernels beside the host's, in one run.

    python scripts/bench_kernels.py --out FILE [--seconds 120] [--parts sweep,gdn]
        [--lengths 2048,32768] [--batch-sizes 1,8] [--steps 0:2048,32768:8192] [--tune]

Parts: `sweep` tries prefill tiles (bits at several cuts, error, time); `gathered` a
variant that copies the keys first, `specialised` (only if named) one whose warps
specialise; `prefill` times prefill steps (prefix:tokens) of
ours, of the host's deterministic kernel and of its default; `attention` times decode
and verify rows; `gdn` a verify block against one decode step. `--tune` adds other tiles
of decode_attention.

Decode and verify times are one launch replayed from a CUDA graph with a cold L2, median
of about 20 ms of replays. Shapes are the 27B model's: GDN 16 key and 48 value heads of
128, attention 24 query and 4 KV heads of 256, bf16. Host columns need an importable
SGLang and are empty without one. Prints a line per figure; FILE is rewritten after
every one. When --seconds are over, the rest is listed under left_out.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))

import bench_prefill
from bench_timing import Budget, show, time_us, versions
from gdn_cases import GdnShape, host_decode_step, make_case

from sglang_exact_kernels import arch
from sglang_exact_kernels import decode_attention as attention
from sglang_exact_kernels.gdn_verify import gdn_verify
from sglang_exact_kernels.reference import verify_rows_reference

Q_HEADS, KV_HEADS, DIM = 24, 4, 256
GDN_HEADS, GDN_V_HEADS, GDN_DIM = 16, 48, 128
T = 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOST_CONTEXT = 135_168
HOST_SPLIT = 256
"""The host's split tile in deterministic mode; it unrolls over HOST_CONTEXT."""


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
    k = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    v = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    return Pool(k, v, torch.arange(keys, device=DEVICE))


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
    at = torch.arange(bs, device=DEVICE)[:, None] * length
    q = torch.randn(bs * positions, Q_HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    return Rows(
        bs,
        positions,
        length,
        q,
        torch.empty_like(q),
        (torch.arange(bs + 1, device=DEVICE) * prefix).to(torch.int32),
        (at + torch.arange(prefix, device=DEVICE)).flatten().contiguous(),
        (at + prefix + torch.arange(positions, device=DEVICE)).flatten().contiguous(),
    )


def ours(pool: Pool, rows: Rows) -> Callable[[], None]:
    context = rows.length
    acc, stat = attention.scratch_shapes(len(rows.q), Q_HEADS, DIM, context)
    part_acc = torch.empty(acc, device=DEVICE)
    part_stat = torch.empty(stat, device=DEVICE)

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
        x.to(DEVICE)
        for x in verify_rows_reference(
            rows.indptr, rows.indices, rows.loc, rows.T, HOST_SPLIT
        )
    )
    logits = torch.empty(count, Q_HEADS, splits, DIM, device=DEVICE)
    lse = torch.empty(count, Q_HEADS, splits, device=DEVICE)

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
    steps = torch.arange(rows.bs + 1, device=DEVICE)
    kv_indptr = (steps * rows.length).to(torch.int32)
    qo_indptr = (steps * rows.T).to(torch.int32)
    prefix = torch.full((rows.bs,), rows.length - rows.T, device=DEVICE).int()
    indices = torch.arange(rows.bs * rows.length, device=DEVICE)

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


def attention_entry(pool: Pool, modules: Any, bs: int, length: int) -> dict[str, Any]:
    one = make_rows(pool, bs, 1, length)
    block = make_rows(pool, bs, T, length)
    entry: dict[str, Any] = {
        "bs": bs,
        "length": length,
        "decode_us": time_us(ours(pool, one), DEVICE),
        "verify_us": time_us(ours(pool, block), DEVICE),
    }
    entry["verify/decode"] = entry["verify_us"] / entry["decode_us"]
    if modules is not None:
        entry["host_decode_us"] = time_us(host_decode(modules, pool, one), DEVICE)
        entry["decode/host"] = entry["decode_us"] / entry["host_decode_us"]
        entry["host_extend_us"] = time_us(host_extend(modules, pool, block), DEVICE)
        if bs * T * length <= 2**21:
            rows = host_decode(modules, pool, block)
            entry["host_rows_us"] = time_us(rows, DEVICE)
    keys_bytes = bs * length * KV_HEADS * DIM * 4
    entry["decode_tb_s"] = keys_bytes / entry["decode_us"] / 1e6
    return entry


def bench_attention(
    lengths: list[int], batch_sizes: list[int], budget: Budget
) -> Iterator[dict[str, Any]]:
    modules = host_attention()
    for bs in batch_sizes:
        for length in lengths:
            if not budget.allows(f"attention of {bs} x {length}"):
                continue
            entry = attention_entry(make_pool(bs * length), modules, bs, length)
            show(entry)
            yield entry


def bench_gdn(batch_sizes: list[int], budget: Budget) -> Iterator[dict[str, Any]]:
    for bs in batch_sizes:
        if not budget.allows(f"gdn of {bs}"):
            continue
        shape = GdnShape(bs, T, GDN_HEADS, GDN_V_HEADS, GDN_DIM, GDN_DIM)
        case = make_case(shape, torch.device(DEVICE), seed=0)
        inter, rows = case.buffers()
        size = (1, bs * T, GDN_V_HEADS, GDN_DIM)
        out = torch.empty(size, device=DEVICE, dtype=torch.bfloat16)
        verify = functools.partial(
            gdn_verify,
            *(case.mixed_qkv, case.a, case.b, case.A_log, case.dt_bias),
            ssm_states=case.ssm_states,
            cache_indices=case.cache_indices,
            intermediate_states=inter,
            intermediate_indices=rows,
            num_draft_tokens=T,
            num_k_heads=GDN_HEADS,
            scale=case.scale,
            out=out,
        )
        entry: dict[str, Any] = {"bs": bs, "gdn_verify_us": time_us(verify, DEVICE)}
        if host_attention() is not None:
            step = functools.partial(
                host_decode_step,
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
            entry["host_gdn_decode_us"] = time_us(step, DEVICE)
            ratio = entry["gdn_verify_us"] / entry["host_gdn_decode_us"]
            entry["verify/decode"] = ratio
        show(entry)
        yield entry


def tune(lengths: list[int], budget: Budget) -> Iterator[dict[str, Any]]:
    """Other tiles of decode_attention at each length; none of them is ever picked."""
    key = arch.capability(torch.device(DEVICE)) or 90
    kept, tiers = attention._TILES[key], dict(attention._TIERS)
    tile = attention._Tile
    candidates = [
        (kept, 1024),
        (kept, 2048),
        (tile(64, 8, 3, 1), 1024),
        (tile(32, 8, 5, 1), 1024),
        (tile(32, 8, 7, 1), 1024),
        (tile(32, 8, 9, 1), 1024),
        (tile(32, 4, 3, 2), 1024),
    ]
    for candidate, keys in candidates:
        for length in lengths:
            if not budget.allows(f"tune of {tuple(candidate)}, {keys}, {length}"):
                continue
            attention._TILES[key] = candidate
            attention._TIERS["KEYS_2"] = keys
            entry: dict[str, Any] = {
                "tile": list(candidate),
                "keys": keys,
                "length": length,
            }
            pool = make_pool(length)
            try:
                for positions in (1, T):
                    rows = make_rows(pool, 1, positions, length)
                    entry[f"T{positions}_us"] = time_us(ours(pool, rows), DEVICE)
            except triton.runtime.errors.OutOfResources as error:
                entry["error"] = str(error)
            finally:
                attention._TIERS.update(tiers)
                attention._TILES[key] = kept
            show(entry)
            yield entry


PARTS = ("sweep", "gathered", "prefill", "attention", "gdn")
MORE_PARTS = ("specialised",)
"""Run only when named: a kernel that could hang belongs in a process of its own."""


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def steps(text: str) -> list[tuple[int, int]]:
    """prefix:tokens pairs."""
    found = []
    for pair in text.split(","):
        prefix, tokens = pair.split(":")
        found.append((int(prefix), int(tokens)))
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--lengths", type=numbers, default=[2048, 32768, 131072])
    parser.add_argument("--batch-sizes", type=numbers, default=[1, 8, 32])
    parser.add_argument(
        "--steps",
        type=steps,
        default=[(0, 2048), (0, 8192), (32768, 8192), (122880, 8192)],
        help="prefill steps, prefix:tokens",
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    unknown = set(options.parts.split(",")) - {*PARTS, *MORE_PARTS}
    if unknown:
        parser.error(f"found parts {sorted(unknown)}, expected some of {PARTS}")
    return options


def main() -> None:
    options = arguments()
    budget = Budget(options.seconds)
    torch.manual_seed(0)
    report: dict[str, Any] = {
        "versions": versions(DEVICE),
        "draft_tokens": T,
        "left_out": budget.left_out,
    }
    shape = bench_prefill.Shape(Q_HEADS, KV_HEADS, DIM)
    prefill = (shape, options.steps, DEVICE, budget)
    batch_sizes, lengths = options.batch_sizes, options.lengths
    parts = {
        "sweep": lambda: bench_prefill.sweep(*prefill),
        "gathered": lambda: bench_prefill.sweep_gathered(*prefill),
        "specialised": lambda: bench_prefill.specialised(*prefill),
        "prefill": lambda: bench_prefill.compare(*prefill),
        "attention": lambda: bench_attention(lengths, batch_sizes, budget),
        "gdn": lambda: bench_gdn(batch_sizes, budget),
        "tune": lambda: tune([lengths[0], lengths[-1]], budget),
    }
    wanted = options.parts.split(",") + ["tune"] * options.tune
    for name in (part for part in parts if part in wanted):
        print(f"-- {name}", flush=True)
        report[name] = []
        for entry in parts[name]():
            report[name].append(entry)
            if name == "sweep":
                report["best_tile"] = bench_prefill.best(report[name])
            write(report, options.out)
    write(report, options.out)
    if "best_tile" in report:
        print(f"best prefill tile: {report['best_tile']}")
    for what in budget.left_out:
        print(f"left out: {what}")


def write(report: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
