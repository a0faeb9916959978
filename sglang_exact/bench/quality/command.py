# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact bench quality`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_exact.bench import command as shared
from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.quality import measure as grading
from sglang_exact.bench.quality.grading import Grader, GraderMissing
from sglang_exact.bench.quality.tables import tables


@shared.measures("quality", tables, beside=".answers.jsonl")
async def quality(
    job: shared.Job,
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
) -> list[str]:
    """Grade the same problems on every server, problem by problem."""
    try:
        grader = Grader()
    except GraderMissing as error:
        raise CannotRun(str(error)) from error
    problems = grading.load(dataset_path, num_prompts, hub=hub)
    plan = grading.Plan(problems, max_new_tokens, concurrency, thinking, job.base)
    job.stack.enter_context(grader)
    found = await job.open(grading.Writer)
    grading.check(plan, found)
    recorder = job.begin(found, plan.settings(grader.version))
    count = len(problems.problems)
    with shared.bar(count * len(found)) as bar:
        await grading.measure(
            plan,
            found,
            recorder,
            grader,
            job.beside,
            begin=lambda text: bar.begin(text, count),
            done=lambda: bar.advance(1),
        )
    return [
        f"{row['server']}, {row['problem']}: {row['why']}"
        for row in job.run.rows
        if row["finish"] == "failed"
    ]
