# SPDX-License-Identifier: Apache-2.0
"""Ranks of a rehearsed server are forked from one process that has the libraries.

The host spawns its ranks, and each imports torch and transformers again, which is most
of a start on the CPU. A process with `VARIABLE` in its environment imports them before
everything else and forks spares; what the host spawns becomes one of them while there
are any. Neither the host nor the overlay is imported before the fork, and a spare has
the parent, variables and files of a spawned process.
"""

from __future__ import annotations

import atexit
import fcntl
import importlib
import json
import os
import random
import re
import runpy
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Sequence
from multiprocessing import spawn, util
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

VARIABLE = "REHEARSAL_SPARES"
"""How many spares to fork; taken out of the environment."""

LIBRARIES = (
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "fastapi", "uvicorn"),
    *("transformers.models.auto.modeling_auto", "openai.types.responses", "aiohttp"),
    *("compressed_tensors", "xgrammar", "triton", "IPython", "requests"),
)
"""What the host imports and a test of ours never shadows."""

_SITE = Path(__file__).with_name("site") / "sitecustomize.py"
_MOST = 1 << 20


def import_libraries() -> None:
    """Import all of `LIBRARIES`, without their warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in LIBRARIES:
            importlib.import_module(name)


def install() -> None:
    """Fork the spares that the environment asks for, and let them be spawned."""
    count = int(os.environ.pop(VARIABLE, "0"))
    if not count:
        return
    import_libraries()
    spares: list[tuple[int, socket.socket]] = []
    for _ in range(count):
        spares.append(_fork([line for _, line in spares]))
    cold = util.spawnv_passfds

    def spawnv_passfds(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        if not spares or args[-1] != "--multiprocessing-fork":
            return cold(path, args, passfds)
        pid, line = spares.pop(0)
        files = sorted(set(passfds))
        asked = {"call": args[-2], "env": dict(os.environ), "cwd": os.getcwd()}
        with line:
            message = json.dumps({**asked, "files": files}).encode()
            socket.send_fds(line, [message], files)
        return pid

    util.spawnv_passfds = spawnv_passfds


def _fork(others: Sequence[socket.socket]) -> tuple[int, socket.socket]:
    """A spare: its process id, and our end of the line to it."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid:
        there.close()
        return pid, here
    for line in (here, *others):
        line.close()
    # An interrupt is for those that do something.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    data, files, *_ = socket.recv_fds(there, _MOST, 200)
    there.close()
    if not data:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _become(json.loads(data), files)


def _become(asked: dict[str, Any], files: Sequence[int]) -> NoReturn:
    """The process that the host spawned."""
    above = max([*asked["files"], *files]) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, asked["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    take_over(asked)
    sys.argv[:] = ["-c", "--multiprocessing-fork"]
    runpy.run_path(str(_SITE))
    status: object = 0
    given = re.findall(r"(\w+)=(\d+)", asked["call"])
    try:
        spawn.spawn_main(**{name: int(value) for name, value in given})
    except SystemExit as left:
        status = left.code
    leave(status if isinstance(status, int) else int(status is not None))


def take_over(asked: dict[str, Any]) -> None:
    """Variables, folder and main module of a process that begins."""
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    random.seed()
    sys.modules["__main__"] = ModuleType("__main__")


def leave(status: int) -> NoReturn:
    """End this process as Python does, but for what stands below the fork."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
