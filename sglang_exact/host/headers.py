# SPDX-License-Identifier: Apache-2.0
"""Edits to headers of other distributions: which, are they there, and making them.

DeepGEMM compiles its kernels at run time from headers in its wheel. A version whose
sm120 kernel lacks a fence is refused on such a GPU; its header is edited in place when
a user asks: `python -m sglang_exact.host.headers --in-place`. Whatever the manifest
does not know, by version or by content, is refused.

As a program: status 0 fenced, 1 not fenced, 2 refused (unknown version or content, or
a file that cannot be written).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from sglang_exact.reasons import Reason, Refused, message

__all__ = [
    "FENCED",
    "UNFENCED",
    "UNKNOWN",
    "Entry",
    "Install",
    "apply_diff",
    "entry_for",
    "find_install",
    "has_fence",
    "load_manifest",
    "main",
    "patch_in_place",
    "reasons",
    "state",
]

DIST = "sgl-deep-gemm"
_SHIPPED = Path(__file__).parents[1] / "_patches"
PATCHES = _SHIPPED if _SHIPPED.is_dir() else Path(__file__).parents[2] / "patches"

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
            f"pip install --no-deps {DIST}==0.2.3.post2, or add it to the installed "
            "header: python -m sglang_exact.host.headers --in-place (in a checkout: "
            "scripts/apply_patches --in-place)",
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


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_exact.host.headers",
        description="Are DeepGEMM's sm120 headers safe? Add the fence where asked.",
        allow_abbrev=False,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="change nothing (default)")
    what.add_argument(
        "--in-place", action="store_true", help="edit the installed header"
    )
    parser.add_argument("--wheel-root", type=Path, help="folder of an unpacked wheel")
    parser.add_argument("--wheel-version", help="its version")
    args = parser.parse_args(argv)
    if (args.wheel_root is None) != (args.wheel_version is None):
        parser.error("--wheel-root needs --wheel-version, and the other way round")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Check the headers or add the fence; the status is in the module's text."""
    args = _arguments(argv)
    entries = load_manifest()
    install = find_install()
    if args.wheel_root is not None:
        install = Install(args.wheel_version, args.wheel_root.resolve())
    if args.in_place and install is not None:
        try:
            if patch_in_place(install, entries):
                sys.stdout.write(f"{install.version}: patched in place\n")
        except (Refused, ValueError, OSError) as error:
            sys.stderr.write(f"{error}\n")
            return 2
    found = reasons(install, entries)
    if found or install is None:
        sys.stderr.write(f"{message(found)}\n")
        return 1
    sys.stdout.write(f"{install.version}: fenced\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
