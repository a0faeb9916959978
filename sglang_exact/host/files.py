# SPDX-License-Identifier: Apache-2.0
"""Whole files of the host against their pins: on disk, and as this process loaded them.

A pin of a function sees no edited norm, rotary embedding or model. Every source file
that a rank can load is pinned by two hashes: of its bytes, which is quick, and of its
syntax tree, so that comments and docstrings do not count. Sources that are compiled on
the machine (`.cuh` and the like) have the first alone.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib import machinery, resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from sglang_exact.host import source as host

# `sglang/test`, the benchmarks and the image and video models serve no tokens.
TOPS = ("*.py", "srt", "kernels", "lang", "cli")
NATIVE = (".cu", ".cuh", ".h", ".hpp", ".cpp")
WRITTEN_BY_THE_BUILD = ("_version.py",)
LENGTH = 32
"""Hexadecimal digits of a sha256 that a pin keeps: 128 bits."""


class Changes(NamedTuple):
    """Paths below the folder `sglang` that are not as pinned."""

    changed: list[str]
    gone: list[str]
    new: list[str]


@lru_cache(maxsize=4)
def pinned(version: str) -> Mapping[str, str]:
    """Path below the folder `sglang` -> its pin; empty where there are none."""
    file = resources.files("sglang_exact.host.pins") / f"files-{version}.json"
    if not file.is_file():
        return {}
    return MappingProxyType(json.loads(file.read_text(encoding="utf-8")))


def paths(package: Path) -> list[str]:
    """Every file of a host that is to be pinned, relative to its folder, sorted."""
    found = []
    for start in (p for top in TOPS for p in package.glob(top)):
        if start.is_file():
            found.append(start)
        for place, _, names in os.walk(start):
            found += [Path(place, name) for name in names]
    return sorted(
        file.relative_to(package).as_posix()
        for file in found
        if file.suffix in (".py", *NATIVE) and file.name not in WRITTEN_BY_THE_BUILD
    )


def raw_hash(data: bytes) -> str:
    """Hash of a file's bytes."""
    return hashlib.sha256(data).hexdigest()[:LENGTH]


@lru_cache(maxsize=256)
def tree_hash(data: bytes) -> str:
    """Hash of the syntax tree of Python source; of the bytes where it has none."""
    try:
        text = repr(host.canonical(ast.parse(data)))
    except (SyntaxError, ValueError):
        return raw_hash(data)
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def pin(name: str, data: bytes, known: str = "") -> str:
    """The pin of a file; `known` is an earlier one, which saves parsing it again."""
    raw = raw_hash(data)
    if not name.endswith(".py"):
        return raw
    if known.startswith(raw):
        return known
    return f"{raw} {tree_hash(data)}"


def as_found(name: str, data: bytes, known: str) -> str:
    """What counts about a file: the hash of its tree, or of its bytes if native."""
    return pin(name, data, known).rpartition(" ")[2]


def collect(package: Path, known: Mapping[str, str]) -> dict[str, str]:
    """The pins of a host's files."""
    return {
        name: pin(name, (package / name).read_bytes(), known.get(name, ""))
        for name in paths(package)
    }


def _as_it_lies(
    pins: Mapping[str, str], package: Path, names: Iterable[str]
) -> Iterator[tuple[str, str | None]]:
    """Name and what counts about it (None: not there), for each of `names`."""
    for name in names:
        try:
            data = (package / name).read_bytes()
        except OSError:
            yield name, None
        else:
            yield name, as_found(name, data, pins.get(name, ""))


def changes(pins: Mapping[str, str], package: Path) -> Changes:
    """What of a host is not as pinned, new files included."""
    found = dict(_as_it_lies(pins, package, pins))
    return Changes(
        [n for n, x in found.items() if x and x != pins[n].rpartition(" ")[2]],
        [n for n, x in found.items() if x is None],
        [n for n in paths(package) if n not in pins],
    )


def fingerprint(pins: Mapping[str, str], package: Path) -> str:
    """sha256 over the pinned files as they lie there; one that is gone counts."""
    total = hashlib.sha256()
    for name, found in _as_it_lies(pins, package, sorted(pins)):
        total.update(f"{name}\0{found}\0".encode())
    return total.hexdigest()


def loaded_from_elsewhere(
    pins: Mapping[str, str], package: Path, modules: Mapping[str, Any]
) -> dict[str, str]:
    """Host modules that came from no pinned file: name -> where from.

    `modules` is `sys.modules`. A folder without `__init__.py` holds no code. What the
    host has in compiled form alone (its Rust extensions) is not pinned: wheels and
    source builds differ, and none of it computes logits.
    """
    base = os.path.abspath(package)
    found = {}
    for name, module in sorted(modules.items()):
        if name.partition(".")[0] != "sglang":
            continue
        loader = getattr(module, "__loader__", None)
        if isinstance(loader, machinery.NamespaceLoader):
            continue
        stem = name.replace(".", "/").partition("/")[2]
        own = {f"{stem}.py", f"{stem}/__init__.py".removeprefix("/")}
        compiled = isinstance(loader, machinery.ExtensionFileLoader)
        if compiled and not own & pins.keys():
            continue
        file = getattr(module, "__file__", None)
        place = os.path.relpath(os.path.abspath(file), base) if file else ""
        known = place in pins or place in WRITTEN_BY_THE_BUILD
        if place not in own or not known:
            found[name] = str(file or "no file")
    return found


def loaded_here() -> dict[str, str]:
    """`loaded_from_elsewhere` for this process and the installed host."""
    package = host.root()
    if package is None:
        return {}
    pins = pinned(host.version("sglang") or "")
    return loaded_from_elsewhere(pins, package, dict(sys.modules))
