# SPDX-License-Identifier: Apache-2.0
"""The fake servers of the other tests."""

from __future__ import annotations

import sys
from pathlib import Path

for name in ("verify", "bench"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / name))
