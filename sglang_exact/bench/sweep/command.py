# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact bench sweep`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sglang_exact.bench import command as shared
from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.sweep import aiperf
from sglang_exact.bench.sweep import measure as sweeping
from sglang_exact.bench.sweep import tables as sweep_table


class Endpoint(StrEnum):
    """Which of the server's OpenAI endpoints is asked."""

    completions = "completions"
    chat = "chat"


@shared.measures(
    "sweep",
    sweep_table.tables,
    plot=sweep_table.plot,
    beside=".aiperf",
    resumes=True,
)
async def sweep(
    job: shared.Job,
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
    seed: shared.Seed = sweeping.SEED,
) -> list[str]:
    """Speed over context length at ISL = OSL, through aiperf."""
    program = aiperf.executable(aiperf_path)
    await aiperf.version(program)
    shapes = sweeping.shapes(
        _ints(lengths, "--lengths"),
        _ints(requests, "--requests"),
        _ints(warmups, "--warmups"),
    )
    plan = sweeping.Plan(
        shapes,
        program,
        job.beside.absolute(),
        tokenizer,
        endpoint.value,
        seed,
        job.base,
    )
    found = await job.open()
    # Before the record is written: a load that no server can take makes none.
    sweeping.check(plan, found)
    recorder = job.begin(found, plan.settings(), {"prompts": seed})
    key = job.given.api_key
    await sweeping.measure(plan, found, recorder, key=key, say=shared.say)
    return sweeping.failures(job.run.rows)


def _ints(text: str, option: str) -> list[int]:
    # As given, not each once: two lengths may have the same number of requests.
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise CannotRun(f"found {option} {text!r}; expected numbers such as 30,10,5,3")
    return [int(part) for part in parts]
