# SPDX-License-Identifier: Apache-2.0
"""What the commands of `sglang-exact bench` share: options, statuses, output.

Exit status: 0 done, 2 could not run or not everything could be measured, 130
interrupted. Tables go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console

from sglang_exact.bench import provenance
from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.run import RunError, now
from sglang_exact.verify.client import Failed
from sglang_exact.verify.console import Bar

COULD_NOT_RUN = 2
INTERRUPTED = 130
T = TypeVar("T")

Servers = Annotated[
    list[str] | None,
    typer.Option("--server", help="NAME=URL of a running server; repeat for more."),
]
Plain = Annotated[
    str | None,
    typer.Option("--plain", help="NAME of the plain server; default: plain."),
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="SGLANG_API_KEY", help="Key of the servers."),
]
Label = Annotated[
    str, typer.Option("--label", help="Name of the configuration, kept in the record.")
]
Notes = Annotated[
    list[str] | None,
    typer.Option("--note", help="What a reader has to know; repeat for more."),
]
OutputFile = Annotated[
    Path | None,
    typer.Option("--output-file", help="The record (JSON); default: VERB and time."),
]
Timeout = Annotated[
    float, typer.Option("--request-timeout", help="Seconds for one answer.")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of generated prompts.")]


def command() -> list[str]:
    """The command line as it may be written down."""
    words = [Path(sys.argv[0]).name if sys.argv else "", *sys.argv[1:]]
    return provenance.scrub_words(words)


def output_path(path: Path | None, verb: str, suffix: str = ".json") -> Path:
    """The record's path; the default carries the time, so no record is lost."""
    if path is not None:
        return path
    stamp = now().replace("-", "").replace(":", "").partition("+")[0]
    return Path(f"sglang-exact-bench-{verb}-{stamp}Z{suffix}")


def cannot(text: str) -> NoReturn:
    """Leave with status 2 and one message."""
    typer.echo(f"sglang-exact bench cannot run this: {text}", err=True)
    raise typer.Exit(COULD_NOT_RUN)


def bar(total: int) -> Bar:
    """Progress on stderr over `total` units of work."""
    return Bar(Console(stderr=True), total)


def stdout() -> Console:
    """Where tables go: lines are never cut, so that they can be piped."""
    return Console(highlight=False, soft_wrap=True)


async def _stoppable(work: Coroutine[Any, Any, T]) -> T:
    """Let SIGTERM end a run as Ctrl-C does: with its partial result."""
    task = asyncio.current_task()
    if task is not None and sys.platform != "win32":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


def execute(work: Coroutine[Any, Any, T], kept: Path | None = None) -> T:
    """Run a measurement; turn what stops it into a message and an exit status.

    `kept` is the file that holds what was measured until then.
    """
    held = f"; what was measured is in {kept}" if kept is not None else ""
    try:
        return asyncio.run(_stoppable(work))
    except (KeyboardInterrupt, asyncio.CancelledError):
        typer.echo(f"interrupted{held if kept and kept.exists() else ''}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except (CannotRun, Failed, RunError, ValueError, OSError) as error:
        cannot(f"{error}{held if kept and kept.exists() else ''}")
    except Exception as error:
        # Whatever a server may have caused, the user gets one line and status 2.
        found = _flat(error)
        cannot(f"{found}{held if kept and kept.exists() else ''}")


def _flat(error: BaseException) -> str:
    """The first error inside a task group's, by name."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, CannotRun | Failed | RunError | ValueError | OSError):
        return str(error)
    return f"unexpected {type(error).__name__}: {error}"
