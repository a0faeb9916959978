# SPDX-License-Identifier: Apache-2.0
"""One page and one Markdown file from any set of run files.

The page is one file: no script, nothing loaded from outside, everything that a run
file or a server said escaped. Runs of different set-ups keep tables of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang_exact.bench import runs as report_runs
from sglang_exact.bench.run import BenchRun
from sglang_exact.bench.runs import Group, Loaded
from sglang_exact.bench.verbs import BY_NAME
from sglang_exact.client.wire import clean
from sglang_exact.view import page
from sglang_exact.view.tables import TableData, escaped

_CELLS = 12
# What a row that is not as expected makes a table function raise.
_BAD_ROW = (KeyError, TypeError, ValueError, AttributeError, IndexError)


class Section(NamedTuple):
    """One verb and set-up: its tables, and the plots of each of its runs."""

    title: str
    number: int
    names: list[str]
    warnings: list[str]
    tables: list[TableData]
    plots: list[tuple[str, list[dict[str, Any]]]]


class Report(NamedTuple):
    """Everything the templates need."""

    runs: list[Loaded]
    sections: list[Section]
    setups: dict[int, dict[str, str]]
    differences: dict[int, list[str]]
    settings: list[str]
    problems: list[str]
    created: str


def build(runs: Sequence[Loaded], problems: Sequence[str], created: str) -> Report:
    """Group the runs and make their tables and plots."""
    groups = report_runs.group(runs, tuple(BY_NAME))
    setups = report_runs.setups(groups)
    first = setups.get(1, {})
    trouble = list(problems)
    sections = [_section(g, trouble) for g in groups]
    apart = {n: report_runs.apart(s, first) for n, s in setups.items() if n != 1}
    other = report_runs.other_settings(groups)
    return Report(list(runs), sections, setups, apart, other, trouble, created)


def _section(group: Group, trouble: list[str]) -> Section:
    each = [(one, _tables(one, trouble)) for one in group.runs]
    warnings = [
        f"{one.title()}: {text}" if len(group.runs) > 1 else text
        for one in group.runs
        for text in report_runs.warnings(one.run)
    ]
    plots = [(one.title(), _plots(one, trouble)) for one in group.runs]
    title = BY_NAME[group.verb].title if group.verb in BY_NAME else group.verb
    names = [one.name for one in group.runs]
    return Section(title, group.number, names, warnings, joined(each), plots)


def joined(each: Sequence[tuple[Loaded, list[TableData]]]) -> list[TableData]:
    """Tables of the same columns become one with a column that names the run."""
    if len(each) == 1:
        return each[0][1]
    found: dict[tuple[str, tuple[str, ...]], TableData] = {}
    for one, tables in each:
        for table in tables:
            place = (table.title, table.columns)
            if place not in found:
                found[place] = TableData(
                    table.title, ("run", *table.columns), numbers=table.numbers + 1
                )
            whole = found[place]
            whole.rows.extend((one.title(), *row) for row in table.rows)
            for text in table.below:
                if text not in whole.below:
                    whole.below.append(text)
    for whole in found.values():
        if len({row[0] for row in whole.rows}) > 1:
            whole.below.append(
                "several runs: ratios are inside one run, between runs the machine may "
                "have been slower or faster"
            )
    return list(found.values())


def _tables(one: Loaded, trouble: list[str]) -> list[TableData]:
    verb = BY_NAME.get(one.run.verb)
    if verb is not None:
        try:
            tables = verb.tables(one.run)
            # The section's warnings say these already.
            said = report_runs.mixed(one.run)
            for table in tables:
                table.below[:] = [text for text in table.below if text not in said]
            return tables
        except _BAD_ROW as error:
            trouble.append(
                f"{one.name}: a row of this {one.run.verb} record is not as expected "
                f"({type(error).__name__}: {clean(str(error), 80)}); shown as it is"
            )
    return [_plain_table(one.run)]


def _plots(one: Loaded, trouble: list[str]) -> list[dict[str, Any]]:
    verb = BY_NAME.get(one.run.verb)
    makers = verb.plots if verb is not None else ()
    try:
        return [plot for make in makers if (plot := make(one.run.rows)) is not None]
    except _BAD_ROW as error:
        trouble.append(f"{one.name}: no plots ({type(error).__name__})")
        return []


def _plain_table(run: BenchRun) -> TableData:
    """Any rows: their first keys as columns."""
    keys = list(dict.fromkeys(str(key) for row in run.rows for key in row))[:_CELLS]
    data = TableData(run.verb, tuple(keys), numbers=len(keys))
    for row in run.rows:
        cells = (clean(report_runs.shown(row.get(key, "")), 120) for key in keys)
        data.rows.append(tuple(cells))
    data.below.extend(run.notes)
    return data


def provenance(one: Loaded) -> list[tuple[str, str]]:
    """Where the numbers of a run are from, as (what, value)."""
    run, known = one.run, one.run.provenance
    shown = report_runs.shown
    found = [
        ("file", one.name),
        ("sha256", one.sha256),
        ("label", run.label or "-"),
        ("created", run.created),
        ("complete", "yes" if run.complete else "no"),
        ("command", " ".join(map(str, run.command))),
    ]
    for key in ("client", "seeds"):
        value = known.get(key)
        if isinstance(value, dict):
            found += [(f"{key}: {name}", shown(v)) for name, v in value.items()]
    for number, gpu in enumerate(known.get("gpu") or ()):
        if isinstance(gpu, dict):
            found += [(f"GPU {number}: {k}", shown(v)) for k, v in gpu.items()]
    found += [(f"setting: {key}", shown(v)) for key, v in run.settings.items()]
    for server in report_runs.servers(run):
        found += _server(server)
    return [(what, clean(value, 2000)) for what, value in found]


def _server(server: dict[str, Any]) -> list[tuple[str, str]]:
    name = f"server {server.get('name')}"
    found = [
        (f"{name}: {key}", report_runs.shown(server.get(key)))
        for key in ("url", "version", "model_path", "launch_command")
    ]
    for part in ("speculative", "fields", "attestation"):
        values = server.get(part)
        if isinstance(values, dict):
            found += [
                (f"{name}: {part}.{key}", report_runs.shown(value))
                for key, value in values.items()
            ]
    return found


def html(report: Report) -> str:
    """The page."""
    return _rendered(report, "report.html.j2")


def markdown(report: Report) -> str:
    """The same as Markdown; plots are drawn in text."""
    return _rendered(report, "report.md.j2")


def _rendered(report: Report, template: str) -> str:
    filters = {"md": escaped, "text_plot": text_plot}
    values = {"report": report, "provenance": provenance}
    return page.render("sglang_exact.bench.report", template, filters, **values)


def text_plot(plot: dict[str, Any]) -> str:
    """A plot as lines of text, for a code block: no backtick gets into it."""
    if plot["kind"] == "bars":
        pairs = [
            (" ".join(x for x in (b["group"], b["name"]) if x), b["text"], b["end"])
            for b in plot["bars"]
        ]
        start = plot["left"]
    else:
        pairs = [
            (f"{line['name']} at {dot['label'].partition(':')[0]}",
             dot["label"].partition(": ")[2],
             plot["foot"] - dot["y"])
            for line in plot["lines"]
            for dot in line["dots"]
        ]  # fmt: skip
        start = 0
    width = max((len(name) for name, _, _ in pairs), default=0)
    limit = max((end - start for _, _, end in pairs), default=1) or 1
    rows = [
        f"{name:<{width}}  {'#' * max(round(40 * (end - start) / limit), 1)} {text}"
        for name, text, end in pairs
    ]
    return "\n".join(rows).replace("`", "'")
