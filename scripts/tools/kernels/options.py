# SPDX-License-Identifier: Apache-2.0
"""Command lines of the kernels' programs. Reading one needs nothing but Python."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

PARTS = ("sweep", "gathered", "prefill", "attention", "gdn")
MORE_PARTS = ("specialised", "tune")
"""Run only when named: the first could hang and belongs in a process of its own."""


def numbers(text: str) -> list[int]:
    """Numbers and commas."""
    return [int(n) for n in text.split(",")]


def steps(text: str) -> list[tuple[int, int]]:
    """prefix:tokens pairs."""
    found = []
    for pair in text.split(","):
        prefix, tokens = pair.split(":")
        found.append((int(prefix), int(tokens)))
    return found


def bench(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Of scripts/bench_kernels.py."""
    parser = argparse.ArgumentParser(
        description="Time the overlay's kernels beside the host's, in one run.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--lengths", type=numbers, default=[2048, 32768, 131072])
    add("--batch-sizes", type=numbers, default=[1, 8, 32])
    add(
        "--steps",
        type=steps,
        default=[(0, 2048), (0, 8192), (32768, 8192), (122880, 8192)],
        help="prefill steps, prefix:tokens",
    )
    add("--parts", default=",".join(PARTS))
    add("--tune", action="store_true")
    add("--seconds", type=float, default=600.0)
    add("--out", type=Path)
    args = parser.parse_args(argv)
    unknown = set(args.parts.split(",")) - {*PARTS, *MORE_PARTS}
    if unknown:
        parser.error(f"found parts {sorted(unknown)}, expected some of {PARTS}")
    return args


def sweep(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Of scripts/sweep_small_m.py."""
    parser = argparse.ArgumentParser(
        description="Check and time candidate tiles of the small-M GEMM on this "
        "machine's GPU."
    )
    add = parser.add_argument
    add("--output-file", type=Path, default=Path("small_m_sweep.json"))
    add("--tp", type=int, default=1, choices=(1, 2))
    add("--slots", type=int, default=min(16, os.cpu_count() or 1))
    add("--warm-up", type=int, help="compile one share and leave")
    add("--write-tiles", action="store_true", help="edit tiles.py")
    return parser.parse_args(argv)


def launch(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Of scripts/launch_attention."""
    parser = argparse.ArgumentParser(
        description="Launch decode attention twice, then once between profiler marks: "
        "ours, the host's."
    )
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--keys", type=int, default=32768, help="of each request")
    return parser.parse_args(argv)
