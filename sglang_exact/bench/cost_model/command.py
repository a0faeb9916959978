# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact bench cost-model`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_exact.bench import command as shared
from sglang_exact.bench.cost_model import inputs
from sglang_exact.bench.cost_model import model as modelling
from sglang_exact.bench.cost_model import tables as showing
from sglang_exact.bench.drive import CannotRun


@shared.measures(
    "cost-model", showing.tables, plot=showing.plot, without=shared.SERVERS
)
async def cost_model(
    job: shared.Job,
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
) -> list[str]:
    """Predict speed over acceptance length and draft width from measured steps."""
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
    run = job.run
    run.notes += [*model.notes, *([why] if why else [])]
    run.settings = showing.settings(model, name, limit)
    run.settings["runs"] = {one.name: one.sha256 for one in loaded}
    run.provenance = loaded[0].run.provenance
    lengths = _numbers(acceptances, 1)
    asked = sorted({int(width) for width in _numbers(widths, 2)})
    run.rows = showing.rows(model, asked, lengths, limit, checked)
    job.output.record(run)
    return []


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
