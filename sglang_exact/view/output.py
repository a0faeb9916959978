# SPDX-License-Identifier: Apache-2.0
"""Files that a command writes: whole or not at all, never over what was measured."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

# How a bench record, a verifier's record, a run log and kept answers begin.
_MEASURED = (
    b'"schema": "sglang-exact-bench/',
    b'{"kind":"header"',
    b"created,configuration,draft_length",
    b'{"dataset":',
    b'{"server":',
)
_HEAD = 256


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def stamped(kind: str, suffix: str) -> Path:
    """The name of a record that was given none: it carries the time, so that no record
    is lost."""
    stamp = now().replace("-", "").replace(":", "").partition("+")[0]
    # Two runs may start in the same second.
    return Path(f"sglang-exact-{kind}-{stamp}Z-{os.getpid()}{suffix}")


def whole_lines(path: Path) -> bytes:
    """The lines of a file without one that an interruption cut off."""
    raw = path.read_bytes()
    return raw[: raw.rfind(b"\n") + 1]


def drop_cut_line(path: Path) -> None:
    """Take a line that an interruption cut off from the end of a file."""
    os.truncate(path, len(whole_lines(path)))


def append(path: Path, raw: bytes) -> None:
    """Add to a file; it is on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


class WouldBeLost(ValueError):
    """Writing a file would cost measurements; the text says which and what to do."""


def json_bytes(value: Any) -> bytes:
    """Indented JSON with a final newline."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(value, option=options)


def write_atomic(path: Path, raw: bytes) -> None:
    """Replace `path` by `raw` in one step. Raises OSError.

    A pipe or a device is written to: replaced, it would be one no more.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(raw)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
        # mkstemp makes files that only their owner may read.
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def holds_measurements(path: Path) -> bool:
    """Whether a file begins as one that a command measured into."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return False
    return any(mark in head for mark in _MEASURED)


def check_pages(
    pages: Mapping[str, Path | None], measured: Mapping[str, Path | None]
) -> None:
    """Raise WouldBeLost if a page would replace a record, or another page.

    `pages` and `measured` are files by the name of their option: what is made of
    records and may be replaced, and what the command measures into or reads.
    """
    problems = []
    taken = {p.resolve(): name for name, p in measured.items() if p is not None}
    for name, path in pages.items():
        if path is None:
            continue
        other = taken.setdefault(path.resolve(), name)
        if other != name:
            problems.append(f"found {name} and {other} both {path}")
        elif holds_measurements(path):
            problems.append(f"found {name} {path}, which holds measurements")
    if problems:
        raise WouldBeLost(
            f"{'; '.join(problems)}; expected a file of its own; fix: name another"
        )
