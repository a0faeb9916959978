# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact bench sweep`."""

from __future__ import annotations

from contextlib import AsyncExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sglang_exact.bench import command as shared
from sglang_exact.bench import provenance, servers
from sglang_exact.bench.command import (
    ApiKey,
    Label,
    Notes,
    OutputFile,
    Plain,
    Seed,
    Servers,
    Timeout,
)
from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.run import BenchRun, Output
from sglang_exact.bench.run import resume as resumed
from sglang_exact.bench.sweep import aiperf
from sglang_exact.bench.sweep import measure as sweeping
from sglang_exact.bench.sweep import tables as sweep_table
from sglang_exact.view.output import check_pages


class Endpoint(StrEnum):
    """Which of the server's OpenAI endpoints is asked."""

    completions = "completions"
    chat = "chat"


def sweep(
    server: Servers = None,
    plain: Plain = None,
    aiperf_path: Annotated[
        Path | None,
        typer.Option("--aiperf", help="aiperf, or its environment; default: on PATH."),
    ] = None,
    lengths: Annotated[
        str, typer.Option("--lengths", help="ISL = OSL; default 512,4096,12288,36864.")
    ] = "",
    requests: Annotated[
        str, typer.Option("--requests", help="Per length; default 30,10,5,3.")
    ] = "",
    warmups: Annotated[
        str, typer.Option("--warmups", help="Per length; default 2,2,1,1.")
    ] = "",
    endpoint: Annotated[
        Endpoint,
        typer.Option("--endpoint-type", help="chat compares text, not token ids."),
    ] = Endpoint.completions,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", help="Folder or hub name; default: model path."),
    ] = None,
    seed: Seed = sweeping.SEED,
    api_key: ApiKey = None,
    request_timeout: Timeout = 1800.0,
    label: Label = "",
    note: Notes = None,
    output_file: OutputFile = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Add to --output-file what it lacks, also other servers."
        ),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw into this file, .svg or .png.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Write the table here.")
    ] = None,
) -> None:
    """Speed over context length at ISL = OSL, through aiperf."""
    path = shared.output_path(output_file, "sweep")
    artifacts = path.with_suffix(".aiperf").absolute()
    output = Output(path, [artifacts], resume)

    async def work() -> list[str]:
        check_pages({"--markdown": markdown, "--plot": plot}, {"--output-file": path})
        kept = output.earlier()
        program = aiperf.executable(aiperf_path)
        await aiperf.version(program)
        addresses = servers.parse(server or [], api_key)
        known = [a.name for a in addresses]
        if kept is not None:
            known += [row["server"] for row in kept.rows]
        plan = sweeping.Plan(
            sweeping.shapes(
                _ints(lengths, "--lengths"),
                _ints(requests, "--requests"),
                _ints(warmups, "--warmups"),
            ),
            program,
            artifacts,
            tokenizer,
            endpoint.value,
            seed,
            servers.choose_plain(known, plain),
        )
        async with AsyncExitStack() as stack:
            found = await servers.open_all(stack, addresses, timeout=request_timeout)
            for one in found:
                if one.name == plan.plain:
                    servers.check_plain(one)
            # Before the record is written: a load that no server can take makes none.
            sweeping.check(plan, found)
            run = _record(kept, plan, found, label, note or [], path)
            recorder = output.record(run)
            await sweeping.measure(
                plan,
                found,
                recorder,
                key=api_key,
                say=lambda t: typer.echo(t, err=True),
            )
        shared.show([sweep_table.table(run)], path, markdown)
        failed = sweeping.failures(run.rows)
        if plot is not None:
            failed += shared.draw(lambda: sweep_table.plot(run, plot))
        return failed

    shared.leave(shared.execute(work(), output.held), path)


def _record(
    kept: BenchRun | None,
    plan: sweeping.Plan,
    found: list[servers.Served],
    label: str,
    notes: list[str],
    output: Path,
) -> BenchRun:
    """A new record, or the one to go on with. Raises RunError if that one differs."""
    fresh = BenchRun(
        verb="sweep",
        label=label,
        notes=[*notes, *servers.setup_notes(found)],
        command=shared.command(),
        settings=plan.settings(),
        provenance=provenance.collect([s.facts for s in found], {"prompts": plan.seed}),
    )
    return fresh if kept is None else resumed(kept, fresh, output)


def _ints(text: str, option: str) -> list[int]:
    # As given, not each once: two lengths may have the same number of requests.
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise CannotRun(f"found {option} {text!r}; expected numbers such as 30,10,5,3")
    return [int(part) for part in parts]
