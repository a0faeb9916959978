# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact verify`, `record` and `report`.

Exit status: 0 verified, 1 divergence, 2 could not run or not exercised, 130
interrupted. The result goes to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Coroutine
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console

from sglang_exact.verify import report as reporting
from sglang_exact.verify import session, summary
from sglang_exact.verify.arms import EXTRA_ROLES, REFERENCE, TESTED
from sglang_exact.verify.client import Failed, redact_url
from sglang_exact.verify.console import Bar
from sglang_exact.verify.fleet import Address
from sglang_exact.verify.plan import Settings
from sglang_exact.verify.record import RecordError, RecordLost
from sglang_exact.verify.runner import Options

COULD_NOT_RUN = 2
INTERRUPTED = 130
SECRETS = ("--api-key", "--reference-api-key")
T = TypeVar("T")


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
Timeout = Annotated[
    float, typer.Option("--request-timeout", help="Seconds for one answer.")
]
Reconnect = Annotated[
    float,
    typer.Option("--reconnect-timeout", help="Seconds to wait for a lost server."),
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
    int, typer.Option("--repeats", min=1, help="Requests of the repeats arm.")
]
LongRepeats = Annotated[
    int, typer.Option("--long-repeats", min=1, help="Requests of the long-repeat arm.")
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
    typer.Option("--restart-timeout", help="Seconds until it answers again."),
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
        key = reference_api_key or api_key
        addresses.append(Address(REFERENCE, reference, key))
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
        Options(reconnect_timeout, restart_command, restart_timeout),
        _output(output_file, resume, "verify"),
        command_line(sys.argv),
        reference_file,
        resume,
        vocab_size,
        skip_tokenizer_init,
        request_timeout,
    )
    run = _run(session.verify(inputs, _display))
    _finish(run, output_format, json_file, html, submit_row)


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
        Options(reconnect_timeout),
        _output(output_file, resume, "reference"),
        command_line(sys.argv),
        resume=resume,
        vocab_size=vocab_size,
        by_ids=skip_tokenizer_init,
        timeout=request_timeout,
    )
    problems = _run(session.record_reference(inputs, _display))
    typer.echo(f"recorded in {inputs.output}")
    for line in problems:
        typer.echo(f"not recorded: {line}", err=True)
    raise typer.Exit(COULD_NOT_RUN if problems else 0)


def report(
    record_file: Annotated[Path, typer.Argument(help="A record written by verify.")],
    html: Html = None,
    json_file: JsonFile = None,
    submit_row: SubmitRow = None,
    output_format: Format = OutputFormat.text,
) -> None:
    """Show a record again, as text, JSON or a page."""
    try:
        run = session.load_run(record_file)
        _finish(run, output_format, json_file, html, submit_row)
    except (typer.Exit, KeyboardInterrupt):
        raise
    except (RecordError, ValueError) as error:
        _cannot(str(error))
    except Exception as error:
        # A record that was changed by hand may fail anywhere.
        _cannot(f"{record_file}: unexpected {type(error).__name__}: {error}")


def add(app: typer.Typer) -> None:
    """Register the three commands of this module."""
    app.command("verify")(verify)
    app.command("record")(record)
    app.command("report")(report)


def command_line(argv: list[str]) -> str:
    """The command as it may be written down: no API key, no password in a URL."""
    shown, hide = [Path(argv[0]).name if argv else ""], False
    for word in argv[1:]:
        name, equals, value = word.partition("=")
        if hide:
            shown.append("***")
        elif name in SECRETS and equals:
            shown.append(f"{name}=***")
        elif "://" in value and "@" in value:
            shown.append(f"{name}={redact_url(value)}")
        elif "://" in word and "@" in word:
            shown.append(redact_url(word))
        else:
            shown.append(word)
        hide = not hide and word in SECRETS
    return shlex.join(shown)


def _extra(text: str, key: str | None) -> Address:
    role, _, url = text.partition("=")
    if role not in EXTRA_ROLES or not url:
        _cannot(
            f"--server {role!r}: expected ROLE=URL with ROLE one of "
            f"{', '.join(EXTRA_ROLES)}"
        )
    return Address(role, url, key)


def _output(path: Path | None, resume: bool, kind: str) -> Path:
    """The record's path; the default carries the time, so no record is lost."""
    if path is not None:
        if not resume and path.is_file() and path.stat().st_size:
            _cannot(
                f"--output-file {path}: exists; pass --resume to go on with it, or "
                "another name"
            )
        return path
    if resume:
        _cannot("--resume: expected --output-file with the record to go on with")
    stamp = session.now().replace("-", "").replace(":", "").partition("+")[0]
    # Two runs may start in the same second.
    return Path(f"sglang-exact-{kind}-{stamp}Z-{os.getpid()}.jsonl")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _display(total: int) -> Bar:
    return Bar(Console(stderr=True), total)


def _cannot(text: str) -> NoReturn:
    typer.echo(f"sglang-exact cannot run this: {text}", err=True)
    raise typer.Exit(COULD_NOT_RUN)


async def _stoppable(work: Coroutine[Any, Any, T]) -> T:
    """Let SIGTERM end a run as Ctrl-C does: with its partial result."""
    task = asyncio.current_task()
    if task is not None and sys.platform != "win32":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(_stoppable(work))
    except (KeyboardInterrupt, asyncio.CancelledError):
        typer.echo("interrupted; the record keeps what was answered", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except (Failed, RecordLost, ValueError, OSError) as error:
        _cannot(str(error))
    except Exception as error:
        # Whatever a server may have caused, the user gets one line and status 2.
        _cannot(f"unexpected {type(error).__name__}: {error}")


def _finish(
    run: summary.Run,
    output_format: OutputFormat,
    json_file: Path | None,
    html: Path | None,
    submit_row: Path | None,
) -> None:
    status = summary.EXIT[summary.verdict(run)]
    if output_format is OutputFormat.json:
        sys.stdout.buffer.write(reporting.json_bytes(summary.to_json(run)))
        sys.stdout.buffer.flush()
    else:
        reporting.print_result(run, Console(highlight=False, soft_wrap=True))
        typer.echo(f"record: {run.header.get('record')}")
        typer.echo(f"command: {run.header.get('command')}")
    try:
        reporting.write_files(
            run, json_file=json_file, html_file=html, row_file=submit_row
        )
    except OSError as error:
        text = f"sglang-exact: the report cannot be written: {error}"
        typer.echo(text, err=True)
        status = status or COULD_NOT_RUN
    raise typer.Exit(status)
