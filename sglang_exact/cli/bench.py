# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact bench`: the usual tables of speed and acceptance, with exactness.

A command is the function of its own name (dashes as underscores) in the module
`bench_<name>` of this package; modules that are not there are left out.
"""

from __future__ import annotations

import importlib
import importlib.util

import typer

VERBS = (
    "accept",
    "leaderboard",
    "decode-table",
    "sweep",
    "quality",
    "memory",
    "cost-model",
    "report",
)


def _application() -> typer.Typer:
    app = typer.Typer(
        name="bench",
        help="Measure speed, acceptance and exactness of running servers.",
        no_args_is_help=True,
    )
    package = __name__.rpartition(".")[0]
    for verb in VERBS:
        name = verb.replace("-", "_")
        path = f"{package}.bench_{name}"
        if importlib.util.find_spec(path) is not None:
            app.command(verb)(getattr(importlib.import_module(path), name))
    return app


bench = _application()
