# SPDX-License-Identifier: Apache-2.0
"""The JSONL record: everything that was asked and answered, one line per event.

Logprobs are written as JSON numbers that read back to the same float32 bits. Every
line is flushed, so a record that ends early is still a record; a last line cut off by
a crash is dropped when it is read.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import orjson

from sglang_exact.client.answer import Sample, ServerInfo
from sglang_exact.client.bits import bits_to_float, float32_bits
from sglang_exact.client.typed import typed
from sglang_exact.verify.model import NOT_REACHED, CheckResult, Outcome, Reference
from sglang_exact.view.output import drop_cut_line

FORMAT = 1


class RecordError(ValueError):
    """A record file cannot be used; the text says why and what to do."""


class RecordLost(RuntimeError):
    """The record cannot be written any further: disk full, folder gone."""


class Contents(NamedTuple):
    """A record as read back."""

    header: dict[str, Any]
    servers: list[ServerInfo]
    references: dict[str, Reference]
    results: list[CheckResult]
    probes: list[Outcome]
    end: dict[str, Any] | None
    refusals: dict[str, str]


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """A Sample with its logprobs as numbers instead of bit patterns."""
    row = asdict(sample)
    row["logprobs"] = [_number(bits) for bits in sample.logprobs]
    row["top"] = [
        [[_number(bits), token] for bits, token in entry] for entry in sample.top
    ]
    return row


def sample_from_json(row: dict[str, Any]) -> Sample:
    """The reverse of sample_to_json. Raises ValueError."""
    return typed(_with_bits(row), Sample, ValueError)


def _with_bits(row: dict[str, Any]) -> dict[str, Any]:
    """An answer's JSON with bit patterns in the place of its logprobs."""
    return {
        **row,
        "logprobs": [float32_bits(value) for value in row["logprobs"]],
        "top": [[(float32_bits(v), token) for v, token in top] for top in row["top"]],
    }


def _number(bits: int | None) -> float | None:
    return None if bits is None else bits_to_float(bits)


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """An Outcome as plain JSON values."""
    row = asdict(outcome)
    row["answer"] = None if outcome.answer is None else sample_to_json(outcome.answer)
    return row


def outcome_from_json(row: dict[str, Any]) -> Outcome:
    """The reverse of outcome_to_json. Raises ValueError."""
    answer = None if row["answer"] is None else _with_bits(row["answer"])
    # Records of before call it company.
    beside = row.get("beside", row.get("company", 0))
    return typed({**row, "answer": answer, "beside": beside}, Outcome, ValueError)


class Writer:
    """Appends lines to a record file. Use as a context manager."""

    def __init__(self, path: Path, *, append: bool = False):
        self.path = path
        self._append = append
        self._file: BinaryIO | None = None

    def __enter__(self) -> Writer:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Opened for appending in any case: emptied only once nobody else writes it.
        self._file = self.path.open("ab")
        try:
            _lock(self._file, self.path)
            if self._append:
                drop_cut_line(self.path)
            else:
                self._file.truncate(0)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            # What could not be written has been reported by write().
            with contextlib.suppress(OSError):
                self._file.close()

    def write(self, kind: str, row: dict[str, Any]) -> None:
        """Append one line and flush it. Raises RecordLost if that is not possible."""
        if self._file is None:
            raise RuntimeError("Writer is used outside its `with` block")
        try:
            self._file.write(orjson.dumps({"kind": kind, **row}) + b"\n")
            self._file.flush()
        except OSError as error:
            raise RecordLost(
                f"{self.path}: cannot be written: {error.strerror}; make room, then go "
                "on with --resume"
            ) from error

    def header(self, row: dict[str, Any]) -> None:
        self.write("header", row)

    def server(self, info: ServerInfo) -> None:
        self.write("server", info._asdict())

    def reference(self, reference: Reference) -> None:
        row = asdict(reference)
        row["answer"] = sample_to_json(reference.answer)
        self.write("reference", row)

    def outcome(self, outcome: Outcome) -> None:
        self.write("outcome", outcome_to_json(outcome))

    def refusal(self, case: str, message: str) -> None:
        """The reference refused this case with a 4xx."""
        self.write("refusal", {"case": case, "message": message})

    def arm(self, result: CheckResult) -> None:
        row = asdict(result)
        del row["outcomes"]
        self.write("arm", row)

    def arm_restart(self, name: str) -> None:
        """What was recorded of this arm so far does not count."""
        self.write("arm-restart", {"name": name})

    def end(self, row: dict[str, Any]) -> None:
        self.write("end", row)


