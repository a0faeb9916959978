# SPDX-License-Identifier: Apache-2.0
"""aiperf as a subprocess of its own environment: its place, command and run.

aiperf pins other versions of packages than the host does, so it never shares the
server's environment; nothing of it is imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.sweep.exports import OUTPUT, SUMMARY, VERSION
from sglang_exact.client.wire import clean

INSTALL = (
    "python3.12 -m venv ~/.venvs/aiperf && "
    f"~/.venvs/aiperf/bin/pip install aiperf=={VERSION}, then add "
    "--aiperf ~/.venvs/aiperf"
)
_VERSION_TIMEOUT_S = 120.0
_GRACE_S = 15.0
_TAIL = 12


class Shape(NamedTuple):
    """One load: ISL = OSL = `length` tokens, `requests` after `warmups` of the same."""

    length: int
    requests: int
    warmups: int


@dataclass(frozen=True, slots=True)
class Target:
    """Where the load goes.

    `endpoint` is "completions", which streams token ids, or "chat", which cannot.
    """

    url: str
    model: str
    tokenizer: str
    endpoint: str = "completions"
    key: str | None = None


def executable(path: Path | None) -> Path:
    """The aiperf program: `path` itself, or the one in an environment's folder.

    Without a path the one on PATH. Raises CannotRun with the commands that make the
    environment.
    """
    if path is None:
        found = shutil.which("aiperf")
        place, candidate = "on PATH", Path(found) if found else None
    else:
        place, candidate = f"at {path}", path.expanduser()
        if candidate.is_dir():
            candidate = candidate / "bin" / "aiperf"
        elif candidate.name.startswith("python"):
            # An interpreter's neighbour is the program of its environment.
            candidate = candidate.with_name("aiperf")
    if candidate is None or not os.access(candidate, os.X_OK) or candidate.is_dir():
        raise CannotRun(
            f"found no aiperf program {place}; expected one in an environment of its "
            f"own (its pins exclude SGLang's); fix: {INSTALL}"
        )
    # Made absolute without following links: an environment is found by its own path.
    return candidate.absolute()


async def version(program: Path) -> str:
    """The program's version. Raises CannotRun unless it is VERSION."""
    try:
        process = await asyncio.create_subprocess_exec(
            str(program),
            "--version",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        raw, _ = await asyncio.wait_for(process.communicate(), _VERSION_TIMEOUT_S)
    except (OSError, TimeoutError) as error:
        raise CannotRun(
            f"{program}: found {type(error).__name__} for --version; expected aiperf "
            f"{VERSION}; fix: {INSTALL}"
        ) from error
    text = raw.decode("utf-8", "replace")
    match = re.search(r"\b\d+\.\d+\.\d+\S*", text)
    if match is None or match[0] != VERSION:
        found = match[0] if match else clean(text, 120)
        raise CannotRun(
            f"{program}: found aiperf {found}; expected {VERSION}, whose exports this "
            f"release reads; fix: {INSTALL}"
        )
    return match[0]


def command(
    program: Path, target: Target, shape: Shape, seed: int, folder: Path
) -> list[str]:
    """The command line: one request in flight, greedy, exactly `length` tokens out."""
    length = str(shape.length)
    words = [
        str(program), "profile",
        "--model-names", target.model,
        "--url", target.url,
        "--endpoint-type", target.endpoint,
        "--streaming",
        "--isl", length, "--isl-stddev", "0",
        "--osl", length, "--osl-stddev", "0",
        "--concurrency", "1",
        "--request-count", str(shape.requests),
        "--random-seed", str(seed),
        "--extra-inputs", "ignore_eos:true",
        "--extra-inputs", f"min_tokens:{length}",
        "--extra-inputs", "temperature:0",
        "--use-server-token-count",
        "--tokenizer", target.tokenizer,
        "--artifact-dir", str(folder),
        "--export-level", "raw",
        "--no-gpu-telemetry",
        "--ui-type", "none",
    ]  # fmt: skip
    if shape.warmups:
        words += ["--warmup-request-count", str(shape.warmups)]
    if target.endpoint == "completions":
        words += ["--extra-inputs", "return_token_ids:true"]
    else:
        # Otherwise the template's own tokens come on top of ISL.
        words += ["--apply-chat-template"]
    if target.key:
        words += ["--api-key", target.key]
    return words


def environment(tokenizer: str) -> dict[str, str]:
    """Environment of the program.

    Offline mode makes aiperf refuse a tokenizer that is a local folder.
    """
    env = dict(os.environ)
    if Path(tokenizer).is_dir():
        env.pop("HF_HUB_OFFLINE", None)
    # What helps one environment's Python breaks another's.
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        env.pop(name, None)
    return env


async def run(words: Sequence[str], folder: Path, tokenizer: str) -> None:
    """Run the program to its end; when this is cancelled, end it as Ctrl-C would.

    Raises CannotRun with the tail of what it printed, kept whole in OUTPUT.
    """
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / OUTPUT
    with output.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            env=environment(tokenizer),
            start_new_session=True,
        )
    try:
        status = await process.wait()
    except asyncio.CancelledError:
        await _end(process)
        raise
    if status != 0 or not (folder / SUMMARY).is_file():
        lines = output.read_text(encoding="utf-8", errors="replace").split("\n")
        tail = [clean(line, 200) for line in lines if line.strip()][-_TAIL:]
        raise CannotRun(
            f"aiperf ended with status {status} and "
            f"{'a' if (folder / SUMMARY).is_file() else 'no'} {SUMMARY}; expected "
            f"status 0 and the export; its output, whole in {output}, ends with: "
            f"{' | '.join(tail) or 'nothing'}"
        )


async def _end(process: asyncio.subprocess.Process) -> None:
    """Interrupt the group, then kill what is left of it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
