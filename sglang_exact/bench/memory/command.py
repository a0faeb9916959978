# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact bench memory`."""

from __future__ import annotations

from contextlib import AsyncExitStack
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
    Servers,
    Timeout,
)
from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.memory import measure as measuring
from sglang_exact.bench.memory.measure import Device, NoNvml
from sglang_exact.bench.memory.tables import tables
from sglang_exact.bench.run import BenchRun, Output, check_same_place
from sglang_exact.bench.servers import Served
from sglang_exact.view.output import check_pages


def memory(
    server: Servers = None,
    plain: Plain = None,
    gpu_index: Annotated[
        int | None,
        typer.Option("--gpu-index", min=0, help="The servers' GPU, if several."),
    ] = None,
    api_key: ApiKey = None,
    request_timeout: Timeout = 120.0,
    label: Label = "",
    note: Notes = None,
    output_file: OutputFile = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Add a server to --output-file."),
    ] = False,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Write the table here.")
    ] = None,
) -> None:
    """Weights, KV cache, graphs, and what a drafter takes.

    On one GPU, measure one server at a time and add the other with --resume: NVML does
    not say whose memory it is.
    """
    path = shared.output_path(output_file, "memory")
    output = Output(path, resume=resume)

    async def work() -> list[str]:
        check_pages({"--markdown": markdown}, {"--output-file": path})
        addresses = servers.parse(server or [], api_key)
        kept = output.earlier()
        if kept is not None and kept.verb != "memory":
            raise CannotRun(
                f"--resume: found a {kept.verb} record in {path}; expected memory"
            )
        known = [a.name for a in addresses]
        known += [row["server"] for row in kept.rows] if kept else []
        base = servers.choose_plain(known, plain)
        async with AsyncExitStack() as stack:
            found = await servers.open_all(stack, addresses, timeout=request_timeout)
            for one in found:
                if one.name == base:
                    servers.check_plain(one)
            run, problems = await _measure(
                found, base, kept, gpu_index, label, note or [], output
            )
        shared.show(tables(run), path, markdown)
        return problems

    shared.leave(shared.execute(work(), output.held), path)


async def _measure(
    found: list[Served],
    base: str | None,
    kept: BenchRun | None,
    gpu_index: int | None,
    label: str,
    notes: list[str],
    output: Output,
) -> tuple[BenchRun, list[str]]:
    gpu, why = _gpu(found, gpu_index)
    run = kept or BenchRun(
        verb="memory",
        label=label,
        command=shared.command(),
        settings={"unit": "GiB"},
    )
    names = {one.name for one in found}
    run.complete = False
    facts = provenance.collect([one.facts for one in found])
    check_same_place(run, facts, output.path, names)
    # What an earlier call measured stays, with its set-up, until it is measured anew.
    measured = {row["server"] for row in run.rows}
    before = [s for s in run.provenance.get("servers", []) if s["name"] in measured]
    run.provenance = {**facts, "servers": before}
    recorder = output.record(run)
    for text in [*notes, *servers.setup_notes(found), *([why] if why else [])]:
        recorder.note(text)
    problems = []
    for one in found:
        try:
            usage = await measuring.usage(one)
        except CannotRun as error:
            problems.append(str(error))
            continue
        known = run.provenance["servers"]
        known[:] = [*(s for s in known if s["name"] != one.name), one.facts]
        recorder.add(measuring.row(one, usage, one.name == base, gpu), "server")
    if not problems:
        recorder.finish()
    return run, problems


def _gpu(found: list[Served], index: int | None) -> tuple[Device | None, str]:
    """The GPU, where its use is one server's alone, else why it is not known."""
    if len(found) > 1:
        return None, (
            "NVML is left out: with several servers at once it does not say whose "
            "memory it is; measure one after the other with --resume"
        )
    if not measuring.is_local(found[0].client.url):
        return None, "NVML is left out: the server is on another machine"
    try:
        return measuring.device(index), ""
    except NoNvml as error:
        return None, f"NVML is left out: {error}"