def _lock(file: BinaryIO, path: Path) -> None:
    """One writer at a time; where the system has no such locks, nothing."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RecordError(
            f"{path}: another run is writing it; wait for it or pass another "
            "--output-file"
        ) from error
    except OSError:
        # A file system without locks.
        return


def is_begun(path: Path) -> bool:
    """Does a record hold at least one whole line?"""
    try:
        with path.open("rb") as file:
            return file.readline().endswith(b"\n")
    except FileNotFoundError:
        return False


def read(path: Path) -> Contents:
    """Read a record. Raises RecordError for a file that is none."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error
    # A line without its end was cut off, whatever is left of it: Writer drops it too.
    whole, _, cut = raw.rpartition(b"\n")
    lines = whole.split(b"\n") if whole else [cut]
    reader = _Reader()
    for number, line in enumerate(lines, 1):
        try:
            reader.take(orjson.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines) and number > 1:
                break
            raise RecordError(
                f"{path}: line {number} is not a line of a verification record; "
                "expected a file written by sglang-exact verify or record"
            ) from error
    if reader.header.get("format") != FORMAT:
        raise RecordError(
            f"{path}: found format {reader.header.get('format')!r}, expected {FORMAT}; "
            "record again with this version"
        )
    return reader.contents()


class _Reader:
    def __init__(self) -> None:
        self.header: dict[str, Any] = {}
        self.servers: dict[tuple[str, str], ServerInfo] = {}
        self.references: dict[str, Reference] = {}
        self.results: dict[str, CheckResult] = {}
        self.probes: list[Outcome] = []
        self.end: dict[str, Any] | None = None
        self.changed: list[str] = []
        self.refusals: dict[str, str] = {}

    def take(self, row: dict[str, Any]) -> None:
        kind = row.pop("kind")
        if kind == "header":
            # A resumed run writes its header again: the first one stays, and the run
            # has not ended yet.
            self.header = self.header or row
            self.end = {"changed": self.changed} if self.changed else None
        elif kind == "server":
            info = ServerInfo(**{**row, "notes": tuple(row["notes"])})
            self.servers[info.label, info.url] = info
        elif kind == "reference":
            row["answer"] = _with_bits(row["answer"])
            found = typed(row, Reference, ValueError)
            self.references[found.case] = found
        elif kind == "outcome":
            outcome = outcome_from_json(row)
            if outcome.probe:
                self.probes.append(outcome)
            else:
                # A resumed run asks again what had failed: the last answer counts.
                kept = self._result(outcome.arm).outcomes
                again = [(o.server, o.index) for o in kept]
                place = (outcome.server, outcome.index)
                if place in again:
                    kept[again.index(place)] = outcome
                else:
                    kept.append(outcome)
        elif kind == "arm":
            result = typed(row, CheckResult, ValueError)
            result.outcomes = self._result(result.name).outcomes
            self.results[result.name] = result
        elif kind == "arm-restart":
            self.results.pop(row["name"], None)
        elif kind == "refusal":
            self.refusals[row["case"]] = str(row["message"])
        elif kind == "end":
            # That the server changed stays true of the answers before.
            self.changed += row.get("changed") or []
            self.end = row | ({"changed": self.changed} if self.changed else {})
        else:
            raise ValueError(kind)

    def _result(self, name: str) -> CheckResult:
        return self.results.setdefault(name, CheckResult(name, name, NOT_REACHED))

    def contents(self) -> Contents:
        return Contents(
            self.header,
            list(self.servers.values()),
            self.references,
            list(self.results.values()),
            self.probes,
            self.end,
            self.refusals,
        )
