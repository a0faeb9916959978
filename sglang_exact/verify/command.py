# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact verify`, `record` and `report`.

Exit status: 0 verified, 1 divergence, 2 could not run or not exercised, 130
interrupted. The result goes to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO, TypeVar, cast

import typer
from rich.console import Console

from sglang_exact.client.http import Failed
from sglang_exact.verify import session
from sglang_exact.verify.arms import EXTRA_ROLES, REFERENCE, TESTED
from sglang_exact.verify.output import (
    COULD_NOT_RUN,
    Forgiving,
    cannot,
    command_line,
    finish,
    guarded,
    tell,
)
from sglang_exact.verify.plan import Settings
from sglang_exact.verify.record import RecordError, RecordLost
from sglang_exact.verify.runner import RunOptions
from sglang_exact.verify.servers import Address
from sglang_exact.verify.summary import Run
from sglang_exact.view.console import Bar, stoppable
from sglang_exact.view.options import with_options
from sglang_exact.view.output import WouldBeLost, check_pages, stamped

T = TypeVar("T")
# Every request of a run is kept in memory.
MOST_REPEATS = 1_000_000
# A year: longer times overflow where they are waited for.
MOST_SECONDS = 3.2e7


class Suite(StrEnum):
    """How much to ask."""

    quick = "quick"
    standard = "standard"
    full = "full"


class OutputFormat(StrEnum):
    """What goes to stdout."""

    text = "text"
    json = "json"


def _seconds(value: float) -> float:
    """A time that ends: neither 0, which would mean none, nor NaN."""
    if not 0 < value < MOST_SECONDS:
        raise typer.BadParameter(f"found {value:g}, expected seconds above 0")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked of which server: the options of `verify` and `record`."""

    base_url: Annotated[
        str, typer.Option("--base-url", help="Server to test, http://HOST:PORT.")
    ]
    suite: Annotated[Suite, typer.Option("--suite", help="How much to ask.")] = (
        Suite.standard
    )
    arms: Annotated[
        str, typer.Option("--arms", help="Arms by name, separated by commas.")
    ] = ""
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-prompt-tokens",
            min=16,
            help="Cut the long prompts; what then is too short is not exercised.",
        ),
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="Own prompts, JSONL with text or input_ids."),
    ] = None
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", min=1, help="Use only the first N.")
    ] = None
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", min=1, help="Tokens for every prompt."),
    ] = None
    seed: Annotated[int, typer.Option("--seed", help="Seed of the id prompts.")] = 20261
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="SGLANG_API_KEY", help="Key of the servers."),
    ] = None
    vocab_size: Annotated[
        int | None,
        typer.Option("--vocab-size", min=8, help="If the server does not say it."),
    ] = None
    skip_tokenizer_init: Annotated[
        bool,
        typer.Option(
            "--skip-tokenizer-init", help="Prompts as ids: no tokenizer there."
        ),
    ] = False
    request_timeout: Annotated[
        float,
        typer.Option(
            "--request-timeout", callback=_seconds, help="Seconds for one answer."
        ),
    ] = 1800.0
    reconnect_timeout: Annotated[
        float,
        typer.Option(
            "--reconnect-timeout",
            callback=_seconds,
            help="Seconds to wait for a lost server.",
        ),
    ] = 120.0
    output_file: Annotated[
        Path | None,
        typer.Option("--output-file", help="The record (JSONL) to write or resume."),
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the record --output-file.")
    ] = False

    def inputs(
        self, kind: str, more: list[Address], options: RunOptions, **settings: int
    ) -> session.Inputs:
        """What a run is made from; `settings` are further ones of the plan."""
        return session.Inputs(
            [Address(TESTED, self.base_url, self.api_key), *more],
            Settings(
                self.suite.value,
                _names(self.arms),
                tokens=self.max_new_tokens,
                prompts=self.prompts,
                num_prompts=self.num_prompts,
                seed=self.seed,
                max_prompt_tokens=self.max_prompt_tokens,
                **settings,
            ),
            options,
            _output(self.output_file, self.resume, kind),
            command_line(sys.argv),
            resume=self.resume,
            vocab_size=self.vocab_size,
            by_ids=self.skip_tokenizer_init,
            timeout=self.request_timeout,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Where a result goes: the options of `verify` and `report`."""

    html: Annotated[
        Path | None, typer.Option("--html", help="Write the page here.")
    ] = None
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result here.")
    ] = None
    submit_row: Annotated[
        Path | None,
        typer.Option("--submit-row", help="Write one row for an evidence table here."),
    ] = None
    output_format: Annotated[
        OutputFormat, typer.Option("--output-format", help="What goes to stdout.")
    ] = OutputFormat.text

    def check(self, measured: dict[str, Path | None]) -> None:
        """Leave if a page would replace one of `measured`, or another page."""
        pages = {"--html": self.html, "--json": self.json_file}
        try:
            check_pages(pages | {"--submit-row": self.submit_row}, measured)
        except WouldBeLost as error:
            cannot(str(error))

    def finish(self, run: Run) -> NoReturn:
        """Show the result and leave with its status."""
        as_json = self.output_format is OutputFormat.json
        finish(run, as_json, self.json_file, self.html, self.submit_row)


