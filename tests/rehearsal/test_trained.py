# SPDX-License-Identifier: Apache-2.0
"""The demonstration on trained weights: where texts part, and what is promised."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from sglang_exact.bench.exactness import Tally
from tools import smollm2
from tools.proof import demo, options, trained
from tools.proof.passes import Result, Row

WORDS: Any = SimpleNamespace(
    text=lambda ids: " ".join(f"w{i}" for i in ids), ask=lambda _: [1, 2]
)


@pytest.mark.parametrize(
    ("reference", "found", "at"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
    ],
)
def test_where_answers_part(
    reference: list[int], found: list[int], at: int | None
) -> None:
    assert trained.parted(reference, found) == at
    markup = trained.marked(WORDS, reference, found)
    assert ("on red" in markup) is (at is not None)
    console = Console(width=200, record=True)
    console.print(markup)
    said = console.export_text().split()
    assert [word for word in said if word != "(ends)"] == [
        part for part in _pieces(found, at) if part
    ]


def _pieces(found: list[int], at: int | None) -> list[str]:
    """Words as they are shown: pieces are joined without a blank at the mark."""
    if at is None:
        return WORDS.text(found).split()
    cut = [WORDS.text(found[:at]), WORDS.text(found[at : at + 1]) or "(ends)"]
    joined = "".join([*cut, WORDS.text(found[at + 1 :])])
    return joined.split()


def answer(ids: list[int], logprobs: list[int], verifies: int = 0) -> Any:
    return SimpleNamespace(ids=ids, logprobs=logprobs, spec_verify_ct=verifies)


def result(arm: Any, found: list[Any], equal: bool) -> Result:
    tally = Tally()
    tally.compared = tally.logprobs = len(found)
    tally.ids_equal = tally.logprobs_equal = len(found) if equal else 0
    step = arm.phases[0]
    row = Row(arm.name, step.title, tally, True, 4, None, 0.1, step.equal, True)
    return Result([row], [found], None)


def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str = ""
) -> tuple[int, Any, str]:
    """The demonstration with servers that answer from a table."""
    plain = [answer([5, 6], [1, 2])] * len(trained.QUESTIONS)
    other = [answer([5, 7], [1, 3], 1)] * len(trained.QUESTIONS)

    def run_arm(arm: Any, setup: Any, reference: Any, say: Any) -> Result:
        say(arm.name)
        assert (reference is None) == (arm.name == "plain")
        # Which arm differs from plain decoding.
        differs = (arm.name == "stock") != (arm.name == wrong)
        return result(arm, other if differs else plain, not differs)

    monkeypatch.setattr(trained, "run_arm", run_arm)
    monkeypatch.setattr(smollm2, "Words", lambda _: WORDS)
    monkeypatch.setattr(
        smollm2, "make", lambda folder: (folder / "config.json").write_text("{}")
    )
    folder, page, out = tmp_path / "m", tmp_path / "p.html", tmp_path / "o.json"
    folder.mkdir()
    words = ["--trained", folder, "--html", page, "--json", out]
    status = demo.main(options.demo([str(word) for word in words]))
    return status, json.loads(out.read_text()), page.read_text()


def test_stock_parts_and_exact_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, found, page = run(tmp_path, monkeypatch)
    assert status == 0 and found["ok"]
    assert found["texts"]["exact"] == found["texts"]["plain"] != found["texts"]["stock"]
    assert "did not change a bit" in page and "w7" in page
    # It opens without a network.
    assert "http" not in page.replace("http-equiv", "")


@pytest.mark.parametrize("wrong", ["stock", "exact"])
def test_what_is_not_as_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    status, found, page = run(tmp_path, monkeypatch, wrong)
    assert status == 1 and not found["ok"] and "NOT as promised" in page


def test_logprobs_are_counted_up_to_where_texts_part() -> None:
    assert (
        trained.differing_logprobs(answer([1, 2], [7, 8]), answer([1, 2], [7, 9])) == 1
    )
    assert (
        trained.differing_logprobs(answer([1, 2], [7, 8]), answer([1, 3], [7, 9])) == 0
    )


@pytest.mark.parametrize(
    "words", [["--html", "x"], ["--trained", "x", "--layers", "4"]]
)
def test_options_that_contradict(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        options.demo(words)
