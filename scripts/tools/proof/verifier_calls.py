# SPDX-License-Identifier: Apache-2.0
"""Calls of `sglang-exact` as a user makes them, and whether they ended as they should.

For the GPU proof of the verifier; `verify_arms` says what is asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_exact.verify.model import COULD_NOT_RUN, NOT_REACHED
from tools import ROOT
from tools.proof.matrix import INTERRUPTED
from tools.proof.verifier_arms import DIFFERS, NOTED, REFUSED, Ask

FAREWELL = 15.0
"""Seconds that a call which is stopped may take to write down what it has."""


class Caller:
    """Runs the product's command line.

    Args:
        state: folder in which it runs, so that files have short names.
        left: seconds that are left for everything; a call is stopped in time.
    """

    def __init__(self, state: Path, left: Callable[[], float]) -> None:
        self.state, self.left = state, left

    def verify(self, name: str, words: list[str]) -> tuple[int, str, list[str]]:
        """Call the verifier; one that was cut off in an earlier call goes on."""
        output = self.state / f"verify-{name}.jsonl"
        result = self.state / f"verify-{name}.json"
        words += ["--output-file", output.name, "--json", result.name]
        resume = False
        if output.exists() and "planted" not in name:
            before = json.loads(result.read_text()) if result.exists() else {}
            resume = before.get("exit_status", INTERRUPTED) == INTERRUPTED
        for again in (True, False) if resume else (False,):
            result.unlink(missing_ok=True)
            if not again:
                output.unlink(missing_ok=True)
            asked = [*words, *["--resume"] * again]
            status, said = self.call(name, asked)
            # Without a result it refused: another version, or another server.
            if result.exists():
                break
        return status, said, asked

    def call(self, name: str, words: Sequence[str]) -> tuple[int, str]:
        """Exit status of the product's command line, and the end of what it said.

        It runs in --state, so that files have short names, and is stopped when the
        budget ends.
        """
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        log = self.state / f"call-{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "sglang_exact", *words],
                stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                cwd=self.state, env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
            try:
                process.wait(max(self.left() - FAREWELL, 1))
            except subprocess.TimeoutExpired:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(FAREWELL)
            finally:
                process.kill()
                status = process.wait()
        return status, log.read_text(errors="replace")[-1500:]


def figures(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a verification found, arm by arm."""
    rows = []
    for arm in result["arms"]:
        spec = arm["acceptance"] or {}
        micro = spec.get("micro")
        rows.append(
            {
                "arm": arm["arm"],
                "state": arm["state"],
                "compared": arm["compared"],
                "different": arm["different"],
                "tokens": arm["tokens"],
                "acceptance_length": round(micro, 3) if micro else None,
                "failure_bound": arm["failure_bound"],
                "reasons": arm["reasons"],
                "first_divergence": arm["first_divergence"],
            }
        )
    return rows


def as_expected(ask: Ask, status: int, found: list[dict[str, Any]], cut: bool) -> bool:
    """Whether a verification ended as it should.

    Args:
        ask: what was asked.
        status: exit status of the verifier.
        found: of `figures`.
        cut: a rehearsal: answers may be too short to count, and are compared.
    """
    if ask.expect == NOTED:
        return status in (0, 1, 2) and bool(found)
    if ask.expect == DIFFERS:
        return status == 1
    if ask.expect == REFUSED:
        return status in (1, 2) and bool(found)
    if not cut or status != 2:
        return status == 0
    broken = {COULD_NOT_RUN, NOT_REACHED}
    return bool(found) and not any(
        row["different"] or not row["compared"] or row["state"] in broken
        for row in found
    )


def shown(row: dict[str, Any]) -> str:
    """One row in one line."""
    parts = [
        f"{a['arm']} {a['state']} {a['compared'] - a['different']}/{a['compared']}"
        + (f" x{a['acceptance_length']}" if a["acceptance_length"] else "")
        for a in row["arms"]
    ]
    word = "as expected" if row["as_expected"] else "UNEXPECTED"
    text = (
        f"{row['arm']} {row['ask']}: {word}, exit {row['exit_status']} "
        f"(expected: {row['expected']}), {row['seconds']} s: {'; '.join(parts)}"
    )
    if row["as_expected"]:
        return text
    why = [f"    {a['arm']}: {r}" for a in row["arms"] for r in a["reasons"]]
    return "\n".join([text, *why, *([row["said"]] if "said" in row else [])])
