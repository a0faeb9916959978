# SPDX-License-Identifier: Apache-2.0
"""Write README's evidence table and docs/evidence.md from the JSON under results/.

    scripts/evidence [--check]

README gets one line per arm, docs/evidence.md one per pass. --check only says whether
both match the files. A figure without a file is left out and named as not run; nothing
is estimated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any

from tools import ROOT
from tools.evidence import matrix as evidence_matrix
from tools.evidence.pages import cache_page, demo_page, table, verifier_page
from tools.evidence.rows import Row, different, load, place, title
from tools.proof import arms as proof_arms
from tools.proof import traffic_arms
from tools.proof.arms import SERIES

BEGIN, END = "<!-- evidence: begin -->", "<!-- evidence: end -->"


def proofs() -> list[Row]:
    """Every GPU proof file, full width first, in name order."""
    found = [proof for proof in load("gpu/proof-*.json") if "rows" in proof]
    return sorted(found, key=lambda proof: -proof["layers"])


def titles() -> dict[str, str]:
    """Title of every arm of the proof, in the order of the table."""
    return {arm.name: arm.title for arm in proof_arms.BY_NAME.values()}


def traffic_titles() -> dict[str, str]:
    """Title of every arm under traffic, in the order of the table."""
    arms = traffic_arms.arms_of(traffic_arms.GPU)
    return {arm.name: arm.title for arm in arms}


def is_width(row: Row) -> bool:
    """Whether the row is of a series of servers, one for each draft width."""
    return bool(row["arm"].startswith(SERIES))


def key(row: Row) -> tuple[int, bool, tuple[int, str], int]:
    """Order of the table: ranks, arms, layers; a series after the others."""
    return row["tp"], is_width(row), place(row, titles()), -row["layers"]


def compared() -> list[Row]:
    """Rows compared with plain decode.

    Of one arm only those of the widest model, and all that are not as expected.
    """
    rows: list[Row] = []
    known = titles()
    for proof in proofs():
        tp = proof.get("tp", 1)
        have = {
            (row["arm"], row["tp"]) for row in rows if row["layers"] > proof["layers"]
        }
        more = {"layers": proof["layers"], "tp": tp, "date": proof["date"]}
        rows += [
            {**row, "title": title(row, known), **more}
            for row in proof["rows"]
            if row["tally"] is not None
            and ((row["arm"], tp) not in have or not row["as_expected"])
        ]
    return sorted(rows, key=key)


def listed(values: Iterable[Any]) -> str:
    """Different values in order, or "-"."""
    seen = sorted({value for value in values if value is not None})
    return ", ".join(f"{value:g}" for value in seen) or "-"


def spanned(arm: list[Row]) -> str:
    """The label of rows that become one; all draft widths are one."""
    if not is_width(arm[0]):
        return str(arm[0]["title"])
    tokens = [int(row["arm"].removeprefix(SERIES)) for row in arm]
    return f"DFLASH, {min(tokens)} to {max(tokens)} draft tokens, a server each"


def summary(rows: list[Row]) -> list[str]:
    """One Markdown row per arm: its passes added up."""
    lines = [
        "| arm | layers | GPUs | oracle rates | in flight | ids equal | "
        "logprobs equal | date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    places = sorted({key(row) for row in rows if not is_width(row)})
    arms = [[row for row in rows if key(row) == place] for place in places]
    if widths := [row for row in rows if is_width(row)]:
        arms.append(widths)
    for arm in arms:
        tallies = [row["tally"] for row in arm]
        asked = [tally for tally in tallies if tally["logprobs_equal"] is not None]
        cells = [
            spanned(arm),
            str(arm[0]["layers"]),
            str(arm[0]["tp"]),
            listed(row["rate"] for row in arm),
            listed(row["concurrency"] for row in arm),
            f"{sum(t['ids_equal'] for t in tallies)}/"
            f"{sum(t['compared'] for t in tallies)}",
            f"{sum(t['logprobs_equal'] for t in asked)}/"
            f"{sum(t['compared'] for t in asked)}",
            arm[0]["date"],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def passed(row: Row) -> str:
    """A row's title, and how much of its prompts came from the prefix cache."""
    if "cached_tokens" not in row:
        return str(row["title"])
    return (
        f"{row['title']} ({row['cached_tokens']:,} of {row['prompt_tokens']:,} prompt "
        "tokens cached)"
    )


