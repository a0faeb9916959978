# SPDX-License-Identifier: Apache-2.0
"""Patches of other distributions: what is applied, refused, and never touched."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from deep_gemm_wheels import compile_sm120, wheel_root

from sglang_exact import patching
from sglang_exact.patching import Entry, Install
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
    assert patching.apply_diff(BEFORE, DIFF) == AFTER
    assert patching.has_fence(AFTER)
    assert not patching.has_fence(BEFORE)


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
        patching.apply_diff(text, diff)


def test_insertion_without_context_lands_after_its_line() -> None:
    assert patching.apply_diff("a\nb\n", "@@ -1,0 +2 @@\n+x\n") == "a\nx\nb\n"
    assert patching.apply_diff("a\nb\n", "@@ -2 +1,0 @@\n-b\n") == "a\n"


def test_old_version_gets_a_private_tree_and_keeps_its_own(
    tmp_path: Path, entries: tuple[Entry, ...], folder: Path
) -> None:
    install = wheel(tmp_path, "1.0", BEFORE)
    before = snapshot(install.root)
    tree = patching.prepare(install, entries, tmp_path / "cache", folder)
    assert tree.private
    copied = tree.root / Path(FILE).relative_to("deep_gemm")
    assert copied.read_text() == AFTER
    assert (copied.parent / "other.cuh").read_text() == "other\n"
    assert snapshot(install.root) == before
    assert patching.prepare(install, entries, tmp_path / "cache", folder) == tree
    assert list((tmp_path / "cache").glob("*/*.partial.*")) == []
    (reason,) = patching.reasons(install, entries)
    assert "without the fence" in reason.found


def test_new_version_is_used_as_it_is(
    tmp_path: Path, entries: tuple[Entry, ...], folder: Path
) -> None:
    install = wheel(tmp_path, "1.1", AFTER)
    assert patching.reasons(install, entries) == []
    tree = patching.prepare(install, entries, tmp_path / "cache", folder)
    assert not tree.private
    assert tree.root == install.root / "deep_gemm"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("text", [BEFORE + "\n", "", AFTER + " "])
def test_unknown_content_is_refused(
    tmp_path: Path, entries: tuple[Entry, ...], folder: Path, version: str, text: str
) -> None:
    install = wheel(tmp_path, version, text)
    with pytest.raises(Refused, match="force-reinstall"):
        patching.prepare(install, entries, tmp_path / "cache", folder)
    with pytest.raises(Refused, match="force-reinstall"):
        patching.patch_in_place(install, entries, folder)
    assert patching.reasons(install, entries)
    assert (install.root / FILE).read_text() == text
    assert not (tmp_path / "cache").exists()


def test_new_version_that_lost_the_fence_is_refused(
    tmp_path: Path, folder: Path
) -> None:
    """The digest alone is not believed: a manifest may list the wrong one."""
    wrong = (entry("1.1", BEFORE, BEFORE, None), entry("1.2", AFTER, AFTER, None))
    install = wheel(tmp_path, "1.1", BEFORE)
    assert patching.reasons(install, wrong)


def test_unknown_version_and_missing_file_are_refused(
    tmp_path: Path, entries: tuple[Entry, ...], folder: Path
) -> None:
    install = wheel(tmp_path, "2.0", AFTER)
    with pytest.raises(Refused, match="one of 1.0, 1.1, 1.2"):
        patching.prepare(install, entries, tmp_path / "cache", folder)
    (install.root / FILE).unlink()
    assert "no file" in patching.reasons(Install("1.1", install.root), entries)[0].found
    assert patching.reasons(None, entries)


def test_wrong_diff_leaves_nothing_behind(
    tmp_path: Path, entries: tuple[Entry, ...], folder: Path
) -> None:
    install = wheel(tmp_path, "1.0", BEFORE)
    (folder / "fence.patch").write_text(DIFF.replace("fence_view", "no_fence"))
    with pytest.raises(ValueError, match="expected"):
        patching.prepare(install, entries, tmp_path / "cache", folder)
    with pytest.raises(ValueError, match="expected"):
        patching.patch_in_place(install, entries, folder)
    assert (install.root / FILE).read_text() == BEFORE
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []


def test_tampered_private_tree_is_refused(
    tmp_path: Path, entries: tuple[Entry, ...], folder: Path
) -> None:
    install = wheel(tmp_path, "1.0", BEFORE)
    tree = patching.prepare(install, entries, tmp_path / "cache", folder)
    (tree.root / Path(FILE).relative_to("deep_gemm")).write_text(BEFORE)
    with pytest.raises(Refused, match="remove"):
        patching.prepare(install, entries, tmp_path / "cache", folder)


def test_in_place_only_when_asked_and_never_through_a_hard_link(
    tmp_path: Path, entries: tuple[Entry, ...], folder: Path
) -> None:
    install = wheel(tmp_path, "1.0", BEFORE)
    linked = tmp_path / "installer_cache.cuh"
    linked.hardlink_to(install.root / FILE)
    assert patching.patch_in_place(install, entries, folder)
    assert (install.root / FILE).read_text() == AFTER
    assert linked.read_text() == BEFORE
    assert not patching.patch_in_place(install, entries, folder)
    tree = patching.prepare(install, entries, tmp_path / "cache", folder)
    assert not tree.private


def test_kernel_cache_is_named_by_the_patch(
    tmp_path: Path, entries: tuple[Entry, ...], folder: Path
) -> None:
    names = {patching.digest(e, folder) for e in entries}
    assert len(names) == len(entries)
    (folder / "fence.patch").write_text(DIFF + "\n")
    assert patching.digest(entries[0], folder) not in names
    install = wheel(tmp_path, "1.1", AFTER)
    tree = patching.prepare(install, entries, tmp_path / "cache", folder)
    (path,) = patching.environment(tree).values()
    assert tree.digest in path
    assert list(patching.environment(tree)) == ["SGLANG_DG_CACHE_DIR"]


def test_kernels_of_other_headers_are_found(
    tmp_path: Path, entries: tuple[Entry, ...], folder: Path
) -> None:
    install = wheel(tmp_path, "1.0", BEFORE)
    tree = patching.prepare(install, entries, tmp_path / "cache", folder)
    assert patching.compiled_reasons(tree) == []
    for name, root in (("good", tree.root), ("bad", install.root / "deep_gemm")):
        made = tree.jit_cache / "cache" / name
        made.mkdir(parents=True)
        config = {"config": {"include_dirs": [str(root / "include")]}}
        (made / "meta.json").write_text(json.dumps(config))
    (reason,) = patching.compiled_reasons(tree)
    assert "1 kernels" in reason.found
    assert "bad" in reason.found


def test_shipped_manifest_is_whole() -> None:
    entries = patching.load_manifest()
    assert [e.version for e in entries if e.diff] == ["0.2.0", "0.2.2"]
    assert {"0.2.3", "0.2.3.post2", "0.2.5"} <= {e.version for e in entries}
    for e in entries:
        assert e.file == FILE
        assert e.why and e.upstream and e.retire_when
        assert (e.sha256_before == e.sha256_after) == (e.diff is None)
        if e.diff:
            added = (patching.PATCHES / e.diff).read_text().count("\n+")
            assert added <= 3  # the header and two lines: no code is pasted along


def test_manifest_of_another_format_is_refused(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": 2, "entries": []}')
    with pytest.raises(ValueError, match="format 2"):
        patching.load_manifest(folder)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["--wheel-version", "9.9"], 2, "0.2.3.post2"),
        (["--wheel-version", "0.2.0"], 2, "force-reinstall"),
        (["--check", "--wheel-version", "0.2.0"], 1, "force-reinstall"),
        ([], 2, "--wheel-version"),
    ],
)
def test_script_refuses(
    tmp_path: Path, arguments: list[str], code: int, word: str
) -> None:
    install = wheel(tmp_path, "1.0", BEFORE)
    command = [sys.executable, str(ROOT / "scripts" / "apply_patches")]
    command += ["--target-dir", str(tmp_path / "cache")]
    command += ["--wheel-root", str(install.root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert word in done.stdout + done.stderr
    assert not (tmp_path / "cache").exists()


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
    entries = patching.load_manifest()
    tree = patching.prepare(install, entries, tmp_path / "cache")
    assert tree.private == (fences == 2)
    patched = compile_sm120(tree.root / "include", version, tmp_path, ptx=False)
    assert patched.count("FENCE.VIEW.ASYNC") == 3
    assert patched.count("HMMA.16816.F32.BF16") == 32


@pytest.mark.slow
def test_patched_headers_are_the_released_ones(tmp_path: Path) -> None:
    released = (wheel_root("0.2.3") / FILE).read_bytes()
    for version in ("0.2.0", "0.2.2"):
        install = Install(version, wheel_root(version))
        target = tmp_path / version
        tree = patching.prepare(install, patching.load_manifest(), target)
        made = tree.root / Path(FILE).relative_to("deep_gemm")
        assert made.read_bytes() == released


ACTIVATE = """
import sys
from pathlib import Path
import torch, deep_gemm
from sglang_exact.patching import Tree, activate, compiled_reasons
root, cache = map(Path, sys.argv[1:])
wheel = Path(deep_gemm.__file__).parent
activate(Tree(root, "x", True, cache))
deep_gemm.use_deterministic_algorithms(True)
a = torch.randn(64, 512, device="cuda").bfloat16()
out = torch.empty(64, 64, device="cuda", dtype=torch.bfloat16)
deep_gemm.bf16_gemm_nt(a, a, out)
torch.cuda.synchronize()
assert list(cache.glob("cache/*/meta.json"))
assert compiled_reasons(Tree(root, "x", True, cache)) == []
assert compiled_reasons(Tree(wheel, "x", True, cache))
"""


@pytest.mark.gpu
@pytest.mark.slow
def test_private_headers_are_the_ones_compiled(tmp_path: Path) -> None:
    import os
    import shutil

    install = patching.find_install()
    if install is None:
        pytest.skip("no DeepGEMM installed")
    root, cache = tmp_path / "headers", tmp_path / "jit"
    shutil.copytree(install.root / "deep_gemm" / "include", root / "include")
    # DeepGEMM may itself come from PYTHONPATH.
    paths = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", ACTIVATE, str(root), str(cache)],
        env={**os.environ, "DG_JIT_CACHE_DIR": str(cache), "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
