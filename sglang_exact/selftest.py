# SPDX-License-Identifier: Apache-2.0
"""Start-up self-test on the device: our kernels against the kernels they must equal.

Runs in every rank after the target model is loaded and before KV pools and graph
capture. On the CPU (rehearsal) it does not run: the interpreter proves no bits.
"""

from __future__ import annotations

import time
from typing import Any

from sglang_exact.reasons import Reason

_report: dict[str, Any] = {"ran": False}


def last_report() -> dict[str, Any]:
    """What the self-test of this process found; `ran` is False without a GPU."""
    return dict(_report)


def run(model_runner: Any) -> list[Reason]:
    """Compare kernels bit for bit on this device; returns reasons on a mismatch."""
    if not str(model_runner.device).startswith("cuda"):
        return []
    from sglang_exact import selftest_gdn

    started = time.monotonic()
    reasons: list[Reason] = selftest_gdn.run(model_runner)
    _report.update(
        ran=True,
        seconds=round(time.monotonic() - started, 2),
        mismatches=len(reasons),
    )
    return reasons
