# SPDX-License-Identifier: Apache-2.0
"""The report: escaped, self-contained, and never two set-ups in one column."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import bench_records as records
import pytest
from bench_records import EVIL
from bench_runs import command

from sglang_exact.bench import runs as report_runs
from sglang_exact.bench.report import build as report
from sglang_exact.bench.run import BenchRun
from sglang_exact.view import charts as report_plots
from sglang_exact.view.tables import TableData

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "headless_shell")


class Page(HTMLParser):
    """Collects tags, ids and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    @property
    def ids(self) -> set[str]:
        return {value for name, value in self.attributes if name == "id" and value}


def parsed(page: str) -> Page:
    found = Page()
    found.feed(page)
    return found


def made(path: Path, **runs: BenchRun) -> report.Report:
    loaded, problems = report_runs.load_all(records.written(path, **runs).values())
    return report.build(loaded, problems, "2026-01-01")


def evil_runs() -> dict[str, BenchRun]:
    """One record of every verb; everything that can be said is hostile."""
    spec = records.server("spec", exact={"version": EVIL, "gpu": EVIL, EVIL: EVIL})
    known = records.provenance(records.server(EVIL, load_format="dummy"), spec)
    sweep = records.sweep(EVIL, notes=[EVIL], provenance=known, command=[EVIL])
    for row in sweep.rows:
        row["server"] = EVIL if row["plain"] else "spec"
    accept = records.accept(EVIL, notes=[EVIL], provenance=known)
    for row in accept.rows:
        row["title"] = EVIL
    odd = BenchRun("odd-" + EVIL, complete=True, rows=[{EVIL: EVIL}])
    return {
        "sweep": sweep,
        "accept": accept,
        "leaderboard": records.leaderboard(provenance=known),
        "memory": records.memory(complete=False, provenance=known),
        "odd": odd,
    }


def test_a_control_is_no_plain_set_up() -> None:
    """What a test setting changed is named; without one nothing is."""
    on = {"deep_gemm_default": True, "disabled_hooks": ["stop"]}
    found = report_runs.facts(records.server("x", exact={"test_settings": on}))
    assert found["DeepGEMM"] == "deterministic algorithms off"
    assert "stop" in found["disabled hooks"]
    found = report_runs.facts(records.server("x", exact={"test_settings": {}}))
    assert not {"DeepGEMM", "disabled hooks"} & set(found)


def test_page_is_escaped_and_self_contained(tmp_path: Path) -> None:
    page = report.html(made(tmp_path, **evil_runs()))
    found = parsed(page)
    forbidden = {"script", "img", "link", "iframe", "object", "a", "form", "base"}
    assert not forbidden & set(found.tags)
    names = {name for name, _ in found.attributes}
    assert not names & {"src", "href", "onerror", "onload", "style"}
    assert "url(" not in page and "@import" not in page
    assert "default-src 'none'" in page
    assert "&lt;script&gt;" in page
    assert {"runs", "setup-table"} <= found.ids
    assert found.tags.count("svg") >= 4


def test_markdown_is_escaped(tmp_path: Path) -> None:
    text = report.markdown(made(tmp_path, **evil_runs()))
    outside = re.sub(r"```text\n.*?\n```", "", text, flags=re.S)
    assert "<script" not in outside and "<img" not in outside
    assert not re.search(r"(?<!\\)!\[", outside), "no picture is loaded from outside"
    assert not re.search(r"(?<!\\)`", outside), "no code span swallows a cell"
    assert "&lt;script&gt;" in text
    fences = [line for line in text.splitlines() if line.startswith("```")]
    assert fences[::2] == ["```text"] * (len(fences) // 2)
    assert fences[1::2] == ["```"] * (len(fences) // 2)
    for table in re.findall(r"(?:^\|.*\n)+", outside, flags=re.M):
        widths = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
        assert len(widths) == 1, table


def columns(tables: list[TableData], title: str) -> list[list[tuple[str, ...]]]:
    return [t.rows for t in tables if t.title.startswith(title)]


def test_runs_of_one_set_up_share_a_table(tmp_path: Path) -> None:
    one, two = records.sweep("first", 70.0), records.sweep("second", 60.0)
    (section,) = made(tmp_path, one=one, two=two).sections
    (table,) = section.tables
    assert table.columns[0] == "run"
    assert [row[0] for row in table.rows] == ["first"] * 4 + ["second"] * 4
    assert any("ratios are inside one run" in text for text in table.below)
    # Each run's speed-up is over its own plain server.
    gains = {row[0]: row[table.columns.index("speed-up")] for row in table.rows}
    assert gains == {"first": "2.50x", "second": "2.50x"}


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"model_path": "other"}, "model_path: other against Q"),
        ({"dtype": "float16"}, "dtype: float16 against bfloat16"),
        ({"load_format": "dummy"}, "weights: random against the model's"),
        ({"exact": {"version": "0.2.0", "gpu": "NVIDIA H200"}}, "overlay version"),
        (
            {
                "exact": {
                    "version": "0.1.0",
                    "gpu": "NVIDIA H200",
                    "test_settings": {"oracle": True},
                }
            },
            "acceptance: set by an oracle",
        ),
    ],
)
def test_other_set_ups_are_kept_apart(
    tmp_path: Path, change: dict[str, Any], shown: str
) -> None:
    servers = [records.server(name, **change) for name in ("plain", "spec")]
    other = records.sweep("second", 60.0, provenance=records.provenance(*servers))
    found = made(tmp_path, one=records.sweep("first"), two=other)
    assert [section.number for section in found.sections] == [1, 2]
    for section in found.sections:
        (table,) = section.tables
        assert table.columns[0] != "run" and len(table.rows) == 4
    assert any(shown in line for line in found.differences[2])
    for text in (report.html(found), report.markdown(found)):
        assert "must not be compared" in text and "Set-up 2 differs" in text


