# SPDX-License-Identifier: Apache-2.0
"""A server of our own: a port, a start, a log, and an end for sure."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_exact.client import supervise

RANGE = range(20_000, 32_000)
"""Below what Linux hands out by itself (ip_local_port_range, from 32768 on)."""

_TRIES = 200


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that nobody listens on, and that nobody is given by chance.

    A port that the kernel picks may be handed out again, to the store or the message
    sockets of the very server that it was picked for: that server needs seconds
    before it listens, and then ends because its address is taken.

    Raises:
        OSError: none was found free.
    """
    for port in random.SystemRandom().sample(RANGE, _TRIES):
        with socket.socket() as s:
            try:
                s.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(
        f"found {_TRIES} ports of {host} between {RANGE.start} and {RANGE.stop} all in "
        "use, expected a free one; fix: stop what listens there"
    )


class Process:
    """A command in a process group of its own, which also ends when this process does,
    even if it is killed.

    Args:
        command: program and arguments.
        log: file for everything that it prints.
        env: its environment; None for this process's own.
        private: the log is added to and is for its owner alone: a server prints its
            arguments, and with them its key.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        private: bool = False,
    ) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if private else os.O_TRUNC)
        with os.fdopen(os.open(log, flags, 0o600 if private else 0o666), "ab") as file:
            # Isolated and without site: the supervisor needs nothing of either.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(supervise.__file__), *command],
                env=None if env is None else dict(env),
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def session(self) -> int:
        """Id of the process session that it and all it starts are in."""
        return self._process.pid

    def status(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._process.poll()

    def tail(self, lines: int) -> list[str]:
        """The last lines of the log."""
        return self.log.read_text(errors="replace").splitlines()[-lines:]

    def stop(self, grace_s: float) -> None:
        """End it and every process it started; idempotent.

        With `grace_s` seconds above 0 it is asked first and may take so long: ranks on
        a GPU hand their memory back.
        """
        if grace_s:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
