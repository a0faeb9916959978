# SPDX-License-Identifier: Apache-2.0
"""The workshop: what proves, measures, documents and packs. Not part of the wheel.

    proof       servers on a GPU held against plain decoding, the verifier, speed
    kernels     times of the kernels alone
    evidence    README's table, docs/evidence.md, the pictures
    docs        tables of docs/ that follow from the source
    offline     bundles for hosts without a network
    pins        what another host changed, and new pins
    release     is this checkout a release?

Each command of scripts/ is a launcher of one of these modules. Every command line is
read with nothing but Python itself: `--help` answers on any machine.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
# The checkout before whatever is installed.
sys.path[:0] = [p for p in (str(ROOT), str(ROOT / "kernels")) if p not in sys.path]


def run(module: str, *options: Any) -> NoReturn:
    """Leave with the status of a program of this package.

    Args:
        module: its name below `tools`; imported only now.
        options: its command line, where that was read before the import.
    """
    sys.exit(importlib.import_module(f"{__name__}.{module}").main(*options))