def test_another_gpu_and_driver_are_another_set_up(tmp_path: Path) -> None:
    known = records.provenance()
    known["gpu"] = [{**known["gpu"][0], "driver_version": "590"}]
    found = made(tmp_path, a=records.sweep("a"), b=records.sweep("b", provenance=known))
    assert found.differences == {2: ["driver: 590 against 580"]}


def test_other_settings_are_kept_apart_under_one_set_up(tmp_path: Path) -> None:
    other = records.sweep("b")
    other.settings = {**other.settings, "seed": 7}
    found = made(tmp_path, a=records.sweep("a"), b=other)
    assert [(s.number, len(s.tables)) for s in found.sections] == [(1, 1), (1, 1)]
    assert found.differences == {}
    (said,) = found.settings
    assert "b and a have other settings" in said and "seed: 7 against 42" in said
    assert said in report.html(found) and "seed: 7 against 42" in report.markdown(found)
    assert made(tmp_path, a=records.sweep("a")).settings == []


def test_other_prompts_are_other_settings(tmp_path: Path) -> None:
    runs = {}
    for name, prompt in (("a", "1" * 64), ("b", "1" * 64), ("c", "2" * 64)):
        rows = [{**row, "prompt_sha256": prompt} for row in records.sweep().rows]
        runs[name] = records.sweep(name, rows=rows)
    found = made(tmp_path, **runs)
    assert [section.names for section in found.sections] == [
        ["a.json", "b.json"],
        ["c.json"],
    ]
    assert "prompts: 2222222222222222 against 1111111111111111" in found.settings[0]


def test_plots_show_exactness_beside_speed(tmp_path: Path) -> None:
    found = made(tmp_path, a=records.accept())
    texts = [bar["text"] for bar in found.sections[0].plots[0][1][0]["bars"]]
    assert texts[0] == "70.0", "the reference"
    assert texts[1] == "300.0 (4.29x), ids equal 7/8"


def test_what_a_reader_must_know_first(tmp_path: Path) -> None:
    exact = {"version": "0.1.0", "test_settings": {"oracle": True}}
    plain = records.server("plain", load_format="dummy")
    spec = records.server("spec", load_format="dummy", exact=exact, dtype="float16")
    run = records.sweep(provenance=records.provenance(plain, spec), complete=False)
    (section,) = made(tmp_path, run=run).sections
    text = "\n".join(section.warnings)
    assert "not complete" in text and "random weights" in text
    assert "set by an oracle" in text
    assert "dtype differs between the servers" in text


def test_provenance_is_complete(tmp_path: Path) -> None:
    found = made(tmp_path, run=records.sweep("x"))
    rows = dict(report.provenance(found.runs[0]))
    assert len(rows["sha256"]) == 64 and rows["complete"] == "yes"
    assert rows["GPU 0: clocks.sm"] == "1980 MHz" and rows["seeds: prompts"] == "42"
    assert rows["command"] == "sglang-exact bench sweep"
    assert rows["server plain: attestation.version"] == "0.1.0"
    assert rows["setting: aiperf"] == "0.13.0"
    assert rows["server spec: launch_command"].startswith("serve")


def test_odd_rows_are_shown_and_said(tmp_path: Path) -> None:
    run = records.sweep(rows=[{"a": 1}, {"a": [EVIL]}])
    found = made(tmp_path, run=run)
    assert any("not as expected" in text for text in found.problems)
    assert found.sections[0].tables[0].columns == ("a",)
    report.html(found)
    report.markdown(found)


