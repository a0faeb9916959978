# SPDX-License-Identifier: Apache-2.0
"""Run a command and end its whole process group when whoever started us is gone.

    python supervise.py COMMAND...      with standard input a pipe that nobody writes to

A test runner that is killed cannot stop its server, and a server whose ranks are
spawned processes does not notice. The pipe closes when the starter ends, however it
ends. Imports nothing but the standard library, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

_GRACE_S = 5.0


def _end_with_starter(child: subprocess.Popen[bytes], gone: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    gone.set()
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE_S)
    os.killpg(0, signal.SIGKILL)


def main(command: list[str]) -> int:
    """Run `command` to its end; its exit status, as a shell would report it."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    # The starter signals the group; the command decides when it is over.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gone = threading.Event()
    threading.Thread(target=_end_with_starter, args=(child, gone), daemon=True).start()
    status = child.wait()
    if gone.is_set():
        # The command is over; what it started may not be.
        os.killpg(0, signal.SIGKILL)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
