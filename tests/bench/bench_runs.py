# SPDX-License-Identifier: Apache-2.0
"""What the tests of the bench commands share: the command, prompts, engines."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAIN = "from sglang_exact.cli import main; main()"

PROMPTS = ([5, 6, 7, 8, 9, 10, 11, 12], [100, 90, 80, 70, 60, 50, 40, 30, 20, 10, 400])
"""Token ids of the tiny model's 512."""


@dataclass(frozen=True)
class EnginePair:
    """A plain and a speculative server of the overlay on the same tiny model.

    `models` holds `target` and one folder per draft kind; the drafter is an oracle
    that knows the plain answers to PROMPTS, and reads `oracle` again when it changes.
    """

    plain: str
    spec: str
    models: Path
    oracle: Path

    @property
    def servers(self) -> list[str]:
        """Both as options."""
        return ["--server", f"plain={self.plain}", "--server", f"spec={self.spec}"]


def command(
    *args: str, cwd: Path, timeout: float = 600, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `sglang-exact bench` as a user does."""
    return subprocess.run(
        [sys.executable, "-c", MAIN, "bench", *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env={**os.environ, **env},
        check=False,
    )


def write_ids(path: Path, prompts: Sequence[Sequence[int]] = PROMPTS) -> Path:
    """The prompts as a local data set of token ids."""
    rows = [{"input_ids": list(ids)} for ids in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def call(
    *args: str, cwd: Path, stop_when: Any = None, **env: str
) -> tuple[int, str, str]:
    """`command` beside servers in this process; `stop_when` () -> bool sends SIGINT."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", MAIN, "bench", *args),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **env},
        cwd=cwd,
    )
    if stop_when is not None:
        while not stop_when() and process.returncode is None:
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert b"Traceback" not in out + err, err.decode()
    return process.returncode or 0, out.decode(), err.decode()


def against(
    servers: Mapping[str, Any],
    *args: str,
    cwd: Path,
    stop_when: Any = None,
    **env: str,
) -> tuple[int, str, str]:
    """`call` with fake servers that are up meanwhile, each given as --server.

    What an earlier call of the test measured is put away, unless this one resumes: a
    record is not written over.
    """
    if "--output-file" in args and "--resume" not in args:
        earlier = cwd / args[args.index("--output-file") + 1]
        for path in cwd.glob(f"{earlier.stem}.*"):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.suffix in (".json", ".jsonl"):
                path.unlink()

    async def go() -> tuple[int, str, str]:
        async with AsyncExitStack() as stack:
            options: list[str] = []
            for name, server in servers.items():
                await stack.enter_async_context(server)
                options += ["--server", f"{name}={server.url}"]
            verb, *rest = args
            return await call(
                verb, *options, *rest, cwd=cwd, stop_when=stop_when, **env
            )

    return asyncio.run(go())


def record(path: Path) -> dict[str, Any]:
    """A record as it lies on disk."""
    return json.loads(path.read_text())