def _verify(
    asked: Asked,
    shown: Shown,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference", help="Plain server (URL) or a record of it (file)."
        ),
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option("--server", help=f"ROLE=URL, ROLE of {', '.join(EXTRA_ROLES)}."),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats", min=1, max=MOST_REPEATS, help="Requests of the repeats arm."
        ),
    ] = 1200,
    long_repeats: Annotated[
        int,
        typer.Option(
            "--long-repeats",
            min=1,
            max=MOST_REPEATS,
            help="Requests of the long-repeat arm.",
        ),
    ] = 8,
    reference_api_key: Annotated[
        str | None,
        typer.Option("--reference-api-key", help="Key of the reference, if another."),
    ] = None,
    restart_command: Annotated[
        str | None,
        typer.Option(
            "--restart-command", help="Command that restarts the tested server."
        ),
    ] = None,
    restart_timeout: Annotated[
        float,
        typer.Option(
            "--restart-timeout",
            callback=_seconds,
            help="Seconds until it answers again.",
        ),
    ] = 1800.0,
) -> None:
    """Compare a server with plain decoding, bit for bit."""
    more, file = [], None
    if reference is not None and reference.startswith(("http://", "https://")):
        key = reference_api_key or asked.api_key
        more.append(Address(REFERENCE, reference, key))
    elif reference is not None:
        file = Path(reference)
    more += [_extra(text, asked.api_key) for text in server or []]
    options = RunOptions(asked.reconnect_timeout, restart_command, restart_timeout)
    inputs = asked.inputs(
        "verify", more, options, repeats=repeats, long_repeats=long_repeats
    )._replace(reference_file=file)
    shown.check(
        {
            "--output-file": inputs.output,
            "--reference": file,
            "--prompts": asked.prompts,
        }
    )
    shown.finish(_run(session.verify(inputs, _display)))


def _record(asked: Asked) -> None:
    """Record a plain server's answers, for verify --reference FILE."""
    same = Address(REFERENCE, asked.base_url, asked.api_key)
    inputs = asked.inputs("reference", [same], RunOptions(asked.reconnect_timeout))
    problems = _run(session.record_reference(inputs, _display))
    Forgiving(sys.stdout).write(f"recorded in {inputs.output}\n")
    for line in problems:
        tell(f"not recorded: {line}")
    raise typer.Exit(COULD_NOT_RUN if problems else 0)


def _report(
    shown: Shown,
    record_file: Annotated[Path, typer.Argument(help="A record written by verify.")],
) -> None:
    """Show a record again, as text, JSON or a page."""
    shown.check({"the record": record_file})
    try:
        run = session.load_run(record_file)
    except (RecordError, ValueError) as error:
        cannot(str(error))
    except Exception as error:
        # A record that was changed by hand may fail anywhere.
        cannot(f"{record_file}: unexpected {type(error).__name__}: {error}")
    shown.finish(run)


verify = guarded(with_options(_verify, Asked, Shown, after="base_url"))
record = guarded(with_options(_record, Asked))
report = guarded(with_options(_report, Shown))


def add(app: typer.Typer) -> None:
    """Register the three commands of this module."""
    app.command("verify")(verify)
    app.command("record")(record)
    app.command("report")(report)


def _extra(text: str, key: str | None) -> Address:
    role, _, url = text.partition("=")
    if role not in EXTRA_ROLES or not url:
        cannot(
            f"--server {role!r}: expected ROLE=URL with ROLE one of "
            f"{', '.join(EXTRA_ROLES)}"
        )
    return Address(role, url, key)


def _output(path: Path | None, resume: bool, kind: str) -> Path:
    """The record's path; the default carries the time, so no record is lost."""
    if path is not None:
        if not resume and path.is_file() and path.stat().st_size:
            cannot(
                f"--output-file {path}: exists; pass --resume to go on with it, or "
                "another name"
            )
        return path
    if resume:
        cannot("--resume: expected --output-file with the record to go on with")
    return stamped(kind, ".jsonl")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _display(total: int) -> Bar:
    return Bar(Console(file=cast(TextIO, Forgiving(sys.stderr))), total)


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(stoppable(work))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except (Failed, RecordLost, ValueError, OSError) as error:
        cannot(str(error))
