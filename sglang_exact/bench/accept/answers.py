# SPDX-License-Identifier: Apache-2.0
"""Plain answers in a file beside a record.

With one GPU the servers of a run take turns: the answers of the plain one have to
outlive it, so that those of the next can be compared with them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import orjson

from sglang_exact.bench.run import RunError
from sglang_exact.client.answer import Sample
from sglang_exact.verify.record import sample_from_json, sample_to_json


class AnswerFile:
    """JSON lines of data set, request and answer.

    A line that an interruption cut off is dropped.
    Raises RunError for a file of another kind.
    """

    def __init__(self, path: Path):
        self.path = path
        self._known: dict[str, dict[str, Sample]] = {}
        if path.exists():
            self._read()

    def _read(self) -> None:
        raw = self.path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = orjson.loads(line)
                self.of(row["dataset"])[row["request"]] = sample_from_json(
                    row["answer"]
                )
            except (ValueError, KeyError, TypeError) as error:
                raise RunError(
                    f"{self.path}: line {number}: found no answer ({error!r}); "
                    "expected the file that an earlier run wrote; fix: name another "
                    "--output-file"
                ) from error
        if len(whole) != len(raw):
            os.truncate(self.path, len(whole))

    def of(self, dataset: str) -> dict[str, Sample]:
        """The answers to one data set, by request."""
        return self._known.setdefault(dataset, {})

    def add(self, dataset: str, answers: Mapping[str, Sample]) -> None:
        """Keep answers; they are on disk when this returns."""
        if not answers:
            return
        self.of(dataset).update(answers)
        lines = [
            orjson.dumps(
                {
                    "dataset": dataset,
                    "request": request,
                    "answer": sample_to_json(sample),
                },
                option=orjson.OPT_APPEND_NEWLINE,
            )
            for request, sample in answers.items()
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())
