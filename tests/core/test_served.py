# SPDX-License-Identifier: Apache-2.0
"""The digest that a server attests: of what it runs, and of nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sglang_exact import attestation, served

ROOT = Path(__file__).resolve().parents[2]
# What asks a server, or proves it, and is shipped beside what it runs.
OTHERS = ("bench", "cli", "client", "rehearsal", "verify", "view")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of both packages."""
    home = tmp_path_factory.mktemp("served")
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "sglang_exact", home / "sglang_exact", ignore=skip)
    shutil.copytree(
        ROOT / "kernels" / served.KERNELS, home / served.KERNELS, ignore=skip
    )
    return home


def digest(home: Path) -> str:
    return served.digest(home / "sglang_exact", home / served.KERNELS)


def sources(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in served.SUFFIXES)


def test_the_attested_digest_is_that_of_the_files() -> None:
    found = served.digest(ROOT / "sglang_exact", ROOT / "kernels" / served.KERNELS)
    assert attestation.digest() == found and len(found) == 64


def test_every_file_is_of_what_serves_or_of_the_others(copy: Path) -> None:
    package, kernels = copy / "sglang_exact", copy / served.KERNELS
    hashed = {path for _, path in served.files(package, kernels)}
    others = {package / "__main__.py"} | {
        p for o in OTHERS for p in sources(package / o)
    }
    assert hashed.isdisjoint(others)
    assert hashed | others == {*sources(package), *sources(kernels)}


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("sglang_exact/__init__.py", True),
        ("sglang_exact/hooks/rank.py", True),
        ("sglang_exact/gate.py", True),
        ("sglang_exact/variables.json", True),
        ("sglang_exact/_patches/manifest.json", True),
        ("sglang_exact_kernels/gdn_verify.py", True),
        ("sglang_exact/bench/run.py", False),
        ("sglang_exact/verify/record.py", False),
        ("sglang_exact/view/charts.py", False),
        ("sglang_exact/client/http.py", False),
        ("sglang_exact/cli/env.py", False),
        ("sglang_exact/rehearsal/models.py", False),
    ],
)
def test_a_comment_counts_in_what_serves(copy: Path, name: str, counts: bool) -> None:
    before, path = digest(copy), copy / name
    data = path.read_bytes()
    path.write_bytes(data + b"# a comment\n")
    assert (digest(copy) != before) is counts
    path.write_bytes(data)


def test_names_and_places_count(copy: Path, tmp_path: Path) -> None:
    """A new file in a served room counts, also an empty one; a cache does not."""
    before, room = digest(copy), copy / "sglang_exact" / "hooks"
    for name, counts in (("new.py", True), ("new.pyc", False)):
        path = room / name
        path.touch()
        assert (digest(copy) != before) is counts
        path.unlink()


def test_a_module_that_is_missing_is_said(copy: Path, tmp_path: Path) -> None:
    shutil.copytree(copy, tmp_path / "less")
    (tmp_path / "less" / "sglang_exact" / "gate.py").unlink()
    with pytest.raises(FileNotFoundError, match=r"no .*gate\.py, expected every"):
        digest(tmp_path / "less")
