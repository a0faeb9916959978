# SPDX-License-Identifier: Apache-2.0
"""Imported by Python itself at start: mends the host in rehearsal processes.

The host loads plugins too late for what must happen before its modules are imported
(stand-ins, Triton's interpreter), and it spawns processes of its own. Python imports
`sitecustomize` first in each of them.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys


def _run_next_sitecustomize() -> None:
    """Run the `sitecustomize` this file hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [p for p in sys.path if os.path.abspath(p or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None or spec.origin == __file__:
        return
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


_run_next_sitecustomize()
if os.environ.get("SGLANG_EXACT_TEST_REHEARSAL") == "1":
    from sglang_exact.rehearsal import bootstrap

    bootstrap.install()
