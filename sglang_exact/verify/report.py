# SPDX-License-Identifier: Apache-2.0
"""Write the result: terminal table, JSON, and one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_exact.verify import plots, summary
from sglang_exact.verify.evidence_row import evidence_row
from sglang_exact.verify.model import (
    COULD_NOT_RUN,
    DIVERGED,
    NOT_EXERCISED,
    NOT_OFFERED,
    NOT_REACHED,
    VERIFIED,
)
from sglang_exact.verify.summary import Run
from sglang_exact.view import page
from sglang_exact.view.output import json_bytes, write_atomic

STYLES = {
    VERIFIED: "green",
    DIVERGED: "bold red",
    NOT_EXERCISED: "yellow",
    NOT_OFFERED: "cyan",
    COULD_NOT_RUN: "yellow",
    NOT_REACHED: "yellow",
}


def html(run: Run) -> str:
    """The page. Everything a server sent is escaped; nothing is loaded from outside."""
    return page.render(
        "sglang_exact.verify",
        "report.html.j2",
        # A state is one class, not one for each of its words.
        {"word": lambda text: text.replace(" ", "-")},
        result=summary.to_json(run),
        probes=summary.probe_rows(run),
        positions=plots.positions(run),
        curves=plots.logprob_curves(run),
        acceptance=plots.acceptance_bars(run),
        set_up=set_up_rows(run),
    )


def set_up_rows(run: Run) -> list[dict[str, Any]]:
    """One row per field of the servers' descriptions, marked where they differ."""
    keys = dict.fromkeys(
        [k for s in run.servers for k in s.fields]
        + [f"sglang_exact.{k}" for s in run.servers for k in s.exact]
    )
    rows = []
    for key in keys:
        values = [_field(s.fields, s.exact, key) for s in run.servers]
        rows.append({"key": key, "cells": values, "differs": len(set(values)) > 1})
    return rows


def _field(fields: dict[str, Any], exact: dict[str, Any], key: str) -> str:
    name = key.removeprefix("sglang_exact.")
    source = fields if name == key else exact
    if name not in source:
        return ""
    value = source[name]
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def write_files(
    run: Run, *, json_file: Path | None, html_file: Path | None, row_file: Path | None
) -> None:
    """Write the files that were asked for."""
    if json_file is not None:
        write_atomic(json_file, json_bytes(summary.to_json(run)))
    if html_file is not None:
        write_atomic(html_file, html(run).encode())
    if row_file is not None:
        write_atomic(row_file, orjson.dumps(evidence_row(run)) + b"\n")


def print_result(run: Run, console: Console) -> None:
    """Headline first, then the table, then every first divergence."""
    result = summary.to_json(run)
    style = {"verified": "bold green", "divergence": "bold red"}
    console.print(
        Text(result["headline"], style=style.get(result["verdict"], "bold yellow"))
    )
    for line in result["set_up_differences"]:
        console.print(Text(f"the two servers differ in {line}", style="yellow"))
    for key, what in (
        ("not_pinned", "on packages other than the pinned ones"),
        ("test_settings", "with test settings"),
    ):
        if result[key]:
            shown = orjson.dumps(result[key]).decode()
            text = f"the tested server runs {what}: {shown}"
            console.print(Text(text, style="yellow"))
    console.print(_table(result["arms"]))
    for row in result["arms"]:
        for reason in row["reasons"]:
            console.print(Text(f"{row['arm']}: {reason}"))
        if row["first_divergence"]:
            _print_divergence(row["arm"], row["first_divergence"], console)
    if result["failure_bound"]:
        console.print(Text(f"verified arms together: {result['failure_bound']}"))


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("arm", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("equal", "tokens", "acceptance"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("failure rate below")
    for row in rows:
        found = row["acceptance"]
        percent = summary.bound_percent(row["compared"], row["equal"])
        bound = f"{percent} %" if row["failure_bound"] else ""
        table.add_row(
            Text(row["arm"]),
            Text(row["state"], style=STYLES.get(row["state"], "")),
            f"{row['equal']:,}/{row['compared']:,}" if row["compared"] else "",
            f"{row['tokens']:,}" if row["tokens"] else "",
            f"{found['micro']:.3f}" if found else "",
            bound,
        )
    return table


def _print_divergence(arm: str, row: dict[str, Any], console: Console) -> None:
    lines = [
        f"first divergence in {arm}: request {row['request']}, "
        f"token {row['position']}, {', '.join(row['what'])}",
        f"  ids       served {row['ids']['served']}, "
        f"reference {row['ids']['reference']}",
        f"  logprobs  served {row['logprobs']['served'] or 'not asked for'}, "
        f"reference {row['logprobs']['reference']}",
        f"  top-2 gap {_nats(row['top2_gap'])}; moves with draft width: "
        f"{_known(row['moves_with_draft_width'])}; survives at one in flight: "
        f"{_known(row['survives_one_in_flight'])}; follows a reject: "
        f"{_known(row['follows_reject'])}",
        f"  suspicion {row['suspicion']}",
        *(f"    - {text}" for text in (*row["details"], *row["evidence"])),
    ]
    for number, line in enumerate(lines):
        console.print(Text(line, style="" if number else "red"))


def _nats(gap: float | None) -> str:
    return "unknown" if gap is None else f"{gap:.4g} nats"


def _known(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "not known"}[value]
