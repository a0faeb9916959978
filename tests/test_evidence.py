# SPDX-License-Identifier: Apache-2.0
"""README's table and docs/evidence.md say what the files under results/ say."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_what_was_not_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless another file of the same number of layers holds it."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    evidence_pages = importlib.import_module("evidence_pages")
    ran = {"arm": "dflash", "ask": "long", "expected": "equal"}
    none = {"arm": "off", "ask": "start", "expected": "refused to start", "said": "why"}
    cut = {"layers": 64, "rows": [], "not_run": ["dflash long"], "failed": {}}
    other = {"layers": 4, "rows": [ran], "not_run": [], "failed": {"mtp": "no server"}}
    same = {"layers": 64, "rows": [ran, none], "not_run": [], "failed": {}}
    assert evidence_pages.left_out(cut, [cut, other]) == "Not run: dflash long."
    assert evidence_pages.left_out(cut, [cut, same]) == ""
    assert "`off` refused to start" in evidence_pages.left_out(same, [same])
    assert evidence_pages.left_out(other, [other]) == "Without a result: mtp."


def test_a_call_that_was_cut_off_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And answers of an earlier proof do; neither is said of the others."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    matrix = importlib.import_module("evidence_matrix")
    arms = [
        {"arm": "repeats", "compared": 7, "different": 1, "state": "not reached"},
        {"arm": "stops", "compared": 5, "different": 0, "state": "verified"},
    ]
    verify = {"layers": 4, "rows": [{"arm": "dflash", "arms": arms}]}
    row = {"arm": "plain-32", "prompts": 9, "logprobs_equal": 9}
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


def test_a_changed_figure_shows(tmp_path: Path) -> None:
    for name in ("README.md", "scripts", "results", "docs"):
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    assert check(tmp_path).returncode == 0
    readme = tmp_path / "README.md"
    readme.write_text(readme.read_text().replace("24/24", "23/24", 1))
    done = check(tmp_path)
    assert done.returncode == 1 and "README.md" in done.stdout
