# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact bench memory`."""

from __future__ import annotations

from typing import Annotated

import typer

from sglang_exact.bench import command as shared
from sglang_exact.bench import provenance, servers
from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.memory import measure as measuring
from sglang_exact.bench.memory.measure import Device, NoNvml
from sglang_exact.bench.memory.tables import tables
from sglang_exact.bench.run import check_same_place
from sglang_exact.bench.servers import Served


@shared.measures("memory", tables, resumes=True, request_timeout=120.0)
async def memory(
    job: shared.Job,
    gpu_index: Annotated[
        int | None,
        typer.Option("--gpu-index", min=0, help="The servers' GPU, if several."),
    ] = None,
) -> list[str]:
    """Weights, KV cache, graphs, and what a drafter takes.

    On one GPU, measure one server at a time and add the other with --resume: NVML does
    not say whose memory it is.
    """
    found = await job.open()
    gpu, why = _gpu(found, gpu_index)
    notes = [*job.run.notes, *servers.setup_notes(found), *([why] if why else [])]
    job.run.settings = {"unit": "GiB"}
    run = job.run = job.kept or job.run
    run.complete = False
    facts = provenance.collect([one.facts for one in found])
    check_same_place(run, facts, job.path, {one.name for one in found})
    # What an earlier call measured stays, with its set-up, until it is measured anew.
    measured = {row["server"] for row in run.rows}
    before = [s for s in run.provenance.get("servers", []) if s["name"] in measured]
    run.provenance = {**facts, "servers": before}
    recorder = job.output.record(run)
    for text in notes:
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
        recorder.add(measuring.row(one, usage, one.name == job.base, gpu), "server")
    return problems


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
