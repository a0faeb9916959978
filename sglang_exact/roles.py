# SPDX-License-Identifier: Apache-2.0
"""Which of the host's processes this is.

The host spawns its ranks, and every process loads the plugins; scheduler hooks in
the detokenizer would import kernels (and touch CUDA) for nothing. The loader is
called from a named function in each process, so the call stack tells.
"""

from __future__ import annotations

import multiprocessing
import sys

from sglang_exact.hooks.base import MAIN, SCHEDULER

OTHER = "other"
_ENTRY_FUNCTIONS = {
    "run_scheduler_process": SCHEDULER,
    "run_detokenizer_process": OTHER,
    "run_data_parallel_controller_process": OTHER,
}


def current() -> str:
    """`main`, `scheduler` or `other`, from the stack of the plugin loader.

    An unknown child process counts as a scheduler: hooks too many cost time, hooks
    too few cost exactness.
    """
    frame = sys._getframe()
    while frame is not None:
        role = _ENTRY_FUNCTIONS.get(frame.f_code.co_name)
        if role is not None:
            return role
        frame = frame.f_back  # type: ignore[assignment]
    return MAIN if multiprocessing.parent_process() is None else SCHEDULER
