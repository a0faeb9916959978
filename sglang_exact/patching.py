# SPDX-License-Identifier: Apache-2.0
"""Edits to headers of other distributions: which, are they there, and how to use them.

DeepGEMM compiles its kernels at run time from headers in its wheel. A version whose
sm120 kernel lacks a fence gets a private, patched copy of those headers; the wheel in
site-packages stays as it is unless asked otherwise. Whatever the manifest does not
know, by version or by content, is refused.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from sglang_exact.reasons import Reason, Refused

__all__ = [
    "FENCED",
    "UNFENCED",
    "UNKNOWN",
    "Entry",
    "Install",
    "Tree",
    "activate",
    "apply_diff",
    "compiled_reasons",
    "default_target",
    "digest",
    "entry_for",
    "environment",
    "find_install",
    "has_fence",
    "load_manifest",
    "patch_in_place",
    "prepare",
    "reasons",
    "state",
]

DIST = "sgl-deep-gemm"
_SHIPPED = Path(__file__).parent / "_patches"
PATCHES = _SHIPPED if _SHIPPED.is_dir() else Path(__file__).parents[1] / "patches"
CACHE_VARIABLE = "SGLANG_DG_CACHE_DIR"

FENCED, UNFENCED, UNKNOWN = "fenced", "unfenced", "unknown"

_FENCE = re.compile(
    r"fence_view_async_shared\(\);\s*"
    r"if \(lane_idx == 0\)\s*empty_barriers\[stage\]->arrive\(\);"
)
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class Entry(NamedTuple):
    """One file of one version of a distribution; `diff` is None if it needs none."""

    dist: str
    version: str
    file: str
    diff: str | None
    sha256_before: str
    sha256_after: str
    why: str
    upstream: str
    retire_when: str


class Install(NamedTuple):
    """An unpacked distribution: `root` is the folder that holds its packages."""

    version: str
    root: Path


class Tree(NamedTuple):
    """Headers to compile from: `root` has an include folder; `private` is a copy."""

    root: Path
    digest: str
    private: bool
    jit_cache: Path


def load_manifest(folder: Path = PATCHES) -> tuple[Entry, ...]:
    """Entries of manifest.json. Raises ValueError if it is of another format."""
    content = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    if content.get("format") != 1:
        raise ValueError(
            f"found manifest format {content.get('format')}, expected 1; "
            "fix: reinstall sglang_exact"
        )
    return tuple(Entry(**entry) for entry in content["entries"])


def find_install() -> Install | None:
    """The installed DeepGEMM, found without importing it; None if there is none."""
    try:
        found = importlib.metadata.distribution(DIST)
    except importlib.metadata.PackageNotFoundError:
        return None
    return Install(found.version, Path(str(found.locate_file(""))))


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def has_fence(text: str) -> bool:
    """Whether the sm120 bf16 kernel orders its reads before it releases a stage."""
    return _FENCE.search(text) is not None


def entry_for(install: Install, entries: Iterable[Entry]) -> Entry:
    """The manifest's entry of the installed version. Raises Refused for any other."""
    entries = tuple(entries)
    for entry in entries:
        if entry.version == install.version:
            return entry
    raise Refused(
        [
            Reason(
                f"{DIST} {install.version}",
                "one of " + ", ".join(e.version for e in entries),
                f"pip install --no-deps {DIST}=={entries[-2].version}",
            )
        ]
    )


def state(install: Install, entry: Entry) -> str:
    """FENCED, UNFENCED or UNKNOWN: what the installed file is, by its bytes."""
    file = install.root / entry.file
    if not file.is_file():
        return UNKNOWN
    found = sha256(file)
    if found == entry.sha256_after and has_fence(file.read_text(encoding="utf-8")):
        return FENCED
    return UNFENCED if found == entry.sha256_before else UNKNOWN


def _unknown_file(install: Install, entry: Entry) -> Reason:
    file = install.root / entry.file
    found = f"sha256 {sha256(file)[:16]}" if file.is_file() else "no file"
    return Reason(
        f"{DIST} {install.version}: {found} at {entry.file}",
        f"sha256 {entry.sha256_before[:16]} or {entry.sha256_after[:16]}",
        f"pip install --no-deps --force-reinstall {DIST}=={install.version}",
    )


def reasons(install: Install | None, entries: Iterable[Entry]) -> list[Reason]:
    """Why the installed headers must not compile sm120 kernels as they are."""
    if install is None:
        return [Reason(f"no {DIST}", f"{DIST} installed", "install the pinned host")]
    try:
        entry = entry_for(install, entries)
    except Refused as error:
        return error.reasons
    found = state(install, entry)
    if found == FENCED:
        return []
    if found == UNKNOWN:
        return [_unknown_file(install, entry)]
    return [
        Reason(
            f"{DIST} {install.version} without the fence of its sm120 bf16 kernel",
            "the fence, as in 0.2.3 and later",
            f"scripts/apply_patches, or pip install --no-deps {DIST}==0.2.3.post2",
        )
    ]


def apply_diff(text: str, diff: str) -> str:
    """`text` after a unified diff of one file; context must match to the byte.

    Raises ValueError where it does not, or if the diff has no hunk.
    """
    lines, result, at = text.splitlines(keepends=True), [], 0
    hunks = 0
    for line in diff.splitlines(keepends=True):
        header = _HUNK.match(line)
        if header:
            hunks += 1
            start = int(header.group(1)) - (0 if header.group(2) == "0" else 1)
            result += lines[at:start]
            at = start
        elif hunks == 0:
            continue
        elif line.startswith("+"):
            result.append(line[1:])
        elif line.startswith((" ", "-")):
            if at >= len(lines) or lines[at] != line[1:]:
                got = lines[at] if at < len(lines) else "the end"
                raise ValueError(
                    f"found {got!r} in line {at + 1}, expected {line[1:]!r}; "
                    "fix: reinstall the distribution that the diff was made for"
                )
            result += lines[at : at + 1] if line.startswith(" ") else []
            at += 1
    if hunks == 0:
        raise ValueError("found no hunk, expected a unified diff; fix: reinstall")
    return "".join(result + lines[at:])


