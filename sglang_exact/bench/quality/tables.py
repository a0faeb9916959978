# SPDX-License-Identifier: Apache-2.0
"""The quality record as tables: by subject, and the problems that servers differ in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_exact.bench import runs as report_runs
from sglang_exact.bench import stats
from sglang_exact.bench.exactness import show
from sglang_exact.bench.quality.grading import CORRECT, NOT_GRADED
from sglang_exact.bench.run import BenchRun
from sglang_exact.view import charts
from sglang_exact.view.tables import MISSING, TableData, number


def by_subject(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Correct answers of each server by subject, "all" last.

    `graded` counts the answers that have a grade; `gaps` are against the first server,
    over the `shared` problems that both have a grade of.
    """
    names = list(dict.fromkeys(row["server"] for row in rows))
    subjects = sorted({row["subject"] for row in rows} - {"all"})
    found = []
    for subject in [*subjects, "all"]:
        chosen = [r for r in rows if subject in ("all", r["subject"])]
        right: dict[str, dict[str, bool]] = {name: {} for name in names}
        for row in chosen:
            if row["state"] != NOT_GRADED:
                right[row["server"]][row["problem"]] = row["state"] == CORRECT
        shared = {n: set(right[n]) & set(right[names[0]]) for n in names}
        found.append(
            {
                "subject": subject,
                "problems": len({row["problem"] for row in chosen}),
                "correct": {n: sum(right[n].values()) for n in names},
                "graded": {n: len(right[n]) for n in names},
                "shared": {n: len(shared[n]) for n in names},
                "gaps": {
                    n: sum(right[n][p] - right[names[0]][p] for p in shared[n])
                    for n in names
                },
            }
        )
    return found


def differences(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every problem that two servers do not share the grade of, against the plain (or
    the first) server."""
    base = next((r["server"] for r in rows if r.get("plain")), None)
    base = base or next((r["server"] for r in rows), None)
    known = {r["problem"]: r for r in rows if r["server"] == base}
    found = []
    for row in rows:
        other = known.get(row["problem"])
        if row["server"] == base or other is None or other["state"] == row["state"]:
            continue
        found.append(
            {
                "problem": row["problem"],
                "subject": row["subject"],
                "answer": row["answer"],
                "server": row["server"],
                "found": row["found"],
                "state": row["state"],
                "base": base,
                "base_found": other["found"],
                "base_state": other["state"],
                "ids_equal": row["ids_equal"],
            }
        )
    return found


def tables(run: BenchRun) -> list[TableData]:
    """Scores by subject, and the problems that servers differ in."""
    rows = run.rows
    names = list(dict.fromkeys(row["server"] for row in rows))
    scores = TableData(
        "quality: correct answers by subject",
        ("subject", "problems", *names, *(f"{n} - {names[0]}" for n in names[1:])),
    )
    for line in by_subject(rows):
        shown = [_score(line, name) for name in names]
        gaps = [_gap(line, name) for name in names[1:]]
        scores.rows.append((line["subject"], str(line["problems"]), *shown, *gaps))
    apart = differences(rows)
    scores.below.extend(_below(run, names, apart))
    return [scores, _apart_table(apart)] if apart else [scores]


def _score(line: Mapping[str, Any], name: str) -> str:
    """Correct answers of those that have a grade; how many that are, if not all."""
    right, graded = line["correct"][name], line["graded"][name]
    if not graded:
        return f"{MISSING} (none graded)"
    share = number(100 * right / graded, 0, " %")
    return f"{right} ({share}" + (
        ")" if graded == line["problems"] else f" of {graded} graded)"
    )


def _gap(line: Mapping[str, Any], name: str) -> str:
    shared = line["shared"][name]
    if not shared:
        return MISSING
    gap = f"{line['gaps'][name]:+d}"
    return gap if shared == line["problems"] else f"{gap} over {shared}"


def _below(
    run: BenchRun, names: Sequence[str], apart: Sequence[Mapping[str, Any]]
) -> list[str]:
    lines = []
    for name in names:
        own = [r for r in run.rows if r["server"] == name]
        open_ = sum(r["state"] == NOT_GRADED for r in own)
        if open_:
            lines.append(f"{name}: {open_} of {len(own)} answers not graded")
        asked = run.settings.get("dataset", {}).get("used", len(own))
        if len(own) < asked:
            lines.append(f"{name}: {len(own)} of {asked} problems asked")
    for name in names[1:]:
        mine = [d for d in apart if d["server"] == name]
        won = sum(d["state"] == CORRECT for d in mine)
        lost = sum(d["base_state"] == CORRECT for d in mine)
        lines.append(
            f"{name} against {names[0]}: grades differ in {len(mine)} problems, "
            f"{won} gained, {lost} lost"
        )
    data = run.settings.get("dataset", {})
    lines += [
        f"answers against plain: {show(run.exactness)}",
        f"{data.get('source')}: first {data.get('used')} of {data.get('rows')} rows, "
        f"sha256 {str(data.get('sha256'))[:16]}; math-verify "
        f"{run.settings.get('math_verify')}",
        *report_runs.remarks(run),
    ]
    return lines


def _apart_table(apart: Sequence[Mapping[str, Any]]) -> TableData:
    columns = ("problem", "subject", "right answer", "server", "says", "instead of")
    data = TableData("quality: problems graded differently", columns, numbers=6)
    for row in apart:
        data.rows.append(
            (
                row["problem"],
                row["subject"],
                row["answer"],
                row["server"],
                f"{row['found'] or '-'} ({row['state']})",
                f"{row['base_found'] or '-'} ({row['base_state']}, {row['base']})",
            )
        )
    return data


def subject_plot(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Correct answers by subject."""
    found = []
    for subject, own in stats.by(rows, "subject").items():
        for name, graded in stats.by(own, "server").items():
            right = sum(r.get("state") == "correct" for r in graded)
            share = 100 * right / len(graded)
            text = f"{right} of {len(graded)}"
            found.append(charts.Bar(subject, name, ((name, share),), text))
    return charts.bars("Correct answers by subject", sorted(found), "%")
