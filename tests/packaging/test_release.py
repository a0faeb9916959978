# SPDX-License-Identifier: Apache-2.0
"""The release: what is in it, and that it works where it is installed.

Installed means: the built wheel in a new environment that sees the installed host, run
from a folder that is not the checkout.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from docker_build import base_image, site_packages
from release_build import Release

from sglang_exact import __version__

ROOT = Path(__file__).resolve().parents[2]


def test_sdist_and_wheel(release: Release) -> None:
    assert release.reasons == []


def test_what_a_wheel_must_not_lack_or_hold(
    release: Release, release_check: ModuleType
) -> None:
    """Each rule finds what it is for."""
    good = set(release_check.members(release.wheel))
    tree = release_check.tree_files()
    assert len(tree) > 100
    assert release_check.wheel_reasons(good, tree) == []
    for missing in release_check.NEEDED:
        found = release_check.wheel_reasons(good - {missing}, tree)
        assert found == [f"missing: {missing}"]
    for extra, said in (
        ("kernels/__init__.py", "another top-level name"),
        ("tests/test_x.py", "another top-level name"),
        ("sglang_exact/test_x.py", "a test"),
        ("sglang_exact/tests/x.py", "a test"),
        ("sglang_exact/__pycache__/x.pyc", "a compiled file"),
    ):
        (found,) = release_check.wheel_reasons(good | {extra}, tree)
        assert found == f"{said}: {extra}"
    licence = next(n for n in good if n.endswith("licenses/LICENSE"))
    assert release_check.wheel_reasons(good - {licence}, tree) == [
        "missing: .dist-info/licenses/LICENSE"
    ]


def test_what_an_sdist_must_not_lack_or_hold(
    release: Release, release_check: ModuleType
) -> None:
    good = set(release_check.members(release.sdist))
    assert release_check.sdist_reasons(good) == []
    assert "kernels/sglang_exact_kernels/gdn_verify.py" in good
    for missing in ("LICENSE", "CHANGELOG.md", "sglang_exact/verify/prompts.jsonl"):
        assert release_check.sdist_reasons(good - {missing}) == [f"missing: {missing}"]
    for extra in ("tests/test_x.py", "kernels/__init__.py", ".git/config"):
        (found,) = release_check.sdist_reasons(good | {extra})
        assert found.endswith(extra)


def test_version_is_in_one_place(release_check: ModuleType) -> None:
    assert release_check.version() == __version__
    assert release_check.version_reasons() == []


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("CHANGELOG.md", f"## {__version__}", "## 9.9.9", "at the top of CHANGELOG"),
        ("CHANGELOG.md", f"## {__version__}", "", "CHANGELOG.md"),
        ("pyproject.toml", "[project]", '[project]\nversion = "1"', "in pyproject"),
        (
            "docker/compose.yaml",
            f"sglang-exact:{__version__}",
            "sglang-exact:9.9.9",
            "in docker/compose.yaml",
        ),
        ("sglang_exact/gate.py", '"""', '__version__ = "2"\n"""', "found __version__"),
    ],
)
def test_another_version_is_found(
    tmp_path: Path, release_check: ModuleType, file: str, old: str, new: str, said: str
) -> None:
    for name in ("CHANGELOG.md", "pyproject.toml", "docker/compose.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    skip = shutil.ignore_patterns("_patches", "__pycache__")
    shutil.copytree(ROOT / "sglang_exact", tmp_path / "sglang_exact", ignore=skip)
    assert release_check.version_reasons(tmp_path) == []
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new, 1))
    (reason,) = release_check.version_reasons(tmp_path)
    assert said in reason


@pytest.fixture(scope="module")
def installed(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel beside the real host."""
    base = base_image(tmp_path_factory.mktemp("installed") / "env")
    # The host's own torch runs the launcher: this is no image.
    site = site_packages(base)
    shutil.rmtree(site / "torch")
    shutil.rmtree(site / "torch-2.14.1.dist-info")
    pip = [str(base / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    pip += ["--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(release.wheel)], check=True)
    return base


def run(base: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run something of the environment, away from the checkout."""
    environ = {
        k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "TRITON_"))
    }
    environ.pop("PYTHONPATH", None)
    return subprocess.run(
        [str(base / "bin" / words[0]), *words[1:]],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.host
def test_doctor_of_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "sglang-exact", "doctor", "--no-gpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"[ok  ] sglang_exact: {__version__}" in done.stdout
    done = run(installed, tmp_path, "sglang-exact", "env")
    site = site_packages(installed)
    assert f"folder: {site}/sglang_exact" in done.stdout
    assert f"installed: {__version__}, a wheel" in done.stdout


@pytest.mark.host
def test_launcher_of_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    """Hooks, pins, gate and arguments in the host; kernels from the wheel."""
    code = (
        "import sys, sglang_exact, sglang_exact_kernels, importlib.util as u;"
        "print(sglang_exact.__file__, sglang_exact_kernels.__file__, sep='\\n')"
    )
    done = run(installed, tmp_path, "python", "-c", code)
    site = site_packages(installed)
    assert [Path(line).parents[1] for line in done.stdout.split()] == [site, site]
    words = ("-m", "sglang_exact.rehearsal.launch_server", "--draft", "dflash2")
    done = run(installed, tmp_path, "python", "-W", "ignore", *words, "--exact-check")
    assert done.returncode == 0, done.stderr
    assert "this setup can be served exactly" in done.stdout


@pytest.mark.host
def test_kernels_is_not_ours_where_it_is_installed(
    installed: Path, tmp_path: Path
) -> None:
    code = (
        "import importlib.util as u; s = u.find_spec('kernels');"
        "print(s.origin if s else None)"
    )
    done = run(installed, tmp_path, "python", "-c", code)
    assert done.returncode == 0
    assert not done.stdout.startswith(str(site_packages(installed)))
    assert not (site_packages(installed) / "kernels").exists()


@pytest.mark.host
@pytest.mark.e2e
@pytest.mark.slow
def test_server_of_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    """It serves: one answer from the engine, attested by the wheel's own files."""
    code = """
import tempfile, pathlib, sglang_exact
from sglang_exact.rehearsal import models
from sglang_exact.rehearsal.server import Server, draft_flags
folder = pathlib.Path(tempfile.mkdtemp(dir="."))
model = models.make_target(folder / "target")
draft = models.make_draft(folder / "dflash2", "dflash2")
with Server(model, flags=draft_flags("dflash2", draft)) as server:
    print(len(server.generate([5, 6, 7, 8], 4).ids))
    print(server.info()["sglang_exact"]["version"], sglang_exact.__file__)
"""
    done = run(installed, tmp_path, "python", "-W", "ignore", "-c", code)
    assert done.returncode == 0, done.stderr
    count, attested = done.stdout.splitlines()[-2:]
    assert count == "4"
    assert attested.split() == [
        __version__,
        str(site_packages(installed) / "sglang_exact" / "__init__.py"),
    ]


def test_changelog_has_a_heading_for_every_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (.+)$", text, re.M)
    assert versions and len(set(versions)) == len(versions)
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", item) for item in versions)
