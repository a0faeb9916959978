# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact bench quality`."""

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
from sglang_exact.bench.quality import measure as grading
from sglang_exact.bench.quality.grading import Grader, GraderMissing
from sglang_exact.bench.quality.tables import tables
from sglang_exact.bench.run import BenchRun, Output
from sglang_exact.bench.servers import Address, Served
from sglang_exact.view.output import check_pages


def quality(
    server: Servers = None,
    plain: Plain = None,
    dataset_path: Annotated[
        Path | None,
        typer.Option(
            "--dataset-path", help="JSONL with problem, answer, subject; else MATH-500."
        ),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option("--num-prompts", min=1, help="The first N problems.")
    ] = grading.DEFAULT_COUNT,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")
    ] = 4096,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Requests in flight.")
    ] = 8,
    thinking: Annotated[
        bool, typer.Option("--thinking/--no-thinking", help="Of the chat template.")
    ] = False,
    hub: Annotated[
        bool, typer.Option("--hub/--no-hub", help="Whether the hub may be asked.")
    ] = True,
    api_key: ApiKey = None,
    request_timeout: Timeout = 1800.0,
    label: Label = "",
    note: Notes = None,
    output_file: OutputFile = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Write the tables here.")
    ] = None,
) -> None:
    """Grade the same problems on every server, problem by problem."""
    path = shared.output_path(output_file, "quality")
    answers = path.with_suffix(".answers.jsonl")
    output = Output(path, [answers])

    async def work() -> list[str]:
        check_pages({"--markdown": markdown}, {"--output-file": path})
        output.earlier()
        addresses = servers.parse(server or [], api_key)
        base = servers.choose_plain([a.name for a in addresses], plain)
        try:
            grader = Grader()
        except GraderMissing as error:
            raise CannotRun(str(error)) from error
        problems = grading.load(dataset_path, num_prompts, hub=hub)
        plan = grading.Plan(problems, max_new_tokens, concurrency, thinking, base)
        async with AsyncExitStack() as stack:
            stack.enter_context(grader)
            found = await _open(stack, addresses, request_timeout)
            for one in found:
                if one.name == base:
                    servers.check_plain(one)
            grading.check(plan, found)
            run = BenchRun(
                verb="quality",
                label=label,
                notes=[*(note or []), *servers.setup_notes(found)],
                command=shared.command(),
                settings=plan.settings(grader.version),
                provenance=provenance.collect([one.facts for one in found]),
            )
            recorder = output.record(run)
            count = len(problems.problems)
            with shared.bar(count * len(found)) as bar:
                await grading.measure(
                    plan,
                    found,
                    recorder,
                    grader,
                    answers,
                    begin=lambda text: bar.begin(text, count),
                    done=lambda: bar.advance(1),
                )
        shared.show(tables(run), path, markdown)
        return [
            f"{row['server']}, {row['problem']}: {row['why']}"
            for row in run.rows
            if row["finish"] == "failed"
        ]

    shared.leave(shared.execute(work(), output.held), path)


async def _open(
    stack: AsyncExitStack, addresses: list[Address], timeout: float
) -> list[Served]:
    """The servers, each with a client that keeps texts."""
    found = await servers.open_all(stack, addresses, timeout=timeout)
    for one, address in zip(found, addresses, strict=True):
        writer = grading.Writer(address.url, key=address.key, timeout=timeout)
        await stack.enter_async_context(writer)
        one.client = writer
    return found
