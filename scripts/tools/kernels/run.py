# SPDX-License-Identifier: Apache-2.0
"""Time the overlay's kernels beside the host's, in one run.

    python scripts/bench_kernels.py --out FILE [--seconds 120] [--parts sweep,gdn]
        [--lengths 2048,32768] [--batch-sizes 1,8] [--steps 0:2048,32768:8192] [--tune]

Parts: `sweep` tries prefill tiles (bits at several cuts, error, time); `gathered` tiles
for a copy of the keys, `specialised` (only if named) sm90's own kernel on a copy;
`prefill` times prefill steps (prefix:tokens) of ours, of the host's deterministic
kernel and of its default; `attention` times decode and verify rows; `gdn` a verify
block against one decode step. `--tune` adds other tiles and splits of decode_attention,
their bits and a choice; `--parts tune` is that alone.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sglang_exact_kernels.gdn_verify import gdn_verify
from tools.kernels import decode as bench_decode
from tools.kernels import model
from tools.kernels import prefill as bench_prefill
from tools.kernels import tune as bench_tune
from tools.kernels.gdn_cases import GdnShape, host_decode_step, make_case
from tools.kernels.timing import Budget, show, time_us, versions


def bench_gdn(batch_sizes: list[int], budget: Budget) -> Iterator[dict[str, Any]]:
    for bs in batch_sizes:
        if not budget.allows(f"gdn of {bs}"):
            continue
        shape = GdnShape(
            bs,
            model.T,
            model.GDN_HEADS,
            model.GDN_V_HEADS,
            model.GDN_DIM,
            model.GDN_DIM,
        )
        case = make_case(shape, torch.device(model.DEVICE), seed=0)
        records, rows = case.records()
        size = (1, bs * model.T, model.GDN_V_HEADS, model.GDN_DIM)
        out = torch.empty(size, device=model.DEVICE, dtype=torch.bfloat16)
        verify = functools.partial(
            gdn_verify,
            *(case.mixed_qkv, case.a, case.b, case.A_log, case.dt_bias),
            ssm_states=case.ssm_states,
            cache_indices=case.cache_indices,
            records=records,
            record_rows=rows,
            num_draft_tokens=model.T,
            num_k_heads=model.GDN_HEADS,
            scale=case.scale,
            out=out,
        )
        entry: dict[str, Any] = {
            "bs": bs,
            "gdn_verify_us": time_us(verify, model.DEVICE),
        }
        if bench_decode.host_attention() is not None:
            step = functools.partial(
                host_decode_step,
                mixed_qkv=case.mixed_qkv[:: model.T],
                a=case.a[:: model.T],
                b=case.b[:: model.T],
                A_log=case.A_log,
                dt_bias=case.dt_bias,
                scale=case.scale,
                source=case.ssm_states,
                target=case.ssm_states,
                out=out,
                indices=rows,
            )
            entry["host_gdn_decode_us"] = time_us(step, model.DEVICE)
            ratio = entry["gdn_verify_us"] / entry["host_gdn_decode_us"]
            entry["verify/decode"] = ratio
        show(entry)
        yield entry


def main(options: argparse.Namespace) -> int:
    """Run the parts that were asked for."""
    budget = Budget(options.seconds)
    torch.manual_seed(0)
    report: dict[str, Any] = {
        "versions": versions(model.DEVICE),
        "draft_tokens": model.T,
        "left_out": budget.left_out,
    }
    shape = bench_prefill.Shape(model.Q_HEADS, model.KV_HEADS, model.DIM)
    prefill = (shape, options.steps, model.DEVICE, budget)
    batch_sizes, lengths = options.batch_sizes, options.lengths
    parts = {
        "sweep": lambda: bench_prefill.sweep(*prefill),
        "gathered": lambda: bench_prefill.sweep_gathered(*prefill),
        "specialised": lambda: bench_prefill.specialised(*prefill),
        "prefill": lambda: bench_prefill.compare(*prefill),
        "attention": lambda: bench_decode.bench_attention(lengths, batch_sizes, budget),
        "gdn": lambda: bench_gdn(batch_sizes, budget),
        "tune": lambda: bench_tune.tune(lengths, batch_sizes, budget),
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
    return 0


def write(report: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
