# SPDX-License-Identifier: Apache-2.0
"""README's table and docs/evidence.md say what the files under results/ say."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

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
