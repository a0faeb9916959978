# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact bench report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_exact.bench import command as shared
from sglang_exact.bench import runs as report_runs
from sglang_exact.bench.report import build as reporting
from sglang_exact.view.output import WouldBeLost, check_pages, now, write_atomic


def report(
    run_files: Annotated[
        list[Path], typer.Argument(help="Records of any bench commands.")
    ],
    html: Annotated[
        Path, typer.Option("--html", help="The page; one file, opens offline.")
    ] = Path("sglang-exact-bench.html"),
    markdown: Annotated[
        Path, typer.Option("--markdown", help="The same as Markdown.")
    ] = Path("sglang-exact-bench.md"),
) -> None:
    """One page and one Markdown file from any set of records.

    Records of different set-ups keep tables of their own. A file that cannot be read is
    named, the others are reported; the status is 2 then.
    """
    pages = {"--html": html, "--markdown": markdown}
    try:
        check_pages(pages, {str(path): path for path in run_files})
    except WouldBeLost as error:
        shared.cannot(str(error))
    found, problems = report_runs.load_all(run_files)
    if not found:
        shared.cannot(f"{'; '.join(problems)}; expected at least one record")
    made = reporting.build(found, problems, now())
    try:
        write_atomic(html, reporting.html(made).encode())
        write_atomic(markdown, reporting.markdown(made).encode())
    except OSError as error:
        shared.cannot(f"the report cannot be written: {error}")
    for text in made.problems:
        typer.echo(text, err=True)
    for number, lines in made.differences.items():
        typer.echo(
            f"set-up {number} differs from set-up 1: {'; '.join(lines)}", err=True
        )
    typer.echo(f"page: {html}")
    typer.echo(f"Markdown: {markdown}")
    raise typer.Exit(shared.COULD_NOT_RUN if made.problems else 0)
