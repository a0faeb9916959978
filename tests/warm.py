# SPDX-License-Identifier: Apache-2.0
"""Processes of a rehearsal, forked from one that holds the libraries below the host.

Importing torch and transformers is most of what a launcher does before it refuses.
Neither the host nor the overlay is imported before the fork: search path, variables,
`sitecustomize`, working directory and standard streams are those of a new process.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sglang_exact.rehearsal import spares
from sglang_exact.rehearsal.environment import environment

FIXED = ("TRITON_INTERPRET", "SGLANG_USE_CPU_ENGINE", "HF_HUB_OFFLINE")
"""Read while libraries are imported, so equal in every process of a rehearsal."""
MOST = 200_000


def run(
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    stdin: str = "",
    merged: bool = False,
    timeout: float = 400,
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` gives for `python *words`, with its output as text.

    `words` are a script, or -m or -c, and arguments. `env` is one of
    `rehearsal.environment`; a ValueError otherwise. `merged`: stderr goes to stdout.
    """
    here, usual = _nursery()
    off = [name for name in FIXED if env.get(name) != usual[name]]
    if off:
        raise ValueError(
            f"found {off} unlike in a rehearsal; expected rehearsal.environment(); "
            "fix: start a process of its own"
        )
    asked = {"words": words, "env": dict(env), "cwd": str(cwd or Path.cwd())}
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        given.write(stdin)
        given.seek(0)
        streams = [given.fileno(), out.fileno(), (out if merged else err).fileno()]
        socket.send_fds(here, [json.dumps(asked).encode()], streams)
        child = _heard(here)
        try:
            status = _heard(here, timeout)
        except TimeoutError as error:
            os.killpg(child, signal.SIGKILL)
            _heard(here)
            raise subprocess.TimeoutExpired(list(words), timeout) from error
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read())
    return subprocess.CompletedProcess(list(words), status, *texts)


def _heard(here: socket.socket, timeout: float | None = None) -> int:
    here.settimeout(timeout)
    answer = here.recv(64)
    here.settimeout(None)
    if not answer:
        raise RuntimeError(
            "found no answer from the process that forks; expected a number; fix: see "
            "its error above, and correct tests/warm.py"
        )
    return int(answer)


@functools.cache
def _nursery() -> tuple[socket.socket, dict[str, str]]:
    """Our end of the line to the process that forks, and its variables."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    usual = environment()
    subprocess.Popen(
        [sys.executable, __file__, str(there.fileno())],
        env=usual,
        pass_fds=[there.fileno()],
        start_new_session=True,
    )
    there.close()
    return here, usual


def _serve(line: socket.socket) -> None:
    """Fork for each request until nobody is left to ask."""
    spares.import_libraries()
    own = {str(Path(__file__).parent), *os.environ["PYTHONPATH"].split(os.pathsep)}
    installed = [path for path in sys.path if path not in own]
    while True:
        data, streams, *_ = socket.recv_fds(line, MOST, 3)
        if not data:
            return
        child = os.fork()
        if child == 0:
            line.close()
            _become(json.loads(data), streams, installed)
        for stream in streams:
            os.close(stream)
        line.send(b"%d" % child)
        line.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _become(
    asked: dict[str, Any], streams: list[int], installed: list[str]
) -> NoReturn:
    """The process that was asked for."""
    os.setpgid(0, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    spares.take_over(asked)
    how, *words = asked["words"]
    while how == "-W":
        warnings.simplefilter(words[0])  # type: ignore[arg-type]
        how, *words = words[1:]
    first = {"-m": asked["cwd"], "-c": ""}.get(how, str(Path(how).parent))
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = [*paths, *installed]
    importlib.invalidate_caches()
    spares.leave(_status(how, words, first))


def _status(how: str, words: list[str], first: str) -> int:
    """Run the program as Python would; its exit status."""
    try:
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
        if not os.environ.get("PYTHONSAFEPATH"):
            sys.path.insert(0, first)
        sys.argv[:] = words if how == "-m" else [how, *words]
        if how == "-m":
            runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]
        elif how == "-c":
            sys.argv[:] = ["-c", *words[1:]]
            exec(words[0], vars(sys.modules["__main__"]))
        else:
            runpy.run_path(how, run_name="__main__")
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)  # noqa: T201
        return 1
    except BaseException:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


if __name__ == "__main__":
    atexit._clear()
    _serve(socket.socket(fileno=int(sys.argv[1])))
