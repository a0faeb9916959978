# SPDX-License-Identifier: Apache-2.0
"""What the tests of the bench commands share: the command, prompts, engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROMPTS = ([5, 6, 7, 8, 9, 10, 11, 12], [100, 90, 80, 70, 60, 50, 40, 30, 20, 10, 400])
"""Token ids of the tiny model's 512."""


@dataclass(frozen=True)
class EnginePair:
    """A plain and a speculative server of the overlay on the same tiny model.

    `models` holds `target` and one folder per draft kind; the drafter is an oracle
    that knows the plain answers to PROMPTS, and reads `oracle` again when it changes.
    """

    plain: str
    spec: str
    models: Path
    oracle: Path

    @property
    def servers(self) -> list[str]:
        """Both as options."""
        return ["--server", f"plain={self.plain}", "--server", f"spec={self.spec}"]


def command(
    *args: str, cwd: Path, timeout: float = 600, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `sglang-exact bench` as a user does."""
    main = "from sglang_exact.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", main, "bench", *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env={**os.environ, **env},
        check=False,
    )


def write_ids(path: Path, prompts: Sequence[Sequence[int]] = PROMPTS) -> Path:
    """The prompts as a local data set of token ids."""
    rows = [{"input_ids": list(ids)} for ids in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
