# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact bench`: the usual tables of speed and acceptance, with exactness."""

from __future__ import annotations

import typer

from sglang_exact.bench.report.command import report
from sglang_exact.bench.verbs import VERBS

bench = typer.Typer(
    name="bench",
    help="Measure speed, acceptance and exactness of running servers.",
    no_args_is_help=True,
)
for verb in VERBS:
    bench.command(verb.name)(verb.command)
bench.command("report")(report)
