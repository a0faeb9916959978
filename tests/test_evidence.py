# SPDX-License-Identifier: Apache-2.0
"""README's table and docs/evidence.md say what the files under results/ say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.evidence import matrix, pages, rows
from tools.proof import arms as proof_arms
from tools.proof import traffic_arms

ROOT = Path(__file__).resolve().parent.parent


def check(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(root / "scripts" / "evidence"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )


def test_evidence_is_up_to_date() -> None:
    done = check(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_was_not_run_is_named() -> None:
    """Unless another file of the same number of layers holds it."""
    ran = {"arm": "dflash", "ask": "long", "expected": "equal"}
    none = {"arm": "off", "ask": "start", "expected": "refused to start", "said": "why"}
    cut = {"layers": 64, "rows": [], "not_run": ["dflash long"], "failed": {}}
    other = {"layers": 4, "rows": [ran], "not_run": [], "failed": {"mtp": "no server"}}
    same = {"layers": 64, "rows": [ran, none], "not_run": [], "failed": {}}
    assert pages.left_out(cut, [cut, other]) == "Not run: dflash long."
    assert pages.left_out(cut, [cut, same]) == ""
    assert "`off` refused to start" in pages.left_out(same, [same])
    assert pages.left_out(other, [other]) == "Without a result: mtp."


def test_a_call_that_was_cut_off_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And answers of an earlier proof do; neither is said of the others."""
    arms = [
        {"arm": "repeats", "compared": 7, "different": 1, "state": "not reached"},
        {"arm": "stops", "compared": 5, "different": 0, "state": "verified"},
    ]
    verify = {"layers": 4, "rows": [{"arm": "dflash", "arms": arms}]}
    row = {"arm": "plain-32", "tally": {"compared": 9, "logprobs_equal": 9}}
    proofs = [{"date": f"2026-11-{day}", "rows": [row]} for day in (29, 30)]
    monkeypatch.setattr(
        matrix, "load", lambda name: [verify] if "verify" in name else proofs
    )
    repeats, stops = (
        matrix.verified("dflash", "repeats"),
        matrix.verified("dflash", "stops"),
    )
    assert matrix._added(repeats) == "6/7 (4 layers, cut off)"
    assert matrix._added(stops) == "5/5 (4 layers)"
    assert matrix._added([*stops, *repeats]) == "11/12 (4 layers, cut off)"
    assert matrix.older("plain-32") == "9 answers of 2026-11-29"
    proofs.pop()
    assert matrix.older("plain-32") == ""


def test_what_a_cached_prefix_saves_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"title": "x", "prompt_tokens": 3000, "cached_tokens": 0, "answers": "a"}
    cold = {**row, "server": "plain", "first_token_s": [2.5, 2.25]}
    warm = {**cold, "server": "plain-cache", "cached_tokens": 1000}
    other = {**row, "server": "host-cache", "answers": "b", "seconds": 7}
    found = {
        "rows": [cold, warm, {**other, "requests_s": 4.5}],
        "label": "some",
        "created": "2026-12-01T00:00",
        "provenance": {"gpu": [{"name": "H200", "driver_version": "1"}]},
    }
    monkeypatch.setattr(pages, "load", lambda name: [found])
    page = "\n".join(pages.cache_page())
    assert (
        "| x | plain-cache | first token after 2.50, 2.25 s | 3,000 | 1,000 | yes |"
        in page
    )
    assert "| x | host-cache | 7.0 s, 4.5 requests/s | 3,000 | 0 | no |" in page
    assert "some, H200, 2026-12-01, plain decoding" in page


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of all that the evidence is made from."""
    for name in ("README.md", "scripts", "results", "docs", "sglang_exact"):
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    assert check(tmp_path).returncode == 0
    return tmp_path


def write(
    checkout: Path, name: str, **changes: Any
) -> subprocess.CompletedProcess[str]:
    """Evidence made anew after a copy of a result with other rows was added."""
    found = json.loads((checkout / "results" / "gpu" / f"{name}.json").read_text())
    for row in found["rows"]:
        row |= changes
    other = f"{name}-another.json"
    (checkout / "results" / "gpu" / other).write_text(json.dumps(found))
    return subprocess.run(
        [sys.executable, str(checkout / "scripts" / "evidence")],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", ["proof-64-mtp", "traffic-2"])
def test_every_row_counts(checkout: Path, name: str) -> None:
    """An arm that nobody knows stands there under its title; without one it is an
    error, not a row that is left out."""
    new = {"arm": "eagle3", "ids_equal": 0, "logprobs_equal": 0, "as_expected": False}
    done = write(checkout, name, **new, title="EAGLE3, 4 draft tokens")
    assert done.returncode == 0, done.stderr
    page = (checkout / "docs" / "evidence.md").read_text()
    assert "| EAGLE3, 4 draft tokens |" in page
    if name.startswith("proof"):
        readme = (checkout / "README.md").read_text()
        assert "| EAGLE3, 4 draft tokens | 64 | 1 | 0.8 | 8 | 0/24 | 0/24 |" in readme
    done = write(checkout, name, **new)
    assert done.returncode == 2
    assert "the arm 'eagle3' without a title" in done.stderr


def test_a_difference_counts_at_any_width(checkout: Path) -> None:
    """Rows of fewer layers give way to those of the widest model only if equal."""
    readme = checkout / "README.md"
    before = readme.read_text()
    assert write(checkout, "proof-4-plain").returncode == 0
    assert readme.read_text() == before
    assert write(checkout, "proof-4-plain", as_expected=False).returncode == 0
    assert "| plain decode, 1 in flight against 8 | 4 | 1 |" in readme.read_text()


def test_every_arm_has_a_title() -> None:
    arms = [*proof_arms.BY_NAME.values(), *traffic_arms.arms_of(traffic_arms.GPU)]
    titles = [arm.title for arm in arms]
    assert all(titles) and len({arm.title for arm in proof_arms.ARMS}) == len(
        proof_arms.ARMS
    )


def test_a_changed_figure_shows(checkout: Path) -> None:
    tmp_path = checkout
    readme = tmp_path / "README.md"
    readme.write_text(readme.read_text().replace("24/24", "23/24", 1))
    done = check(tmp_path)
    assert done.returncode == 1 and "README.md" in done.stdout


@pytest.mark.parametrize(
    ("row", "different"),
    [
        # 300 answers to 30 prompts: each counts, not each prompt.
        ((300, 94, 300, 93), 207),
        # Logprobs were asked for of all but one.
        ((14, 14, 13, 13), 0),
        ((14, 14, 13, 11), 2),
        ((24, 20, 0, None), 4),
    ],
)
def test_every_answer_counts(row: tuple[int | None, ...], different: int) -> None:
    names = ("compared", "ids_equal", "logprobs_compared", "logprobs_equal")
    tally = dict(zip(names, row, strict=True))
    assert rows.different({"tally": tally, "differ": ["a"]}) == different
