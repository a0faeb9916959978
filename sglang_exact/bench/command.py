# SPDX-License-Identifier: Apache-2.0
"""What the commands of `sglang-exact bench` share: options, statuses, output.

Exit status: 0 done, 2 could not run or not everything could be measured, 130
interrupted. Tables go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console

from sglang_exact.bench import provenance
from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.run import RunError, now
from sglang_exact.client.http import Failed
from sglang_exact.view import tables
from sglang_exact.view.console import Bar
from sglang_exact.view.files import NoPlot
from sglang_exact.view.output import write_atomic
from sglang_exact.view.tables import TableData

COULD_NOT_RUN = 2
INTERRUPTED = 130
PIPED_WIDTH = 200
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
    return provenance.scrub_words(["sglang-exact", *sys.argv[1:]])


def output_path(path: Path | None, verb: str, suffix: str = ".json") -> Path:
    """The record's path; the default carries the time, so no record is lost."""
    if path is not None:
        return path
    stamp = now().replace("-", "").replace(":", "").partition("+")[0]
    # Two runs may start in the same second.
    return Path(f"sglang-exact-bench-{verb}-{stamp}Z-{os.getpid()}{suffix}")


def say(text: str) -> None:
    """One line on stderr."""
    typer.echo(text, err=True)


def cannot(text: str) -> NoReturn:
    """Leave with status 2 and one message."""
    typer.echo(f"sglang-exact bench cannot run this: {text}", err=True)
    raise typer.Exit(COULD_NOT_RUN)


def names(text: str) -> list[str]:
    """Names separated by commas, each once."""
    return list(dict.fromkeys(n.strip() for n in text.split(",") if n.strip()))


def numbers(text: str, option: str) -> list[int]:
    """Positive integers separated by commas, ranges as 1-15.

    Raises CannotRun for anything else.
    """
    found: list[int] = []
    for part in names(text):
        low, dash, high = part.partition("-")
        if not (low.isdecimal() and (high.isdecimal() if dash else True)):
            raise CannotRun(f"found {option} {text!r}; expected numbers such as 1,8,32")
        found += range(int(low), int(high if dash else low) + 1)
    if not found or min(found) < 1:
        raise CannotRun(f"found {option} {text!r}; expected positive numbers")
    return list(dict.fromkeys(found))


def bar(total: int) -> Bar:
    """Progress on stderr over `total` units of work."""
    return Bar(Console(stderr=True), total)


def stdout() -> Console:
    """Where tables go; wide where no terminal sets the width."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, PIPED_WIDTH)
    return console


def show(shown: Sequence[TableData], path: Path, markdown: Path | None = None) -> None:
    """Print tables and where the record is; write them as Markdown if asked to."""
    console = stdout()
    for table in shown:
        tables.show(table, console)
        console.print()
    typer.echo(f"record: {path}")
    if markdown is not None:
        text = "\n".join(tables.markdown(table) for table in shown)
        write_atomic(markdown, text.encode())
        typer.echo(f"tables: {markdown}")


def draw(plot: Callable[[], None]) -> list[str]:
    """Draw a plot; what went wrong, which costs no numbers."""
    try:
        plot()
    except (NoPlot, OSError) as error:
        return [f"the plot: {error}"]
    return []


def leave(problems: Sequence[str], path: Path) -> None:
    """Exit status 2 if something was not measured, with what and why."""
    for text in problems:
        typer.echo(f"not measured: {text}", err=True)
    if problems:
        typer.echo(f"what was measured is in {path}", err=True)
        raise typer.Exit(COULD_NOT_RUN)


async def _stoppable(work: Coroutine[Any, Any, T]) -> T:
    """Let SIGTERM end a run as Ctrl-C does: with its partial result."""
    task = asyncio.current_task()
    if task is not None and sys.platform != "win32":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


def execute(
    work: Coroutine[Any, Any, T], held: Callable[[], Path | None] = lambda: None
) -> T:
    """Run a measurement; turn what stops it into a message and an exit status.

    `held` gives the file that holds what this run measured until then, None if there is
    nothing.
    """
    try:
        return asyncio.run(_stoppable(work))
    except (KeyboardInterrupt, asyncio.CancelledError):
        typer.echo(f"interrupted{_measured(held())}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        # Whatever a server may have caused, the user gets one line and status 2.
        cannot(f"{_flat(error)}{_measured(held())}")


def _measured(path: Path | None) -> str:
    return "" if path is None else f"; what was measured is in {path}"


def _flat(error: BaseException) -> str:
    """The first error inside a task group's, by name."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, CannotRun | Failed | RunError | ValueError | OSError):
        return str(error)
    return f"unexpected {type(error).__name__}: {error}"
