# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact bench cost-model`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_exact.bench import command as shared
from sglang_exact.bench.command import Label, Notes, OutputFile
from sglang_exact.bench.cost_model import inputs
from sglang_exact.bench.cost_model import model as modelling
from sglang_exact.bench.cost_model import tables as showing
from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.run import BenchRun, Output
from sglang_exact.view.output import check_pages


def cost_model(
    run_files: Annotated[
        list[Path],
        typer.Argument(help="leaderboard, decode-table, accept and memory records."),
    ],
    use: Annotated[
        list[str] | None,
        typer.Option("--use", help="Server or configuration; repeat for more."),
    ] = None,
    load: Annotated[
        str | None,
        typer.Option("--load", help="Prompt or data set; default: most widths."),
    ] = None,
    in_flight: Annotated[
        int, typer.Option("--in-flight", min=1, help="Requests at once.")
    ] = 1,
    widths: Annotated[
        str, typer.Option("--widths", help="Tokens per verify step to predict for.")
    ] = ",".join(map(str, showing.WIDTHS)),
    acceptances: Annotated[
        str, typer.Option("--acceptances", help="Acceptance lengths to predict for.")
    ] = "1,2,3,4,5,6,7,8,10,12,14,16",
    bandwidth: Annotated[
        float | None,
        typer.Option("--bandwidth", min=0.001, help="Memory, 1e9 B/s; default: NVML."),
    ] = None,
    weight_gib: Annotated[
        float | None,
        typer.Option("--weight-gib", min=0.001, help="Default: of a memory record."),
    ] = None,
    gpu_index: Annotated[
        int | None, typer.Option("--gpu-index", min=0, help="GPU that NVML describes.")
    ] = None,
    check: Annotated[
        list[Path] | None,
        typer.Option("--check", help="Record to check predictions against."),
    ] = None,
    label: Label = "",
    note: Notes = None,
    output_file: OutputFile = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw into this file, .svg or .png.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Write the tables here.")
    ] = None,
) -> None:
    """Predict speed over acceptance length and draft width from measured steps."""
    path = shared.output_path(output_file, "cost-model")
    output = Output(path)

    async def work() -> list[str]:
        pages = {"--markdown": markdown, "--plot": plot}
        check_pages(pages, {"--output-file": path})
        output.earlier()
        loaded = inputs.read(run_files)
        inputs.check_setups(loaded)
        name, steps = inputs.choose(
            inputs.steps(loaded), servers=use or [], load=load, in_flight=in_flight
        )
        model = modelling.Model(steps)
        limit, why = inputs.limit(loaded, bandwidth, weight_gib, gpu_index)
        checks = inputs.read(check or [])
        inputs.check_setups([*loaded, *checks])
        others = [f.step for f in inputs.steps(checks)]
        checked = modelling.checks_against(model, others)
        if check and not checked:
            raise CannotRun(
                f"--check: found no steps with drafts at {in_flight} in flight; "
                "expected a leaderboard, decode-table or accept record"
            )
        run = BenchRun(
            verb="cost-model",
            label=label,
            notes=[*(note or []), *model.notes, *([why] if why else [])],
            command=shared.command(),
            settings=showing.settings(model, name, limit)
            | {"runs": {one.name: one.sha256 for one in loaded}},
            provenance=loaded[0].run.provenance,
            rows=showing.rows(
                model,
                sorted({int(w) for w in _numbers(widths, 2)}),
                _numbers(acceptances, 1),
                limit,
                checked,
            ),
        )
        output.record(run).finish()
        shared.show(showing.tables(run), path, markdown)
        return shared.draw(lambda: showing.plot(run, plot)) if plot is not None else []

    shared.leave(shared.execute(work(), output.held), path)


def _numbers(text: str, least: float) -> list[float]:
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise CannotRun(
            f"found {text!r}; expected numbers from {least:g} on, separated by commas"
        )
    return found
