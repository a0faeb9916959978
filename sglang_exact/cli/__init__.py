# SPDX-License-Identifier: Apache-2.0
"""The `sglang-exact` command.

A command is the function of its own name in the module that COMMANDS gives, or a
typer.Typer there for a command with commands. Heavy imports stay inside: none needs
torch, SGLang or a GPU to start.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Collection

import typer

COMMANDS = {
    "doctor": "sglang_exact.cli.doctor",
    "env": "sglang_exact.cli.env",
    "warm": "sglang_exact.cli.warm",
    "verify": "sglang_exact.verify.command",
    "record": "sglang_exact.verify.command",
    "report": "sglang_exact.verify.command",
    "bench": "sglang_exact.cli.bench",
}
"""Command -> the module that holds it."""


def application(names: Collection[str] = COMMANDS) -> typer.Typer:
    """The command line with those of the named commands that are installed."""
    app = typer.Typer(
        name="sglang-exact",
        help="Speculative decoding on SGLang with the bits of plain decoding.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name in names:
        path = COMMANDS[name]
        if importlib.util.find_spec(path) is None:
            continue
        command = getattr(importlib.import_module(path), name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def main() -> None:
    """Entry point of `sglang-exact`; leaves with the command's exit status."""
    # doctor has to run where another command's packages are missing.
    asked = sys.argv[1:2]
    everything = not asked or asked[0] not in COMMANDS
    try:
        app = application() if everything else application([*asked, "doctor", "env"])
        app()
    except KeyboardInterrupt:
        sys.exit(130)