def digest(entry: Entry, folder: Path = PATCHES) -> str:
    """Name of a patch set: version, resulting bytes and diff, 16 hex digits."""
    parts = [entry.dist, entry.version, entry.file, entry.sha256_after]
    if entry.diff is not None:
        parts.append((folder / entry.diff).read_text(encoding="utf-8"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def default_target() -> Path:
    """Where private trees and kernel caches live if nobody says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang_exact" / "deep_gemm"


def _patched(source: Path, entry: Entry, folder: Path) -> bytes:
    """The file's bytes after the diff. Raises ValueError unless they are as listed."""
    diff = (folder / str(entry.diff)).read_text(encoding="utf-8")
    result = apply_diff(source.read_text(encoding="utf-8"), diff).encode()
    found = hashlib.sha256(result).hexdigest()
    if found != entry.sha256_after or not has_fence(result.decode()):
        raise ValueError(
            f"found sha256 {found} after {entry.diff}, expected {entry.sha256_after}; "
            "fix: reinstall sglang_exact"
        )
    return result


def _copy_headers(install: Install, entry: Entry, folder: Path, root: Path) -> None:
    """Make `root`/include, complete or not at all."""
    partial = root.with_name(f"{root.name}.partial.{os.getpid()}")
    try:
        include = install.root / "deep_gemm" / "include"
        shutil.copytree(include, partial / "include")
        file = partial / Path(entry.file).relative_to("deep_gemm")
        data = _patched(install.root / entry.file, entry, folder)
        file.unlink()
        file.write_bytes(data)
        partial.rename(root)
    except OSError:
        # Another process may have made the same tree meanwhile; prepare() looks.
        if not root.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def prepare(
    install: Install, entries: Iterable[Entry], target: Path, folder: Path = PATCHES
) -> Tree:
    """Headers that are safe on sm120: the wheel's own, or a private patched copy.

    Never writes into the wheel. Idempotent. Raises Refused if the installed version,
    its file, or an existing copy is not what the manifest says.
    """
    entry = entry_for(install, entries)
    name = digest(entry, folder)
    cache = target / name / "jit"
    found = state(install, entry)
    if found == UNKNOWN:
        raise Refused([_unknown_file(install, entry)])
    if found == FENCED:
        return Tree(install.root / "deep_gemm", name, False, cache)
    root = target / name / "headers"
    root.parent.mkdir(parents=True, exist_ok=True)
    if not root.is_dir():
        _copy_headers(install, entry, folder, root)
    file = root / Path(entry.file).relative_to("deep_gemm")
    if not file.is_file() or sha256(file) != entry.sha256_after:
        raise Refused(
            [
                Reason(
                    f"another file at {file}",
                    f"sha256 {entry.sha256_after[:16]}",
                    f"remove {root} and run scripts/apply_patches again",
                )
            ]
        )
    return Tree(root, name, True, cache)


def patch_in_place(
    install: Install, entries: Iterable[Entry], folder: Path = PATCHES
) -> bool:
    """Patch the installed file itself; True if it was changed, False if it was fenced.

    Only on a user's explicit wish. Raises Refused for an unknown version or file.
    """
    entry = entry_for(install, entries)
    found = state(install, entry)
    if found == UNKNOWN:
        raise Refused([_unknown_file(install, entry)])
    if found == FENCED:
        return False
    file = install.root / entry.file
    data = _patched(file, entry, folder)
    partial = file.with_name(f"{file.name}.partial.{os.getpid()}")
    partial.write_bytes(data)
    partial.chmod(file.stat().st_mode)
    # Replaces the name, so a hard link into an installer's cache is left alone.
    partial.replace(file)
    return True


def environment(tree: Tree) -> dict[str, str]:
    """Variables that keep these kernels in a cache of their own; set before import."""
    return {CACHE_VARIABLE: str(tree.jit_cache)}


def activate(tree: Tree) -> None:
    """Make DeepGEMM compile from `tree` in this process, before its first kernel.

    DeepGEMM takes its include folder from the library root given to `_C.init`, which
    its own import calls with the package folder. The compiler is set up at the first
    kernel, so a second call before that replaces the root. `compiled_reasons` checks
    the effect.
    """
    if not tree.private:
        return
    import deep_gemm
    from deep_gemm.cuda_helpers import find_cuda_home

    deep_gemm._C.init(str(tree.root), find_cuda_home())


def compiled_reasons(tree: Tree) -> list[Reason]:
    """Kernels in the tree's cache that were compiled from other headers.

    DeepGEMM writes the include folders of each kernel beside it (meta.json).
    """
    wanted = str(tree.root / "include")
    wrong = []
    for meta in sorted(tree.jit_cache.glob("cache/*/meta.json")):
        config = json.loads(meta.read_text(encoding="utf-8")).get("config", {})
        if wanted not in config.get("include_dirs", []):
            wrong.append(meta.parent.name)
    if not wrong:
        return []
    return [
        Reason(
            f"{len(wrong)} kernels compiled from other headers, first {wrong[0]}",
            f"headers in {wanted}",
            f"remove {tree.jit_cache}; if it comes back, install {DIST}==0.2.3.post2",
        )
    ]
