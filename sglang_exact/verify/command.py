# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact verify`, `record` and `report`.

Exit status: 0 verified, 1 divergence, 2 could not run or not exercised, 130
interrupted. The result goes to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar, cast

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
from sglang_exact.view.console import Bar, stoppable
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


BaseUrl = Annotated[
    str, typer.Option("--base-url", help="Server to test, http://HOST:PORT.")
]
SuiteOption = Annotated[Suite, typer.Option("--suite", help="How much to ask.")]
ArmsOption = Annotated[
    str, typer.Option("--arms", help="Arms by name, separated by commas.")
]
PromptsOption = Annotated[
    Path | None,
    typer.Option("--prompts", help="Own prompts, JSONL with text or input_ids."),
]
NumPrompts = Annotated[
    int | None, typer.Option("--num-prompts", min=1, help="Use only the first N.")
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", min=1, help="Tokens for every prompt."),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the id prompts.")]
OutputFile = Annotated[
    Path | None,
    typer.Option("--output-file", help="The record (JSONL) to write or resume."),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the record --output-file.")
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="SGLANG_API_KEY", help="Key of the servers."),
]
VocabSize = Annotated[
    int | None,
    typer.Option("--vocab-size", min=8, help="If the server does not say it."),
]
SkipTokenizer = Annotated[
    bool,
    typer.Option("--skip-tokenizer-init", help="Prompts as ids: no tokenizer there."),
]


def _seconds(value: float) -> float:
    """A time that ends: neither 0, which would mean none, nor NaN."""
    if not 0 < value < MOST_SECONDS:
        raise typer.BadParameter(f"found {value:g}, expected seconds above 0")
    return value


Timeout = Annotated[
    float,
    typer.Option(
        "--request-timeout", callback=_seconds, help="Seconds for one answer."
    ),
]
Reconnect = Annotated[
    float,
    typer.Option(
        "--reconnect-timeout",
        callback=_seconds,
        help="Seconds to wait for a lost server.",
    ),
]

Reference = Annotated[
    str | None,
    typer.Option("--reference", help="Plain server (URL) or a record of it (file)."),
]
Servers = Annotated[
    list[str] | None,
    typer.Option("--server", help=f"ROLE=URL, ROLE of {', '.join(EXTRA_ROLES)}."),
]
Repeats = Annotated[
    int,
    typer.Option(
        "--repeats", min=1, max=MOST_REPEATS, help="Requests of the repeats arm."
    ),
]
LongRepeats = Annotated[
    int,
    typer.Option(
        "--long-repeats",
        min=1,
        max=MOST_REPEATS,
        help="Requests of the long-repeat arm.",
    ),
]
MaxPromptTokens = Annotated[
    int | None,
    typer.Option(
        "--max-prompt-tokens",
        min=16,
        help="Cut the long prompts; what then is too short is not exercised.",
    ),
]
ReferenceKey = Annotated[
    str | None,
    typer.Option("--reference-api-key", help="Key of the reference, if another."),
]
RestartCommand = Annotated[
    str | None,
    typer.Option("--restart-command", help="Command that restarts the tested server."),
]
RestartTimeout = Annotated[
    float,
    typer.Option(
        "--restart-timeout", callback=_seconds, help="Seconds until it answers again."
    ),
]
Html = Annotated[Path | None, typer.Option("--html", help="Write the page here.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result here.")]
SubmitRow = Annotated[
    Path | None,
    typer.Option("--submit-row", help="Write one row for an evidence table here."),
]
Format = Annotated[
    OutputFormat, typer.Option("--output-format", help="What goes to stdout.")
]