def every(rows: list[Row]) -> list[str]:
    """One Markdown row per pass."""
    lines = [
        "| arm | layers | GPUs | oracle rate | in flight | prompts | tokens | "
        "ids equal | logprobs equal | tokens per verify | first difference | date |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        tally, length = row["tally"], row["acceptance_length"]
        count, logprobs = tally["compared"], tally["logprobs_equal"]
        first = tally["first_difference"]
        cells = [
            passed(row),
            row["layers"],
            row["tp"],
            "-" if row["rate"] is None else f"{row['rate']:g}",
            row["concurrency"],
            count,
            row["tokens"],
            f"{tally['ids_equal']}/{count}",
            "not asked" if logprobs is None else f"{logprobs}/{count}",
            "-" if length is None else f"{length:g}",
            "-" if first is None else first["position"],
            row["date"],
        ]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return lines


def traffic() -> list[Row]:
    """Every pass of `scripts/gpu_traffic`, in the order of its arms."""
    known = traffic_titles()
    rows = [
        {**row, "title": title(row, known)}
        for found in load("gpu/traffic*.json")
        for row in found["rows"]
    ]
    return sorted(rows, key=lambda row: place(row, known))


def matrix_page() -> list[str]:
    """The original report's rows: ours, stock deterministic, stock default."""
    head = " | ".join(("answers with plain decoding's bits", *evidence_matrix.COLUMNS))
    text = (
        "The rows of the report that this project began with; an empty cell was not "
        "run. Some passes at 64 layers compare ids alone: the bench's prompts of 2k "
        "and 128k, and stock's default plain decoding. Stock is held against its own "
        "plain decoding, but for 8 requests in flight at 64 layers, where it is held "
        "against plain decoding under the overlay. Stock's answers count as equal "
        "only if all their logprobs are. A call that was cut off says so: its "
        "answers count as far as they came."
    )
    if older := evidence_matrix.older("plain-32"):
        text += f" Plain against plain holds {older}; README says what they ran with."
    rows = table(head, evidence_matrix.rows())
    return ["## The original report's rows", "", text, "", *rows, ""]


def traffic_page() -> list[str]:
    """Neighbours, chunks, restarts and settings, one line per pass."""
    rows = traffic()
    if not rows:
        return []
    text = (
        "Four layers at the 27B's width. Every answer is compared with that of the "
        "plain server to the same request alone: ids, finish reason, every logprob's "
        "bits. `flow` are 24 requests at random times with long prompts between and "
        "one aborted, `many` the same with up to 32 in flight; `kinds` are 14 at "
        "once: penalties, seeds, samplers, bias, top and prompt logprobs; `rows` are "
        "batches of 1 to 16; `repeats` are requests of both sorts made of repetitive "
        "prompts, whose drafts the drafter finds by itself."
    )
    cells = (
        (r["title"], r["phase"], r["tally"]["compared"], r["tokens"],
         r["acceptance_length"], different(r), "yes" if r["control"] else "")
        for r in rows
    )  # fmt: skip
    head = "server | pass | answers | tokens | tokens per verify | differ | control"
    return ["## Traffic, settings, restarts", "", text, "", *table(head, cells), ""]


def graphs() -> str:
    """README's line on prefill graphs, each beside the step without it."""
    rows = [row for found in load("gpu/prefill-graphs*.json") for row in found["rows"]]
    if not rows:
        return ""
    real = [r for r in rows if r["arm"] == "exact"]
    controls = [r for r in rows if r["arm"] != "exact"]
    buckets = max((r["buckets"] for r in real), key=len)
    return (
        f"Each of {len(buckets)} prefill graphs (to {max(buckets)} tokens; 4 layers) "
        f"was held against the step without it: {sum(map(different, real))} of "
        f"{sum(r['tally']['compared'] for r in real)} steps differ in logits, KV cache "
        f"or states; in the controls {sum(map(different, controls))} of "
        f"{sum(r['tally']['compared'] for r in controls)} do."
    )


def beside() -> str:
    """README's lines on what was run with fewer layers."""
    rows, found = traffic(), load("gpu/verify-*.json")
    real = [r for r in rows if not r["control"]]
    controls = [r for r in rows if r["control"]]
    parts = []
    if real:
        differ = sum(different(r) for r in real)
        answers = sum(r["tally"]["compared"] for r in real)
        parts.append(
            f"Under traffic (neighbours, chunk sizes, restarts with empty caches, "
            f"settings, penalties, seeds; 4 layers) {differ} of "
            f"{answers:,} answers differ from plain decoding "
            f"alone; in the controls {sum(different(r) for r in controls)} of "
            f"{sum(r['tally']['compared'] for r in controls)} do."
        )
    asked = [
        (a, r) for f in found for r in f["rows"] for a in r["arms"] if r["drafter"]
    ]
    same = [a for a, r in asked if r["expected"] == "equal"]
    if same:
        repeats = sum(a["compared"] for a in same if a["arm"] == "repeats")
        layers = " and ".join(str(n) for n in sorted({one["layers"] for one in found}))
        parts.append(
            f"`sglang-exact verify` found {sum(a['different'] for a in same)} of "
            f"{sum(a['compared'] for a in same):,} speculative answers different "
            f"({repeats:,} of them repeats at 8 in flight; {layers} layers, see "
            "docs/evidence.md)"
        )
        planted = [r["as_expected"] for _, r in asked if r.get("planted")]
        parts[-1] += ", and the one bit that was planted." if any(planted) else "."
    return " ".join(part for part in (*parts, graphs()) if part)


def heading(rows: list[Row]) -> str:
    """What was measured on what."""
    first = proofs()[0]
    total = sum(row["tokens"] for row in rows)
    bare = sum(row["tokens"] for row in rows if row["tally"]["logprobs_equal"] is None)
    return (
        f"At the 27B's width on {first['gpu'].split(',')[0]}, SGLang "
        f"{first['versions']['sglang']}, CUDA graphs on: **random weights, acceptance "
        f"set by an oracle drafter**, {total:,} tokens compared, {bare:,} of them by "
        "ids alone. Counted are answers that equal plain decoding's, bit for bit."
    )


def block() -> str:
    """The text between README's markers."""
    rows = compared()
    if not rows:
        return "Not measured yet."
    have, below = {row["arm"] for row in rows}, {row["arm"] for row in traffic()}
    missing = [
        arm.title + (" (under traffic, below)" if arm.name in below else "")
        for arm in proof_arms.ARMS
        if arm.name not in have and arm.equal is not None
    ]
    lines = [heading(rows), "", *summary(rows)]
    if missing:
        lines += ["", "Not in this table: " + "; ".join(missing) + "."]
    if extra := beside():
        lines += ["", extra]
    return "\n".join(lines)


def page() -> str:
    """docs/evidence.md."""
    rows = compared()
    files = [p.relative_to(ROOT) for p in sorted(ROOT.glob("results/**/*.json"))]
    lines = [
        "# Evidence",
        "",
        "Made by `scripts/evidence` from the files under results/: run it again after "
        "adding one.",
        "",
        heading(rows) if rows else "Not measured yet.",
        "",
        *every(rows),
        "",
        *matrix_page(),
        *traffic_page(),
        *verifier_page(),
        *demo_page(),
        *cache_page(),
        "## Files",
        "",
        "Each holds its command, versions and GPU, or a note on how it was made.",
        "",
        *(f"- [{path}](../{path})" for path in files),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    readme, evidence = ROOT / "README.md", ROOT / "docs" / "evidence.md"
    text = readme.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        print(f"README.md lacks {BEGIN} and {END}; expected both")
        return 2
    head, rest = text.split(BEGIN, 1)
    _, tail = rest.split(END, 1)
    try:
        wanted = {
            readme: f"{head}{BEGIN}\n{block()}\n{END}{tail}",
            evidence: page(),
        }
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    stale = [
        path.name
        for path, body in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != body
    ]
    if args.check:
        print(f"differs from results/: {', '.join(stale) or 'nothing'}")
        return 1 if stale else 0
    for path, body in wanted.items():
        path.write_text(body, encoding="utf-8")
    print(f"written from results/: {', '.join(stale) or 'nothing new'}")
    return 0
