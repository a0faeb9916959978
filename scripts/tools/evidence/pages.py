# SPDX-License-Identifier: Apache-2.0
"""Pages of docs/evidence.md on the verifier and the demonstration.

A part of `scripts/evidence`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tools.evidence.rows import Row, acceptance_length, load


def table(head: str, rows: Iterable[Iterable[Any]]) -> list[str]:
    """A Markdown table; None is an empty cell."""
    columns = head.split(" | ")
    lines = [f"| {head} |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = ("" if cell is None else str(cell) for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def left_out(found: Row, everything: list[Row]) -> str:
    """What no file of these layers holds, and servers that refused to start."""
    same = [one for one in everything if one["layers"] == found["layers"]]
    have = {f"{r['arm']} {r['ask']}" for one in same for r in one["rows"]}
    missing = [key for key in found["not_run"] if key not in have]
    parts = [f"Not run: {', '.join(missing)}."] if missing else []
    if lost := [key for key in found["failed"] if key not in have]:
        parts.append(f"Without a result: {', '.join(lost)}.")
    parts += [
        f"`{row['arm']}` refused to start, as it shall: `{row['said']}`."
        for row in found["rows"]
        if row["expected"] == "refused to start"
    ]
    return " ".join(parts)


def verifier_page() -> list[str]:
    """What `sglang-exact verify` found, one line per arm of a call."""
    everything = load("gpu/verify-*.json")
    everything.sort(key=lambda one: -one["layers"])
    words = (
        "`noted`: nothing was expected. `not verified`: a server that attests a hook "
        "off is never called verified, also where its answers are equal."
    )
    lines = ["## The verifier", "", words, ""] if everything else []
    for found in everything:
        cells = [
            (r["arm"], r["ask"], a["arm"], a["compared"], a["different"], a["tokens"],
             acceptance_length(a),
             r["expected"] + ", cut off" * (a["state"] == "not reached"))
            for r in found["rows"]
            for a in r["arms"]
        ]  # fmt: skip
        controls = all(r["expected"] != "equal" for r in found["rows"])
        text = (
            f"{found['layers']} layers at the 27B's width, {found['date']}"
            f"{', controls and the stock host' if controls else ''}: calls of "
            f"`sglang-exact verify` by `scripts/gpu_verify`. "
            f"{left_out(found, everything)}"
        ).rstrip()
        head = "server | call | arm | answers | differ | tokens | tokens per verify"
        lines += [text, "", *table(f"{head} | expected", cells), ""]
    return lines


def demo_page() -> list[str]:
    """`scripts/demo` on a GPU."""
    lines: list[str] = []
    for found in load("gpu/demo-*.json"):
        cells = [
            (r.get("pass") or r["title"], r["tally"]["compared"], r["tokens"],
             r["tally"]["ids_equal"], r["tally"]["logprobs_equal"],
             r["acceptance_length"], r["expected"])
            for r in found["rows"]
        ]  # fmt: skip
        head = "pass | prompts | tokens | ids equal | logprobs equal | "
        head += "tokens per verify | expected"
        lines += ["## The demonstration on a GPU", "", f"`{found['command']}`", ""]
        lines += [*table(head, cells), ""]
    return lines


def cache_page() -> list[str]:
    """What cached prefixes save, by `scripts/gpu_bench --only prefix-cache`."""
    lines: list[str] = []
    for found in load("bench/prefix-cache*.json"):
        plain = {r["title"]: r for r in found["rows"] if r["server"] == "plain"}
        cells = [
            (r["title"], r["server"], cache_figure(r), f"{r['prompt_tokens']:,}",
             f"{r['cached_tokens']:,}", same_ids(r, plain.get(r["title"])))
            for r in sorted(found["rows"], key=lambda row: row["title"])
        ]  # fmt: skip
        head = "what | server | time | prompt tokens | of them cached | ids as plain's"
        names = {gpu["name"] for gpu in found["provenance"].get("gpu") or ()}
        place = ", ".join([found["label"], *sorted(names), found["created"][:10]])
        text = f"{place}, plain decoding: "
        text += "`plain` has no cache, `host-cache` is stock SGLang with its own."
        lines += ["## What cached prefixes save", "", text, "", *table(head, cells), ""]
    return lines


def cache_figure(row: Row) -> str:
    """Seconds to the first token, of each time a prompt was asked; else of it all."""
    if "first_token_s" in row:
        times = (f"{seconds:.2f}" for seconds in row["first_token_s"])
        return f"first token after {', '.join(times)} s"
    more = f", {row['requests_s']:g} requests/s" if "requests_s" in row else ""
    return f"{row['seconds']:.1f} s{more}"


def same_ids(row: Row, plain: Row | None) -> str | None:
    """Whether all answers are the plain server's; None where it was not asked."""
    if plain is None or row is plain:
        return None
    return "yes" if row["answers"] == plain["answers"] else "no"
