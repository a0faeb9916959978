# SPDX-License-Identifier: Apache-2.0
"""The record of one measurement, as JSON that is whole at every moment."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson

from sglang_exact.bench import provenance
from sglang_exact.client.typed import typed
from sglang_exact.view.output import WouldBeLost, json_bytes, now, write_atomic

SCHEMA = "sglang-exact-bench/1"


class RunError(ValueError):
    """A record cannot be read; the text says what was found and what to do."""


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
    write_atomic(path, json_bytes(run.to_json()))


def load(path: Path) -> BenchRun:
    """Read a record.

    Raises RunError for a file that is not one.
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


def _checked(raw: dict[str, Any], path: Path) -> BenchRun:
    names = {f.name for f in fields(BenchRun)}
    problems = [f"unknown field {name!r}" for name in sorted(set(raw) - names)]
    problems += [f"no field {name!r}" for name in sorted(names - set(raw))]
    fix = "fix: name a file that this release of `sglang-exact bench` wrote"
    if problems:
        raise RunError(f"{path}: {'; '.join(problems)}; {fix}")
    return typed(raw, BenchRun, lambda text: RunError(f"{path}: {text}; {fix}"))


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


def check_same_place(
    kept: BenchRun, now: dict[str, Any], path: Path, again: Collection[str] = ()
) -> None:
    """Raise RunError if rows of provenance `now` cannot stand beside those of `kept`.

    `again` names servers whose rows are measured anew: those may be another set-up.
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
        if name in known and name in measured and name not in again:
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

    def add(self, row: dict[str, Any], *known_by: str) -> None:
        """Append one row of measurements.

        It takes the place of an earlier one that is equal in all keys of `known_by`.
        """
        rows = self.run.rows
        if known_by:
            rows = [r for r in rows if any(r.get(k) != row[k] for k in known_by)]
        self.run.rows = [*rows, row]
        save(self.run, self.path)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.run.notes:
            self.run.notes.append(text)
            save(self.run, self.path)

    def finish(self, complete: bool = True) -> None:
        """The last word: whether everything that was asked for is measured."""
        self.run.complete = complete
        save(self.run, self.path)


class Output:
    """The file of a record, and what must not be lost where it is to lie.

    `beside` are the files that a verb keeps next to it; `resume` says whether to go on
    with what is there, None for a verb that cannot.
    """

    def __init__(
        self, path: Path, beside: Sequence[Path] = (), resume: bool | None = None
    ):
        self.path, self.beside, self.resume = path, tuple(beside), resume
        self._recorder: Recorder | None = None

    def earlier(self) -> BenchRun | None:
        """The record to go on with, None where a new one begins.

        A record without a row is no loss. Raises RunError for a file that is not a
        record, WouldBeLost where a new record would cost measurements.
        """
        there = [p for p in (self.path, *self.beside) if _holds_something(p)]
        if self.path in there and self.resume:
            return load(self.path)
        if there and not (there == [self.path] and _is_empty_record(self.path)):
            go_on = "" if self.resume is None else ", or go on with it by --resume"
            raise WouldBeLost(
                f"--output-file {self.path}: found {', '.join(map(str, there))}, "
                "expected no measurements there; fix: name another --output-file"
                f"{go_on if self.path in there else ''}"
            )
        return None

    def record(self, run: BenchRun) -> Recorder:
        """Begin to write `run`."""
        self._recorder = Recorder(run, self.path)
        return self._recorder

    def finish(self, complete: bool) -> None:
        """The last word on the record, if one was begun."""
        if self._recorder is not None:
            self._recorder.finish(complete)

    def held(self) -> Path | None:
        """The record, once this run writes it and there is a row in it."""
        return self.path if self._recorder and self._recorder.run.rows else None


def _holds_something(path: Path) -> bool:
    if path.is_dir():
        return any(path.iterdir())
    return path.exists() and path.stat().st_size > 0


def _is_empty_record(path: Path) -> bool:
    try:
        return not load(path).rows
    except RunError:
        return False
