# SPDX-License-Identifier: Apache-2.0
"""The memory record as a table and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_exact.bench import runs
from sglang_exact.bench.memory.measure import SETTINGS
from sglang_exact.bench.run import BenchRun
from sglang_exact.view import charts
from sglang_exact.view.tables import TableData, number

IN_USE = "in_use_gib"
FIGURES = {
    "weights GiB": ("weight_gib", 2),
    "KV GiB": ("kv_gib", 2),
    "KV tokens": ("kv_tokens", 0),
    "graphs GiB": ("graph_gib", 2),
    "not named GiB": ("not_named_gib", 2),
    "in use GiB (NVML)": (IN_USE, 2),
    "free at start GiB": ("free_at_start_gib", 2),
}
"""Column -> what a row calls it, and its digits."""


def overheads(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each server has more (less: negative) than the plain one.

    `draft_gib` is what the drafter takes, where it can be told: memory that the host
    does not name plus graphs, both beyond the plain server's; None for a server that
    does not say that it speculates.
    """
    plain = {r["server"]: r for r in rows if r["plain"]}
    found = []
    for other in rows:
        name = other.get("base") or next(iter(plain), None)
        base = plain.get(name)
        if other["plain"] or base is None:
            continue
        apart: dict[str, Any] = {"server": other["server"], "base": name}
        for key, _ in FIGURES.values():
            sides: tuple[Any, Any] = (other.get(key), base.get(key))
            apart[key] = None if None in sides else sides[0] - sides[1]
        unnamed = apart["not_named_gib"]
        drafts = unnamed is not None and other["speculative"]
        apart["draft_gib"] = unnamed + apart["graph_gib"] if drafts else None
        if base["kv_tokens"] and other["kv_tokens"] is not None:
            apart["kv_tokens_share"] = other["kv_tokens"] / base["kv_tokens"]
        apart["settings"] = [
            f"{k}: {other['settings'][k]} against {base['settings'][k]}"
            for k in SETTINGS
            if other["settings"].get(k) != base["settings"].get(k)
        ]
        found.append(apart)
    return found


def tables(run: BenchRun) -> list[TableData]:
    """Memory by server, then what the drafter takes."""
    data = TableData("memory: where it goes", ("server", *FIGURES))
    for found in sorted(run.rows, key=lambda r: not r["plain"]):
        nvml = found.get("nvml")
        known = {**found, IN_USE: nvml["used_gib"] if nvml else None}
        cells = (number(known[key], digits) for key, digits in FIGURES.values())
        data.rows.append((found["server"], *cells))
    for apart in overheads(run.rows):
        cells = (
            "" if key == IN_USE else _signed(apart[key], digits)
            for key, digits in FIGURES.values()
        )
        data.rows.append((f"{apart['server']} - {apart['base']}", *cells))
        data.below.extend(_overhead_lines(apart))
    data.below.append(
        "weights: the target's alone; not named: draft weights and KV, recurrent "
        "states, activations, the driver's own (NVML minus what the host names)"
    )
    data.below.extend(runs.remarks(run))
    return [data]


def _overhead_lines(apart: Mapping[str, Any]) -> list[str]:
    name = apart["server"]
    lines = []
    if apart["draft_gib"] is not None:
        lines.append(f"{name}: the drafter takes {apart['draft_gib']:.2f} GiB")
    if apart.get("kv_tokens_share") is not None:
        lines.append(
            f"{name}: the KV pool holds {apart['kv_tokens_share']:.1%} of the tokens "
            f"of {apart['base']}"
        )
    lines += [
        f"{name} differs from {apart['base']} in {text}" for text in apart["settings"]
    ]
    return lines


def _signed(value: float | None, digits: int) -> str:
    return number(value, digits) if value is None else f"{value:+,.{digits}f}"


def memory_plot(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Memory by server."""
    keys = {
        "weights": "weight_gib",
        "KV cache": "kv_gib",
        "graphs": "graph_gib",
        "not named by the host": "not_named_gib",
    }
    found = [
        charts.Bar(
            "",
            str(row["server"]),
            [(n, row[k]) for n, k in keys.items() if row.get(k) is not None],
        )
        for row in rows
    ]
    return charts.bars("GPU memory", [b for b in found if b.parts], "GiB")
