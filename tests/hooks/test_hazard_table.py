# SPDX-License-Identifier: Apache-2.0
"""docs/exactness.md: every hazard has a row, every row a test that pytest collects."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "exactness.md"
SUITES = ("core", "docs", "e2e", "hooks", "kernels", "launch", "rehearsal", "selftest")

HAZARDS = (
    *("GDN decode and verify", "Attention in decode and verify", "Linear layers"),
    *("Convolution in decode and verify", "Top-k logprobs", "hold a stop"),
    *("Frequency, presence, repetition penalty", "Greedy request beside a sampled"),
    *("Where a prompt is cut", "Autotuned GDN prefill kernel", "A request taken back"),
    *("Mask token", "Context length", "Output projection in float32"),
    *("M-dependent GEMM", "NaN logits", "SGLANG_GDN_CHUNK_H_", "Prefill graphs"),
    *("Rows, mixed lengths", "KV pool full", "--enable-mixed-chunk", "Pausing"),
    *("Exact ties", "Seeded sampling", "LoRA", "max-running-requests", "Streaming"),
    *("Grammar, regex, JSON schema", "Custom logit processors", "token_ids_logprob"),
    *("Nothing to generate", "end of the context", "Warm-up", "n` above 1"),
    *("chunked-prefill-size", "Overlap scheduling", "New weights", "max_new_tokens"),
    *("aborted mid-way", "aborted in the middle of a block", "`reasoning_tokens`"),
    *("Streamed text that is trimmed", "Streamed reasoning and tool calls"),
    *("Grammar that ends before the request", "Streamed chat logprobs"),
    *("stop string lies across its 50th", "Streamed responses"),
    *("Streamed Ollama answers", "Ollama options"),
    *("Streamed and whole answers",),
    *("More than one HTTP worker", "What NGRAM drafts", "Draft trees of other"),
    *("reserved past the end", "A cached prefix", "prefixes of the old ones"),
)
"""A piece of the title of each row that must be there."""


def rows(text: str) -> list[list[str]]:
    """The cells of every table row, without headings and rules."""
    found = []
    for line in text.splitlines():
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[-1] != "Test" and set(cells[0]) - set("-: "):
            found.append(cells)
    return found


def named(cell: str) -> list[str]:
    """The tests that a cell names."""
    names = re.findall(r"`([^`]+)`", cell)
    return [n for n in names if n.startswith("test_")]


def missing(names: Iterable[str], collected: set[str]) -> list[str]:
    """The names that are no collected test; parameters count only if they are given."""
    plain = {name.partition("[")[0] for name in collected}
    return sorted(set(names) - collected - plain)


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """Names of all tests of the suites, with their parameters."""
    suites = [f"tests/{name}" for name in SUITES if (ROOT / "tests" / name).is_dir()]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p",
         "no:cacheprovider", *suites],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    found = {line.split("::", 1)[1] for line in ran.stdout.splitlines() if "::" in line}
    assert len(found) > 100, ran.stdout[-2000:] + ran.stderr[-2000:]
    return found


def test_every_row_names_a_test() -> None:
    without = [row[0] for row in rows(DOCUMENT.read_text()) if not named(row[-1])]
    assert without == []


def test_every_named_test_exists(collected: set[str]) -> None:
    names = [n for row in rows(DOCUMENT.read_text()) for n in named(row[-1])]
    assert missing(names, collected) == []


def test_every_hazard_has_a_row() -> None:
    titles = [row[0] for row in rows(DOCUMENT.read_text())]
    absent = [h for h in HAZARDS if not any(h.lower() in t.lower() for t in titles)]
    assert absent == []


def test_a_name_that_does_not_exist_is_found(collected: set[str]) -> None:
    """Control: a wrong name, a wrong parameter and an empty cell are seen."""
    wrong = ["test_nothing_of_the_kind", "test_chunk_grid[never]"]
    assert missing(wrong, collected) == sorted(wrong)
    table = "| Hazard | a | b | Test |\n|---|---|---|---|\n| x | y | z | later |\n"
    assert [row[0] for row in rows(table) if not named(row[-1])] == ["x"]
