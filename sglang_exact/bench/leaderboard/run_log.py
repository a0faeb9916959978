# SPDX-License-Identifier: Apache-2.0
"""The CSV of the leaderboard: one line per run, on disk before the next run begins."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any, NamedTuple

from sglang_exact.bench.drive import CannotRun
from sglang_exact.client.typed import typed
from sglang_exact.view.output import append, drop_cut_line, whole_lines


class Line(NamedTuple):
    """One run. Times in seconds, speeds in output tokens per second.

    `draft_length` counts the drafts of a verify step, 0 for plain decoding. `tok_s` is
    tokens over the whole request, `decode_tok_s` leaves out the time to the first
    token. `accepted_per_verify` counts accepted drafts, `acceptance_length` all tokens
    over verify steps. `setup_sha256` is equal for runs that may be compared.
    """

    created: str
    configuration: str
    draft_length: int
    run: int
    tokens: int
    wall_s: float
    tok_s: float
    ttft_s: float | None
    decode_tok_s: float | None
    verify: int | None
    acceptance_length: float | None
    accepted_per_verify: float | None
    ids_sha256: str
    setup_sha256: str
    server: str

    @property
    def key(self) -> tuple[str, int, int]:
        """What a run is known by."""
        return self.configuration, self.draft_length, self.run


_OPTIONAL = (
    *("ttft_s", "decode_tok_s", "verify"),
    *("acceptance_length", "accepted_per_verify"),
)


class RunLog:
    """The file and its lines.

    A line that an interruption cut off is dropped when the file is opened. Raises
    CannotRun for a file that is not a run log.
    """

    def __init__(self, path: Path):
        self.path = path
        self.lines: list[Line] = []
        if path.exists() and path.stat().st_size:
            self._read()
        else:
            self._write(Line._fields)

    def _read(self) -> None:
        text = whole_lines(self.path).decode("utf-8", "replace")
        rows = list(csv.reader(io.StringIO(text)))
        if not rows or tuple(rows[0]) != Line._fields:
            raise CannotRun(
                f"{self.path}: found no run log of this release; expected its header; "
                "fix: name another file with --csv"
            )
        for number, row in enumerate(rows[1:], 2):
            try:
                self.lines.append(_line(row))
            except ValueError as error:
                raise CannotRun(
                    f"{self.path}: line {number}: {error}; fix: remove the line, or "
                    "name another file with --csv"
                ) from error
        drop_cut_line(self.path)

    def append(self, line: Line) -> None:
        """Add a run; it is on disk when this returns."""
        self.lines.append(line)
        self._write(tuple("" if value is None else value for value in line))

    def _write(self, cells: tuple[Any, ...]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(cells)
        append(self.path, text.getvalue().encode())

    def done(self, configuration: str, draft_length: int) -> set[int]:
        """Numbers of the runs that are there."""
        return {
            line.run
            for line in self.lines
            if (line.configuration, line.draft_length) == (configuration, draft_length)
        }

    def check(self, setup: str) -> None:
        """Raise CannotRun if the file holds runs that may not be compared."""
        other = sum(line.setup_sha256 != setup for line in self.lines)
        if other:
            raise CannotRun(
                f"{self.path}: found {other} runs of another prompt, another number of "
                "tokens or another GPU; expected runs that may be compared; fix: name "
                "another file with --csv"
            )


def _line(row: list[str]) -> Line:
    if len(row) != len(Line._fields):
        raise ValueError(f"found {len(row)} cells, expected {len(Line._fields)}")
    named = dict(zip(Line._fields, row, strict=True))
    cells = [text or (None if n in _OPTIONAL else "") for n, text in named.items()]
    return typed(cells, Line, ValueError, strict=False)
