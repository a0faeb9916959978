# SPDX-License-Identifier: Apache-2.0
"""Programs of scripts/ as modules, and what a build of the release is."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Release(NamedTuple):
    """What was built, and what the check found wrong with it."""

    wheel: Path
    sdist: Path
    reasons: list[str]