def test_every_verb_has_tables_and_plots(tmp_path: Path) -> None:
    runs = {
        "accept": records.accept(),
        "sweep": records.sweep(),
        "leaderboard": records.leaderboard(),
        "memory": records.memory(),
    }
    found = made(tmp_path, **runs)
    assert found.problems == []
    for section in found.sections:
        assert all(table.rows for table in section.tables)
        assert all(plots for _, plots in section.plots), section.title


def test_line_plot_geometry() -> None:
    one = report_plots.Series("a", [(1, 10.0), (4, 20.0), (2, float("nan"))])
    plot = report_plots.lines("t", [one], "x", "y", log_x=True)
    assert plot is not None
    (line,) = plot["lines"]
    assert len(line["dots"]) == 2, "what is no number is not drawn"
    left, right = line["dots"]
    assert plot["left"] <= left["x"] < right["x"] <= plot["right"]
    assert right["y"] < left["y"] <= plot["foot"]
    # From 0 up: the bar of the half is half as high.
    high, low = plot["foot"] - right["y"], plot["foot"] - left["y"]
    assert high == pytest.approx(2 * low, abs=0.2)
    assert report_plots.lines("t", [], "x", "y") is None
    assert report_plots.bars("t", [], "u") is None


def test_bar_plot_geometry() -> None:
    found = [
        report_plots.Bar("g", "a", [("w", 30.0), ("k", 10.0)]),
        report_plots.Bar("g", "b", [("w", 20.0)]),
    ]
    plot = report_plots.bars("t", found, "GiB")
    assert plot is not None
    first, second = plot["bars"]
    assert (first["group"], second["group"]) == ("g", "")
    assert [r["hue"] for r in first["rects"]] == [0, 1]
    widths = [r["width"] for r in first["rects"] + second["rects"]]
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.01)
    assert widths[2] == pytest.approx(2 * widths[1], rel=0.01)
    apart = [report_plots.Bar(g, "a", [("w", 1.0)]) for g in ("g", "h", "g")]
    plot = report_plots.bars("t", apart, "u")
    assert plot is not None
    assert [bar["group"] for bar in plot["bars"]] == ["g", "", "h"], "side by side"
    many = [report_plots.Bar("g", str(i), [("w", 1.0)]) for i in range(80)]
    cut = report_plots.bars("t", many, "u")
    assert cut is not None and cut["left_out"] == 20


def test_command(tmp_path: Path) -> None:
    paths = records.written(tmp_path, a=records.sweep(), b=records.accept())
    (tmp_path / "odd.json").write_text("{")
    (tmp_path / "other.json").write_text('{"schema": "sglang-exact-bench/9"}')
    good = [str(path) for path in paths.values()]
    done = command("report", *good, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "sglang-exact-bench.html").read_text()
    assert page.startswith("<!doctype html>")
    assert (tmp_path / "sglang-exact-bench.md").read_text().startswith("# sglang-exact")
    done = command("report", *good, "odd.json", "other.json", good[0], cwd=tmp_path)
    assert done.returncode == 2
    for told in ("odd.json: found no JSON", "sglang-exact-bench/9", "given twice"):
        assert told in done.stderr
    assert "odd.json" in (tmp_path / "sglang-exact-bench.html").read_text()
    done = command("report", "odd.json", cwd=tmp_path)
    assert done.returncode == 2 and "expected at least one record" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="headless browser by name")
def test_page_in_a_browser(tmp_path: Path) -> None:
    """Nothing of a record runs, the plots have a size, the page does not overflow."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"needs a headless browser: one of {', '.join(BROWSERS)}")
    page = report.html(made(tmp_path, **evil_runs()))
    # The page forbids scripts; the measuring one is let in here and only here.
    probe = (
        "<script nonce='t'>document.title = JSON.stringify(["
        "document.querySelectorAll('script').length,"
        "[...document.querySelectorAll('svg')].every(s => s.clientHeight > 40),"
        "document.querySelectorAll('svg').length,"
        "document.documentElement.scrollWidth <= innerWidth,"
        "performance.getEntriesByType('resource').length])</script></body>"
    )
    page = page.replace(
        "default-src 'none';", "default-src 'none'; script-src 'nonce-t';"
    )
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", probe), encoding="utf-8")
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
         "--window-size=1200,900", f"--user-data-dir={tmp_path / 'profile'}",
         path.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr[-2000:]
    scripts, sized, plots, fits, loaded = json.loads(title[1])
    assert (scripts, sized, fits, loaded) == (1, True, True, 0) and plots >= 4
