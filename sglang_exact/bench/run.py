# SPDX-License-Identifier: Apache-2.0
"""The record of one measurement, as JSON that is whole at every moment."""

from __future__ import annotations

import datetime
import os
import tempfile
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson

from sglang_exact.bench import provenance

SCHEMA = "sglang-exact-bench/1"


class RunError(ValueError):
    """A record cannot be read; the text says what was found and what to do."""


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass(slots=True)
class BenchRun:
    """What was measured, how, and with what result.

    Attributes:
        verb: command of `sglang-exact bench` that made it.
        label: name of the configuration, free text.
        notes: what a reader has to know, such as "random weights".
        created: when the run began, ISO 8601.
        complete: False until everything that was asked for is measured.
        command: command line as a list of words, without secrets.
        settings: what decides whether two runs may be compared.
        provenance: servers, client, GPU, seeds; see `provenance`.
        rows: the measurements; their keys depend on the verb.
        exactness: totals over the rows, see `exactness.Tally.to_json`.
    """

    verb: str
    label: str = ""
    notes: list[str] = field(default_factory=list)
    created: str = field(default_factory=now)
    complete: bool = False
    command: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    exactness: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The record with its schema, ready to be written."""
        return {"schema": SCHEMA, **asdict(self)}


def save(run: BenchRun, path: Path) -> None:
    """Write the record; a reader sees the old file or the new one, never a part.

    Raises OSError.
    """
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    write_atomic(path, orjson.dumps(run.to_json(), option=options))


def write_atomic(path: Path, raw: bytes) -> None:
    """Replace `path` by `raw` in one step. Raises OSError."""
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


def load(path: Path) -> BenchRun:
    """Read a record.

    Raises RunError for a file that is not one, with everything that is wrong with it.
    """
    try:
        raw = orjson.loads(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise RunError(
            f"{path}: found no JSON ({error}); expected a file that "
            "`sglang-exact bench` wrote"
        ) from error
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        found = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
        raise RunError(
            f"{path}: found schema {found!r}; expected {SCHEMA!r}; fix: name a file "
            "that this release of `sglang-exact bench` wrote"
        )
    del raw["schema"]
    return _checked(raw, path)


_TYPES: dict[str, type] = {
    "verb": str,
    "label": str,
    "notes": list,
    "created": str,
    "complete": bool,
    "command": list,
    "settings": dict,
    "provenance": dict,
    "rows": list,
    "exactness": dict,
}


def _checked(raw: dict[str, Any], path: Path) -> BenchRun:
    names = {f.name for f in fields(BenchRun)}
    problems = [f"unknown field {name!r}" for name in sorted(set(raw) - names)]
    problems += [f"no field {name!r}" for name in sorted(names - set(raw))]
    problems += [
        f"{name} is a {type(raw[name]).__name__}, expected a {kind.__name__}"
        for name, kind in _TYPES.items()
        if name in raw and not isinstance(raw[name], kind)
    ]
    rows = raw.get("rows")
    if isinstance(rows, list) and not all(isinstance(row, dict) for row in rows):
        problems.append("rows holds something that is not an object")
    if problems:
        raise RunError(f"{path}: {'; '.join(problems)}")
    return BenchRun(**raw)


def resume(kept: BenchRun, fresh: BenchRun, path: Path) -> BenchRun:
    """The record `kept`, to be gone on with as `fresh` says; rows stay.

    Raises RunError if the two do not measure the same thing, on the same machine, or
    if a server of one name is not what it was.
    """
    apart = [k for k, v in fresh.settings.items() if kept.settings.get(k) != v]
    if kept.verb != fresh.verb or apart:
        raise RunError(
            f"--resume: found in {path} a record of {kept.verb} with other "
            f"{', '.join(apart) or 'rows'}; expected one of {fresh.verb} with the same "
            "settings; fix: name another --output-file"
        )
    check_same_place(kept, fresh.provenance, path)
    servers = fresh.provenance.get("servers", [])
    names = {server["name"] for server in servers}
    earlier = kept.provenance.get("servers", [])
    fresh.provenance["servers"] = [
        *(server for server in earlier if server["name"] not in names),
        *servers,
    ]
    if not fresh.provenance.get("gpu"):
        fresh.provenance["gpu"] = kept.provenance.get("gpu", [])
    later = "resumed: not all servers were measured in one go, clocks may have moved"
    fresh.notes = list(dict.fromkeys([*kept.notes, *fresh.notes, later]))
    fresh.rows, fresh.exactness = list(kept.rows), dict(kept.exactness)
    fresh.created, fresh.label = kept.created, fresh.label or kept.label
    return fresh


def check_same_place(kept: BenchRun, now: dict[str, Any], path: Path) -> None:
    """Raise RunError if rows of provenance `now` cannot stand beside those of `kept`.

    Ratios between two machines, or a column of two set-ups, would be the result.
    """
    problems = []
    other = provenance.moved(kept.provenance, now)
    if other:
        problems.append(f"another machine ({other})")
    known = {s.get("name"): s for s in kept.provenance.get("servers", [])}
    measured = {row.get("server") for row in kept.rows}
    for server in now.get("servers", []):
        name = server["name"]
        if name in known and name in measured:
            lines = provenance.apart(known[name], server)
            problems += [f"another server {name} ({'; '.join(lines)})"] if lines else []
    if problems:
        raise RunError(
            f"--resume: found in {path} rows of {'; '.join(problems)}; expected the "
            "same machine and one set-up under one name; fix: give the server another "
            "name, or name another --output-file"
        )


class Recorder:
    """A record and the file it is kept in; every change is saved at once."""

    def __init__(self, run: BenchRun, path: Path):
        self.run, self.path = run, path
        save(run, path)

    def save(self) -> None:
        """Write the record as it is now."""
        save(self.run, self.path)

    def add(self, row: dict[str, Any]) -> None:
        """Append one row of measurements."""
        self.run.rows.append(row)
        save(self.run, self.path)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.run.notes:
            self.run.notes.append(text)
            save(self.run, self.path)

    def finish(self, exactness: dict[str, Any] | None = None) -> None:
        """Everything that was asked for is measured."""
        if exactness is not None:
            self.run.exactness = exactness
        self.run.complete = True
        save(self.run, self.path)
