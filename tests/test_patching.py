# SPDX-License-Identifier: Apache-2.0
"""Patches of other distributions: what is applied, refused, and never touched."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deep_gemm_wheels import compile_sm120, wheel_root

from sglang_exact.host import headers
from sglang_exact.host.headers import Entry, Install
from sglang_exact.reasons import Refused

ROOT = Path(__file__).parents[1]
FILE = "deep_gemm/include/deep_gemm/impls/sm120_bf16_gemm.cuh"
BEFORE = """\
kernel {
    compute();

    if (lane_idx == 0)
        empty_barriers[stage]->arrive();
}
"""
DIFF = """\
--- a/x
+++ b/x
@@ -3,2 +3,3 @@

+    fence_view_async_shared();
     if (lane_idx == 0)
"""
DIFF = DIFF.replace("@@\n\n", "@@\n \n")
AFTER = BEFORE.replace("    if (", "    fence_view_async_shared();\n    if (")


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def entry(version: str, before: str, after: str, diff: str | None) -> Entry:
    return Entry(
        "sgl-deep-gemm", version, FILE, diff, sha(before), sha(after), "w", "u", "r"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "patches"
    made.mkdir()
    (made / "fence.patch").write_text(DIFF)
    return made


@pytest.fixture
def entries() -> tuple[Entry, ...]:
    return (
        entry("1.0", BEFORE, AFTER, "fence.patch"),
        entry("1.1", AFTER, AFTER, None),
        entry("1.2", AFTER, AFTER, None),
    )


def wheel(tmp_path: Path, version: str, text: str) -> Install:
    root = tmp_path / "site"
    file = root / FILE
    file.parent.mkdir(parents=True)
    file.write_text(text)
    (file.parent / "other.cuh").write_text("other\n")
    return Install(version, root)


def snapshot(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): sha(p.read_text())
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


def test_diff_is_applied_to_the_byte() -> None:
    assert headers.apply_diff(BEFORE, DIFF) == AFTER
    assert headers.has_fence(AFTER)
    assert not headers.has_fence(BEFORE)


@pytest.mark.parametrize(
    ("text", "diff", "word"),
    [
        (BEFORE.replace("if (lane", "if  (lane"), DIFF, "line 4"),
        ("\n" + BEFORE, DIFF, "line 3"),
        ("kernel {\n", DIFF, "the end"),
        (BEFORE, "--- a/x\n+++ b/x\n", "no hunk"),
    ],
)
def test_diff_that_does_not_fit_is_refused(text: str, diff: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        headers.apply_diff(text, diff)


def test_insertion_without_context_lands_after_its_line() -> None:
    assert headers.apply_diff("a\nb\n", "@@ -1,0 +2 @@\n+x\n") == "a\nx\nb\n"
    assert headers.apply_diff("a\nb\n", "@@ -2 +1,0 @@\n-b\n") == "a\n"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("text", [BEFORE + "\n", "", AFTER + " "])
def test_unknown_content_is_refused(
    tmp_path: Path, entries: tuple[Entry, ...], folder: Path, version: str, text: str
) -> None:
    install = wheel(tmp_path, version, text)
    with pytest.raises(Refused, match="force-reinstall"):
        headers.patch_in_place(install, entries, folder)
    assert headers.reasons(install, entries)
    assert (install.root / FILE).read_text() == text


def test_new_version_that_lost_the_fence_is_refused(
    tmp_path: Path, folder: Path
) -> None:
    """The digest alone is not believed: a manifest may list the wrong one."""
    wrong = (entry("1.1", BEFORE, BEFORE, None), entry("1.2", AFTER, AFTER, None))
    install = wheel(tmp_path, "1.1", BEFORE)
    assert headers.reasons(install, wrong)


def test_unknown_version_and_missing_file_are_refused(
    tmp_path: Path, entries: tuple[Entry, ...], folder: Path
) -> None:
    install = wheel(tmp_path, "2.0", AFTER)
    with pytest.raises(Refused, match="one of 1.0, 1.1, 1.2"):
        headers.patch_in_place(install, entries, folder)
    (install.root / FILE).unlink()
    assert "no file" in headers.reasons(Install("1.1", install.root), entries)[0].found
    assert headers.reasons(None, entries)


def test_wrong_diff_leaves_nothing_behind(
    tmp_path: Path, entries: tuple[Entry, ...], folder: Path
) -> None:
    install = wheel(tmp_path, "1.0", BEFORE)
    (folder / "fence.patch").write_text(DIFF.replace("fence_view", "no_fence"))
    before = snapshot(install.root)
    with pytest.raises(ValueError, match="expected"):
        headers.patch_in_place(install, entries, folder)
    assert snapshot(install.root) == before


def test_in_place_only_when_asked_and_never_through_a_hard_link(
    tmp_path: Path, entries: tuple[Entry, ...], folder: Path
) -> None:
    install = wheel(tmp_path, "1.0", BEFORE)
    linked = tmp_path / "installer_cache.cuh"
    linked.hardlink_to(install.root / FILE)
    assert headers.patch_in_place(install, entries, folder)
    assert (install.root / FILE).read_text() == AFTER
    assert linked.read_text() == BEFORE
    assert not headers.patch_in_place(install, entries, folder)
    assert headers.reasons(install, entries) == []


def test_shipped_manifest_is_whole() -> None:
    entries = headers.load_manifest()
    assert [e.version for e in entries if e.diff] == ["0.2.0", "0.2.2"]
    assert {"0.2.3", "0.2.3.post2", "0.2.5"} <= {e.version for e in entries}
    for e in entries:
        assert e.file == FILE
        assert e.why and e.upstream and e.retire_when
        assert (e.sha256_before == e.sha256_after) == (e.diff is None)
        if e.diff:
            added = (headers.PATCHES / e.diff).read_text().count("\n+")
            assert added <= 3  # the header and two lines: no code is pasted along


def test_manifest_of_another_format_is_refused(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": 2, "entries": []}')
    with pytest.raises(ValueError, match="format 2"):
        headers.load_manifest(folder)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["--in-place", "--wheel-version", "9.9"], 2, "0.2.3.post2"),
        (["--in-place", "--wheel-version", "0.2.0"], 2, "force-reinstall"),
        (["--check", "--wheel-version", "0.2.0"], 1, "force-reinstall"),
        (["--wheel-version", "0.2.0"], 1, "force-reinstall"),
        ([], 2, "--wheel-version"),
        (["--check", "--in-place", "--wheel-version", "0.2.0"], 2, "not allowed"),
    ],
)
def test_script_refuses(
    tmp_path: Path, arguments: list[str], code: int, word: str
) -> None:
    install = wheel(tmp_path, "1.0", BEFORE)
    command = [sys.executable, str(ROOT / "scripts" / "apply_patches")]
    command += ["--wheel-root", str(install.root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert word in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert (install.root / FILE).read_text() == BEFORE


def test_the_fix_that_the_refusal_names(
    tmp_path: Path, entries: tuple[Entry, ...], folder: Path
) -> None:
    """Each command of the message is run as it is written; then there is no refusal.

    The package lies as pip and as git lay it; its manifest knows a synthetic header.
    """
    (reason,) = headers.reasons(wheel(tmp_path, "1.0", BEFORE), entries)
    for number, (shape, patches) in enumerate(
        (("installed", "sglang_exact/_patches"), ("checkout", "patches"))
    ):
        home = tmp_path / shape
        shutil.copytree(
            ROOT / "sglang_exact",
            home / "sglang_exact",
            ignore=lambda folder, names: {"_patches", "__pycache__"} & set(names),
        )
        shutil.copytree(folder, home / patches)
        manifest = {"format": 1, "entries": [e._asdict() for e in entries]}
        (home / patches / "manifest.json").write_text(json.dumps(manifest))
        (home / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "apply_patches", home / "scripts")
        install = wheel(home, "1.0", BEFORE)
        info = install.root / "sgl_deep_gemm-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: sgl-deep-gemm\nVersion: 1.0\n"
        )
        found = re.findall(
            r"python -m [^()]+--in-place|scripts/\S+ --in-place", reason.fix
        )
        assert len(found) == 2
        command = shlex.split(found[number])
        python = [sys.executable] if number else [sys.executable, *command[1:]]
        command = [*python, *command] if number else python

        def run(*words: str, home: Path = home, site: Path = install.root) -> int:
            env = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{home}"}
            return subprocess.run(words, cwd=home, env=env, check=False).returncode

        check = (sys.executable, "-m", "sglang_exact.host.headers")
        assert run(*check) == 1
        # Control: what changes nothing leaves the refusal.
        assert run(*command[:-1]) == 1
        assert run(*command) == 0
        assert run(*check) == 0
        assert (install.root / FILE).read_text() == AFTER


def copied(install: Install, into: Path) -> Install:
    """The unpacked wheel once more, to be edited: other tests share the first."""
    shutil.copytree(install.root, into / "copy")
    return Install(install.version, into / "copy")


FENCES = {"0.2.0": 2, "0.2.2": 2, "0.2.3": 3, "0.2.3.post2": 3, "0.2.5": 3}
"""FENCE.VIEW.ASYNC in the kernel of the released header."""


@pytest.mark.slow
@pytest.mark.parametrize(("version", "fences"), FENCES.items())
def test_fences_in_machine_code(tmp_path: Path, version: str, fences: int) -> None:
    install = Install(version, wheel_root(version))
    include = install.root / "deep_gemm" / "include"
    sass = compile_sm120(include, version, tmp_path, ptx=False)
    assert sass.count("FENCE.VIEW.ASYNC") == fences
    assert sass.count("HMMA.16816.F32.BF16") == 32
    install = copied(install, tmp_path)
    changed = headers.patch_in_place(install, headers.load_manifest())
    assert changed == (fences == 2)
    include = install.root / "deep_gemm" / "include"
    patched = compile_sm120(include, version, tmp_path, ptx=False)
    assert patched.count("FENCE.VIEW.ASYNC") == 3
    assert patched.count("HMMA.16816.F32.BF16") == 32


@pytest.mark.slow
def test_patched_headers_are_the_released_ones(tmp_path: Path) -> None:
    released = (wheel_root("0.2.3") / FILE).read_bytes()
    for version in ("0.2.0", "0.2.2"):
        install = copied(Install(version, wheel_root(version)), tmp_path / version)
        assert headers.patch_in_place(install, headers.load_manifest())
        assert (install.root / FILE).read_bytes() == released
