# SPDX-License-Identifier: Apache-2.0
"""What the commands of `sglang-exact bench` share: options, statuses, output.

Exit status: 0 done, 2 could not run or not everything could be measured, 130
interrupted. Tables go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console

from sglang_exact.bench import provenance, servers
from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.run import BenchRun, Output, Recorder, RunError
from sglang_exact.bench.run import resume as resumed
from sglang_exact.bench.servers import Address, Served
from sglang_exact.client.http import Client, Failed
from sglang_exact.view import tables
from sglang_exact.view.console import Bar, stoppable
from sglang_exact.view.files import NoPlot
from sglang_exact.view.options import with_options
from sglang_exact.view.output import check_pages, stamped, write_atomic
from sglang_exact.view.tables import TableData

COULD_NOT_RUN = 2
INTERRUPTED = 130
PIPED_WIDTH = 200
T = TypeVar("T")
Tables = Callable[[BenchRun], list[TableData]]
Plot = Callable[[BenchRun, Path], None]
Work = Callable[..., Coroutine[Any, Any, list[str]]]

Seed = Annotated[int, typer.Option("--seed", help="Seed of generated prompts.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The options that commands share, as they were given."""

    server: Annotated[
        list[str] | None,
        typer.Option("--server", help="NAME=URL of a running server; repeat for more."),
    ] = None
    plain: Annotated[
        str | None,
        typer.Option("--plain", help="NAME of the plain server; default: plain."),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="SGLANG_API_KEY", help="Key of the servers."),
    ] = None
    request_timeout: Annotated[
        float, typer.Option("--request-timeout", help="Seconds for one answer.")
    ] = 1800.0
    label: Annotated[
        str,
        typer.Option("--label", help="Name of the configuration, kept in the record."),
    ] = ""
    note: Annotated[
        list[str] | None,
        typer.Option("--note", help="What a reader has to know; repeat for more."),
    ] = None
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output-file", help="The record (JSON); default: VERB and time."
        ),
    ] = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Add to --output-file what it lacks, also other servers."
        ),
    ] = False
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw into this file, .svg or .png.")
    ] = None
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Write the tables here.")
    ] = None


SERVERS = ("server", "plain", "api_key", "request_timeout")
"""The options of a command that asks servers."""


class Job:
    """One call of a measuring command: its options, its file, its record.

    Attributes:
        base: name of the plain server, None without one.
        kept: the record to go on with, None where a new one begins.
        tables: what is shown of the record.
    """

    def __init__(
        self, verb: str, given: Given, shown: Tables, beside: str, resumes: bool
    ):
        self.verb, self.given, self.tables = verb, given, shown
        self.path = given.output_file or stamped(f"bench-{verb}", ".json")
        self.beside = self.path.with_suffix(beside)
        resume = given.resume if resumes else None
        self.output = Output(self.path, [self.beside] if beside else [], resume)
        self.run = BenchRun(verb, given.label, list(given.note or []))
        self.run.command = command()
        self.kept: BenchRun | None = None
        self.addresses: list[Address] = []
        self.base: str | None = None
        self.stack = AsyncExitStack()

    def prepare(self, asks: bool) -> None:
        """Look at the files, and at the servers' names where the command `asks` any.

        Raises CannotRun, RunError or WouldBeLost.
        """
        pages = {"--markdown": self.given.markdown, "--plot": self.given.plot}
        check_pages(pages, {"--output-file": self.path})
        self.kept = self.output.earlier()
        if self.kept is not None and self.kept.verb != self.verb:
            raise CannotRun(
                f"--resume: found in {self.path} a record of {self.kept.verb}; "
                f"expected one of {self.verb}; fix: name another --output-file"
            )
        if asks:
            self.addresses = servers.parse(self.given.server or [], self.given.api_key)
            known = [address.name for address in self.addresses]
            known += [row["server"] for row in self.kept.rows] if self.kept else []
            self.base = servers.choose_plain(known, self.given.plain)

    async def open(self, client: type[Client] = Client) -> list[Served]:
        """Every server, open until the work is done, each with a `client`.

        Raises CannotRun where one does not answer, or the plain one speculates.
        """
        timeout = self.given.request_timeout
        found = await servers.open_all(
            self.stack, self.addresses, timeout=timeout, client=client
        )
        for one in found:
            if one.name == self.base:
                servers.check_plain(one)
        return found

    def begin(
        self,
        found: Sequence[Served],
        settings: Mapping[str, Any],
        seeds: dict[str, int] | None = None,
    ) -> Recorder:
        """Begin the record, or go on with the earlier one.

        Raises RunError if that one measured something else.
        """
        self.run.settings = {**settings, "plain": self.base}
        self.run.notes += servers.setup_notes(found)
        self.run.provenance = provenance.collect([s.facts for s in found], seeds)
        if self.kept is not None:
            resumed(self.kept, self.run, self.path)
        return self.output.record(self.run)


def measures(
    verb: str,
    shown: Tables,
    *,
    plot: Plot | None = None,
    without: Sequence[str] = (),
    beside: str = "",
    resumes: bool = False,
    request_timeout: float = 1800.0,
) -> Callable[[Work], Callable[..., None]]:
    """Make a command of a coroutine function that gets a Job and options of its own.

    It returns what was not measured: the record is complete where that is nothing.
    `without` names shared options that it does not have, `beside` is the suffix of what
    it keeps beside the record.
    """
    without = [*without, *([] if resumes else ["resume"]), *([] if plot else ["plot"])]

    def decorate(work: Work) -> Callable[..., None]:
        def run(given: Given, **own: Any) -> None:
            job = Job(verb, given, shown, beside, resumes)

            async def whole() -> list[str]:
                job.prepare("server" not in without)
                async with job.stack:
                    problems = await work(job, **own)
                job.output.finish(complete=not problems)
                show(job.tables(job.run), job.path, given.markdown)
                return problems + draw(plot, job.run, given.plot)

            leave(execute(whole(), job.output.held), job.path)

        return with_options(
            run,
            Given,
            own=work,
            after="plain",
            without=without,
            request_timeout=request_timeout,
        )

    return decorate


def command() -> list[str]:
    """The command line as it may be written down."""
    return provenance.scrub_words(["sglang-exact", *sys.argv[1:]])


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


def draw(plot: Plot | None, run: BenchRun, path: Path | None) -> list[str]:
    """Draw a plot if asked to; what went wrong, which costs no numbers."""
    try:
        if plot is not None and path is not None:
            plot(run, path)
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


def execute(
    work: Coroutine[Any, Any, T], held: Callable[[], Path | None] = lambda: None
) -> T:
    """Run a measurement; turn what stops it into a message and an exit status.

    `held` gives the file that holds what this run measured until then, None if there is
    nothing.
    """
    try:
        return asyncio.run(stoppable(work))
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