@guarded
def verify(
    base_url: BaseUrl,
    reference: Reference = None,
    server: Servers = None,
    suite: SuiteOption = Suite.standard,
    arms: ArmsOption = "",
    repeats: Repeats = 1200,
    long_repeats: LongRepeats = 8,
    max_prompt_tokens: MaxPromptTokens = None,
    prompts: PromptsOption = None,
    num_prompts: NumPrompts = None,
    max_new_tokens: MaxNewTokens = None,
    seed: Seed = 20261,
    api_key: ApiKey = None,
    reference_api_key: ReferenceKey = None,
    vocab_size: VocabSize = None,
    skip_tokenizer_init: SkipTokenizer = False,
    request_timeout: Timeout = 1800.0,
    reconnect_timeout: Reconnect = 120.0,
    restart_command: RestartCommand = None,
    restart_timeout: RestartTimeout = 1800.0,
    output_file: OutputFile = None,
    resume: Resume = False,
    html: Html = None,
    json_file: JsonFile = None,
    submit_row: SubmitRow = None,
    output_format: Format = OutputFormat.text,
) -> None:
    """Compare a server with plain decoding, bit for bit."""
    addresses = [Address(TESTED, base_url, api_key)]
    reference_file = None
    if reference is not None and reference.startswith(("http://", "https://")):
        addresses.append(Address(REFERENCE, reference, reference_api_key or api_key))
    elif reference is not None:
        reference_file = Path(reference)
    addresses += [_extra(text, api_key) for text in server or []]
    inputs = session.Inputs(
        addresses,
        Settings(
            suite.value,
            _names(arms),
            repeats,
            max_new_tokens,
            prompts,
            num_prompts,
            seed,
            long_repeats=long_repeats,
            max_prompt_tokens=max_prompt_tokens,
        ),
        RunOptions(reconnect_timeout, restart_command, restart_timeout),
        _output(output_file, resume, "verify"),
        command_line(sys.argv),
        reference_file,
        resume,
        vocab_size,
        skip_tokenizer_init,
        request_timeout,
    )
    _check_pages(
        {"--html": html, "--json": json_file, "--submit-row": submit_row},
        {
            "--output-file": inputs.output,
            "--reference": reference_file,
            "--prompts": prompts,
        },
    )
    run = _run(session.verify(inputs, _display))
    finish(run, output_format is OutputFormat.json, json_file, html, submit_row)


@guarded
def record(
    base_url: BaseUrl,
    suite: SuiteOption = Suite.standard,
    arms: ArmsOption = "",
    max_prompt_tokens: MaxPromptTokens = None,
    prompts: PromptsOption = None,
    num_prompts: NumPrompts = None,
    max_new_tokens: MaxNewTokens = None,
    seed: Seed = 20261,
    api_key: ApiKey = None,
    vocab_size: VocabSize = None,
    skip_tokenizer_init: SkipTokenizer = False,
    request_timeout: Timeout = 1800.0,
    reconnect_timeout: Reconnect = 120.0,
    output_file: OutputFile = None,
    resume: Resume = False,
) -> None:
    """Record a plain server's answers, for verify --reference FILE."""
    inputs = session.Inputs(
        [Address(TESTED, base_url, api_key), Address(REFERENCE, base_url, api_key)],
        Settings(
            suite.value,
            _names(arms),
            tokens=max_new_tokens,
            prompts=prompts,
            num_prompts=num_prompts,
            seed=seed,
            max_prompt_tokens=max_prompt_tokens,
        ),
        RunOptions(reconnect_timeout),
        _output(output_file, resume, "reference"),
        command_line(sys.argv),
        resume=resume,
        vocab_size=vocab_size,
        by_ids=skip_tokenizer_init,
        timeout=request_timeout,
    )
    problems = _run(session.record_reference(inputs, _display))
    Forgiving(sys.stdout).write(f"recorded in {inputs.output}\n")
    for line in problems:
        tell(f"not recorded: {line}")
    raise typer.Exit(COULD_NOT_RUN if problems else 0)


@guarded
def report(
    record_file: Annotated[Path, typer.Argument(help="A record written by verify.")],
    html: Html = None,
    json_file: JsonFile = None,
    submit_row: SubmitRow = None,
    output_format: Format = OutputFormat.text,
) -> None:
    """Show a record again, as text, JSON or a page."""
    pages = {"--html": html, "--json": json_file, "--submit-row": submit_row}
    _check_pages(pages, {"the record": record_file})
    try:
        run = session.load_run(record_file)
    except (RecordError, ValueError) as error:
        cannot(str(error))
    except Exception as error:
        # A record that was changed by hand may fail anywhere.
        cannot(f"{record_file}: unexpected {type(error).__name__}: {error}")
    finish(run, output_format is OutputFormat.json, json_file, html, submit_row)


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


def _check_pages(
    pages: dict[str, Path | None], measured: dict[str, Path | None]
) -> None:
    try:
        check_pages(pages, measured)
    except WouldBeLost as error:
        cannot(str(error))


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
