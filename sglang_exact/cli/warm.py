# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact warm`: compile ahead of time what a server would compile at its start.

A first start compiles kernels for minutes: Triton's and DeepGEMM's for the model's
shapes, FlashInfer's operators with nvcc, the draft's with torch.compile. Which ones
follows from model, draft, flags and GPU, so they are found by starting that server:
until every rank has attested, then it is stopped. All of it lies in four folders, which
may be copied to machines with the same GPU and the same packages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from sglang_exact.caches import Size, folders, size

STAGE = re.compile(r"^\[[^]]+\] (Load weight|Capture [\w ]+?graph|KV Cache) ?(begin)?")
"""Lines of the host's log that name what it does next."""
COMPILERS = frozenset(("nvcc", "cicc", "ptxas"))
_POLL_S = 1.0
_GRACE_S = 60.0
_REFUSED = 3
_TAIL = 12


def compiled_now(session: int) -> list[str]:
    """Sources that compilers of a process session have in hand; empty off Linux."""
    found: set[str] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
            name, *rest = words.split("\0")
            if Path(name).name in COMPILERS and os.getsid(int(entry.name)) == session:
                sources = (Path(w).name for w in rest if w.endswith((".cu", ".ptx")))
                found.update(sources)
    return sorted(found)


def stage(lines: Sequence[str]) -> str:
    """What the server does, by the last line of its log that names it."""
    for line in reversed(lines):
        if found := STAGE.match(line):
            return found[1]
    return "start"


async def started(
    command: Sequence[str],
    port: int,
    log: Path,
    timeout: float,
    say: Callable[[str], None],
) -> int:
    """Start a server, say what it does until it is ready, stop it.

    Returns 0 once it was ready, else its exit status; 1 where `timeout` seconds were
    not enough.
    """
    from sglang_exact.client.http import Client
    from sglang_exact.client.process import Process

    process = Process([*command, "--port", str(port)], log, private=True)
    began, said = time.monotonic(), ""
    try:
        async with Client(f"http://127.0.0.1:{port}") as client:
            while not await client.is_ready():
                if (status := process.status()) is not None:
                    return status or 1
                if time.monotonic() - began > timeout:
                    return 1
                now = stage(process.tail(200))
                if sources := compiled_now(process.session):
                    now += f": compiling {', '.join(sources)}, once"
                if now != said:
                    say(f"{time.monotonic() - began:5.0f} s  {now}")
                    said = now
                await asyncio.sleep(_POLL_S)
    finally:
        await asyncio.to_thread(process.stop, _GRACE_S)
    return 0


def _table(before: Mapping[str, Size], environ: Mapping[str, str]) -> list[str]:
    lines = []
    for name, folder in folders(environ).items():
        now = size(folder)
        new = now.files - before[name].files
        mib = now.bytes / 2**20
        lines.append(f"  {name:14}{new:6,} new files, {mib:8,.1f} MiB in {folder}")
    return lines


def warm(
    flags: Annotated[
        list[str],
        typer.Argument(help="Flags of the server, after --: model, draft, sizes."),
    ],
    timeout: Annotated[
        float, typer.Option(help="Seconds until the server has to be ready.")
    ] = 3600.0,
    log: Annotated[
        Path | None, typer.Option(help="Keep the server's log in this file.")
    ] = None,
) -> None:
    """Fill the compile caches: sglang-exact warm -- --model-path ... (a server's flags)

    Starts that server, says what it compiles, waits until it is ready and stops it.
    The next start with these flags finds everything compiled.
    """
    from sglang_exact.client.process import free_port
    from sglang_exact.view.output import stamped

    if {"--port", "--host"} & {word.partition("=")[0] for word in flags}:
        raise typer.BadParameter(
            "found --port or --host, expected neither: the server is not for others"
        )
    log = log or stamped("warm", ".log")
    before = {name: size(folder) for name, folder in folders(os.environ).items()}
    began = time.monotonic()
    typer.echo(f"log: {log}")
    command = [sys.executable, "-m", "sglang_exact.launch_server", *flags]
    status = asyncio.run(started(command, free_port(), log, timeout, typer.echo))
    typer.echo("\n".join(_table(before, os.environ)))
    if status:
        tail = log.read_text(errors="replace").splitlines()[-_TAIL:]
        typer.echo("\n".join(tail), err=True)
        typer.echo(
            f"found a server that ended with status {status} or was not ready after "
            f"{timeout:g} s, expected it ready; fix: read {log}",
            err=True,
        )
        raise typer.Exit(_REFUSED if status == _REFUSED else 1)
    typer.echo(f"warm after {time.monotonic() - began:.0f} s")
