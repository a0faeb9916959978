# SPDX-License-Identifier: Apache-2.0
"""How `verify`, `record` and `report` speak and leave.

Exit status 1 means "divergence" and nothing else: a terminal that went away, a full
disk behind stdout or an error in the report must not end in it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TextIO

import typer
from rich.console import Console

from sglang_exact.client.http import redact_url
from sglang_exact.verify import report as reporting
from sglang_exact.verify import summary
from sglang_exact.view.output import json_bytes

COULD_NOT_RUN = 2
INTERRUPTED = 130
SECRETS = ("--api-key", "--reference-api-key")
KEY_VARIABLE = "SGLANG_API_KEY"
# A shorter key is a part of half the words there are.
SHORTEST = 4
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"]+")
_KEY = re.compile(rf"((?:--[\w-]*api-key|{KEY_VARIABLE})[= ]+)[^\s'\"]+")
P = ParamSpec("P")


class Forgiving:
    """A text file that goes silent instead of failing: progress stops no run."""

    def __init__(self, file: TextIO | None):
        self._file = file

    def write(self, text: str) -> int:
        """Write if that is still possible."""
        try:
            if self._file is not None:
                self._file.write(text)
        except (OSError, ValueError):
            silence(self._file)
            self._file = None
        return len(text)

    def flush(self) -> None:
        """Flush if that is still possible."""
        try:
            if self._file is not None:
                self._file.flush()
        except (OSError, ValueError):
            silence(self._file)
            self._file = None

    @property
    def encoding(self) -> str:
        """As the file's, so that a bar has no characters that it lacks."""
        return getattr(self._file, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Is a terminal behind it?"""
        return self._file is not None and self._file.isatty()

    def fileno(self) -> int:
        """The file's number. Raises OSError where there is none."""
        if self._file is None:
            raise OSError("there is no file")
        return self._file.fileno()


class ResultConsole(Console):
    """A console whose broken pipe is an error and not the end of the process."""

    def on_broken_pipe(self) -> None:
        """Instead of leaving with status 1."""
        raise OSError("the reader of the result has gone")


def silence(file: TextIO | None) -> None:
    """Let what is still in a file's buffer go nowhere, or Python's own end fails."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, file.fileno())  # type: ignore[union-attr]
        os.close(null)


def tell(text: str) -> None:
    """A line on stderr, if there is one."""
    file = Forgiving(sys.stderr)
    file.write(text + "\n")
    file.flush()


def cannot(text: str) -> NoReturn:
    """Leave with status 2 and the reason."""
    tell(f"sglang-exact cannot run this: {text}")
    raise typer.Exit(COULD_NOT_RUN)


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """A command that leaves with one of its own statuses, whatever happens in it."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            tell("interrupted; the record keeps what was answered")
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as error:
            cannot(f"unexpected {type(error).__name__}: {error}")

    return run


def command_line(argv: list[str]) -> str:
    """The command as it may be written down: no API key, no password in a URL."""
    keys = {os.environ.get(KEY_VARIABLE, "")}
    keys |= {b for a, b in zip(argv, argv[1:], strict=False) if a in SECRETS}
    keys |= {b for a, _, b in (w.partition("=") for w in argv) if a in SECRETS}
    shown = [Path(argv[0]).name if argv else ""]
    for before, word in zip(argv, argv[1:], strict=False):
        name, equals, _ = word.partition("=")
        if before in SECRETS:
            word = "***"
        elif name in SECRETS and equals:
            word = f"{name}=***"
        else:
            # Also inside a restart command.
            for key in sorted(keys, key=len, reverse=True):
                word = word.replace(key, "***") if len(key) >= SHORTEST else word
        word = _ADDRESS.sub(lambda found: redact_url(found[0]), word)
        shown.append(_KEY.sub(r"\1***", word))
    return shlex.join(shown)


def show(run: summary.Run, as_json: bool) -> None:
    """The result on stdout. Raises OSError where it cannot be written."""
    if sys.stdout is None:
        return
    if as_json:
        sys.stdout.buffer.write(json_bytes(summary.to_json(run)))
    else:
        # Characters that the terminal's encoding lacks.
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")
        console = ResultConsole(highlight=False, soft_wrap=True)
        reporting.print_result(run, console)
        for key in ("record", "command"):
            console.print(f"{key}: {run.header.get(key)}", markup=False)
    sys.stdout.flush()


def finish(
    run: summary.Run,
    as_json: bool,
    json_file: Path | None,
    html: Path | None,
    submit_row: Path | None,
) -> NoReturn:
    """Show and write the result, and leave with its status.

    What cannot be shown or written is no longer status 0; a divergence stays 1.
    """
    status = summary.EXIT[summary.verdict(run)]
    steps: tuple[Callable[[], Any], ...] = (
        lambda: show(run, as_json),
        lambda: reporting.write_files(
            run, json_file=json_file, html_file=html, row_file=submit_row
        ),
    )
    for step in steps:
        try:
            step()
        except Exception as error:
            silence(sys.stdout if step is steps[0] else None)
            kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
            tell(f"sglang-exact: the report cannot be written: {kind}{error}")
            status = status or COULD_NOT_RUN
    raise typer.Exit(status)
