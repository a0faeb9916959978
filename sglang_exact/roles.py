# SPDX-License-Identifier: Apache-2.0
"""Which of the host's processes this is.

The host spawns its ranks, and every process loads the plugins; scheduler hooks in
the detokenizer would import kernels (and touch CUDA) for nothing. The loader is
called from a named function in each process, so the call stack tells.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping

from sglang_exact.hooks.base import MAIN, SCHEDULER
from sglang_exact.reasons import Reason
from sglang_exact.settings import LAUNCHER_VARIABLE

_MANAGERS = "sglang.srt.managers"
_ENTRY_FUNCTIONS = {
    f"{_MANAGERS}.scheduler.run_scheduler_process": (SCHEDULER,),
    f"{_MANAGERS}.detokenizer_manager.run_detokenizer_process": (),
    f"{_MANAGERS}.data_parallel_controller.run_data_parallel_controller_process": (),
}


def current() -> tuple[str, ...]:
    """Roles of this process, from the stack of the plugin loader; () needs no hook.

    An unknown child process may serve HTTP (a router, a framework) or be a rank with
    an entry function of its own, so it takes both: hooks too many cost time, hooks too
    few cost exactness.
    """
    frame = sys._getframe()
    while frame is not None:
        name = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
        if name in _ENTRY_FUNCTIONS:
            return _ENTRY_FUNCTIONS[name]
        frame = frame.f_back  # type: ignore[assignment]
    return (MAIN,) if multiprocessing.parent_process() is None else (MAIN, SCHEDULER)


def sign() -> None:
    """Tell the ranks that this process will start: it carries the hooks of MAIN."""
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())


def launcher_reasons(environ: Mapping[str, str]) -> list[Reason]:
    """Reasons to refuse a rank whose starting process did not sign.

    That process takes the requests and writes the streams; without its hooks they
    would be served as the host does, under an attestation of this rank.
    """
    parent = multiprocessing.parent_process()
    starter = os.getpid() if parent is None else parent.pid
    if environ.get(LAUNCHER_VARIABLE) == str(starter):
        return []
    return [
        Reason(
            f"a rank started by process {starter}, which carries no hooks of the "
            "HTTP server",
            "a rank started by a process that loaded the overlay and checked its "
            "arguments",
            "start with python -m sglang_exact.launch_server, or call "
            "sglang.srt.plugins.load_plugins() in the process that starts the server",
        )
    ]
