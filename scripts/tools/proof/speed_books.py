# SPDX-License-Identifier: Apache-2.0
"""What `scripts/gpu_bench` keeps between calls: its summary and the plain answers.

Servers come one after the other, so the answers that exactness and the oracle need have
to outlive the server that gave them, and the call.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_exact.bench.accept import measure as accept
from sglang_exact.client.answer import Sample
from sglang_exact.verify.record import sample_from_json, sample_to_json
from sglang_exact.view.output import write_atomic

SUMMARY = "gpu-bench.json"


def earlier(folder: Path, here: dict[str, Any]) -> dict[str, Any]:
    """The summary of an earlier call, {} where there was none.

    `here` is what all rows in `folder` have to share. Raises ValueError where those of
    the earlier call are of another setting or machine; what it does not name, none of
    its rows depends on.
    """
    path = folder / SUMMARY
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    before = found.get("setting", {})
    apart = [
        f"{key}: {before.get(key)} before, {value} now"
        for key, value in here.items()
        if before.get(key, value) != value
    ]
    if apart:
        raise ValueError(
            f"found in {folder} rows of another setting ({'; '.join(apart)}); "
            "expected the same; fix: name another --out"
        )
    return found


class Books:
    """The plain answers, kept in a file so that a later call can go on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.accept: dict[str, accept.Book] = {}
        self.decode: dict[str, dict[int, Sample]] = {}
        if path.exists():
            self._read(json.loads(path.read_text()))

    def _read(self, raw: dict[str, Any]) -> None:
        for name, book in raw["accept"].items():
            answers = {k: sample_from_json(v) for k, v in book["answers"].items()}
            speeds = {int(c): v for c, v in book["tok_s"].items()}
            self.accept[name] = accept.Book(answers, speeds)
        for name, found in raw["decode"].items():
            self.decode[name] = {int(n): sample_from_json(s) for n, s in found.items()}

    def save(self) -> None:
        """Write everything."""
        raw = {
            "accept": {
                name: {
                    "answers": {k: sample_to_json(v) for k, v in b.answers.items()},
                    "tok_s": b.tok_s,
                }
                for name, b in self.accept.items()
            },
            "decode": {
                name: {n: sample_to_json(s) for n, s in found.items()}
                for name, found in self.decode.items()
            },
        }
        write_atomic(self.path, json.dumps(raw).encode())
