# SPDX-License-Identifier: Apache-2.0
"""Draw docs/img/attention.svg and docs/img/speed.svg from the JSON under results/.

    scripts/plots

Needs matplotlib. The same files give the same pictures, byte for byte.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

from tools import ROOT

IMAGES = ROOT / "docs" / "img"
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#7f7f7f")
TITLE = "random ids"
# Neither dates nor random ids: a drawing made again is the same file.
matplotlib.rcParams["svg.hashsalt"] = "sglang_exact"
METADATA = {"Date": None, "Creator": None}


def rows(name: str, key: str) -> list[dict[str, Any]]:
    """The rows `key` of a file under results/."""
    found = json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))
    return list(found[key])


def save(figure: Any, name: str) -> None:
    """Write one picture."""
    figure.savefig(IMAGES / name, metadata=METADATA, bbox_inches="tight")
    print(f"written: docs/img/{name}")


def attention() -> None:
    """Microseconds of decode, verify and the host's decode over keys, by requests."""
    found = rows("kernels/attention_bench.json", "attention")
    sizes = sorted({row["bs"] for row in found})
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(10, 3.2))
    lines = (
        ("decode_us", "one row", "-"),
        ("verify_us", "8 draft positions", "--"),
        ("host_decode_us", "host, deterministic, one row", ":"),
    )
    for axis, size in zip(axes, sizes, strict=True):
        mine = [row for row in found if row["bs"] == size]
        for (key, label, style), colour in zip(lines, COLOURS, strict=False):
            axis.plot(
                [row["length"] for row in mine], [row[key] for row in mine],
                style, color=colour, marker="o", markersize=3, label=label,
            )  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="keys", title=f"{size} requests")
        axis.set_xticks([row["length"] for row in mine])
        axis.set_xticklabels([f"{row['length'] // 1024}k" for row in mine])
        axis.minorticks_off()
    axes[0].set(ylabel="us, H200", title="1 request")
    axes[-1].legend(fontsize=7)
    save(figure, "attention.svg")


def speed() -> None:
    """Tokens per second over acceptance length, and over requests in flight."""
    found = rows("bench/accept.json", "rows")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.2))
    figure.suptitle(
        "H200 (in step: another one), 64 layers, random weights, "
        "acceptance set by an oracle"
    )
    swept = [row for row in found if "acceptance set" in row["title"]]
    left.plot(
        [row["acceptance"]["micro"] for row in swept], [row["tok_s"] for row in swept],
        color=COLOURS[0], marker="o", label="exact, DFlash2-shaped, 8 draft tokens",
    )  # fmt: skip
    plain = [r for r in found if r["server"] == "plain" and r["concurrency"] == 1]
    left.axhline(plain[0]["tok_s"], color=COLOURS[2], label="exact, plain")
    left.set(xlabel="acceptance length (oracle)", ylabel="tok/s, one in flight")
    left.legend(fontsize=7)
    loads = (1, 8, 32)
    kinds = (
        ("exact-dflash2", TITLE, "exact-dflash2"),
        ("exact-dflash2", f"{TITLE}, requests in step", "the same, requests in step"),
        ("host-dflash2", TITLE, "host-dflash2, requests in step"),
        ("host-plain", TITLE, "host-plain"),
        ("plain", TITLE, "plain"),
    )
    for place, (server, title, label) in enumerate(kinds):
        mine = {
            row["concurrency"]: row["tok_s"]
            for row in found
            if row["server"] == server and row["title"] == title
        }
        bars = right.bar(
            [loads.index(n) + 0.17 * (place - 2) for n in mine], mine.values(), 0.16,
            color=COLOURS[place], label=label,
        )  # fmt: skip
        right.bar_label(bars, fmt="%.0f", fontsize=5)
    right.set_xticks(range(len(loads)), [str(n) for n in loads])
    right.set(xlabel="in flight", ylabel="tok/s, prefill included")
    right.legend(fontsize=7)
    save(figure, "speed.svg")


def main(args: argparse.Namespace) -> int:
    """Draw both."""
    attention()
    speed()
    return 0
