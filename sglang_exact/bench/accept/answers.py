# SPDX-License-Identifier: Apache-2.0
"""Plain answers in a file beside a record.

With one GPU the servers of a run take turns: the answers of the plain one have to
outlive it, so that those of the next can be compared with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import orjson

from sglang_exact.bench.run import RunError
from sglang_exact.client.answer import Sample
from sglang_exact.verify.record import sample_from_json, sample_to_json
from sglang_exact.view.output import append, drop_cut_line, whole_lines


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
        for number, line in enumerate(whole_lines(self.path).splitlines(), 1):
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
        drop_cut_line(self.path)

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
        append(self.path, b"".join(lines))
