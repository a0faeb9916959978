# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact bench accept`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_exact.bench import command as shared
from sglang_exact.bench import datasets as data
from sglang_exact.bench.accept import measure as measuring
from sglang_exact.bench.accept import published
from sglang_exact.bench.accept import tables as accept_table
from sglang_exact.bench.accept.answers import AnswerFile

ALL = ",".join(data.KNOWN)
Datasets = Annotated[
    str, typer.Option("--dataset", help="Sets by name, separated by commas.")
]
Paths = Annotated[
    list[str] | None,
    typer.Option("--dataset-path", help="NAME=FILE: JSON lines, or a wheel."),
]
HubAllowed = Annotated[
    bool, typer.Option("--hub/--no-hub", help="Ask the hub for sets not found here.")
]
Concurrency = Annotated[
    str, typer.Option("--concurrency", help="Requests in flight, by commas.")
]
NumPrompts = Annotated[
    int, typer.Option("--num-prompts", min=1, help="Timed prompts of every set.")
]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", min=2, help="Tokens of an answer, at most.")
]
Thinking = Annotated[
    bool,
    typer.Option("--enable-thinking/--no-enable-thinking", help="Template's switch."),
]
Logprobs = Annotated[
    bool, typer.Option("--logprobs", help="Compare chosen logprobs as well.")
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Answers of full length.")
]
Published = Annotated[
    Path | None, typer.Option("--published", help="A card's figures (JSON).")
]


@shared.measures("accept", accept_table.tables, beside=".plain.jsonl", resumes=True)
async def accept(
    job: shared.Job,
    dataset: Datasets = ALL,
    dataset_path: Paths = None,
    hub: HubAllowed = True,
    concurrency: Concurrency = "1,8,32",
    num_prompts: NumPrompts = 128,
    max_new_tokens: MaxNewTokens = 2048,
    enable_thinking: Thinking = False,
    logprobs: Logprobs = False,
    ignore_eos: IgnoreEos = False,
    published_file: Published = None,
) -> list[str]:
    """Speed-up and acceptance length on GSM8K, MATH-500, HumanEval, MBPP, MT-Bench."""
    figures = published.load(published_file) if published_file else ()
    job.tables = lambda run: [*accept_table.tables(run, figures), published.table()]
    flights = shared.numbers(concurrency, "--concurrency")
    chosen = shared.names(dataset)
    paths = data.parse_paths(dataset_path or [], chosen)
    sets, missing = data.find_all(chosen, paths, hub=hub, say=shared.say)
    for text in missing:
        shared.say(f"not measured: {text}")
    if not sets:
        raise data.DataError("found none of the data sets that were asked for")
    plan = measuring.Plan(
        sets,
        flights,
        num_prompts,
        max_new_tokens,
        enable_thinking,
        logprobs,
        ignore_eos,
    )
    job.run.notes += [f"not measured: {text}" for text in missing]
    job.run.notes += measuring.repeats(plan)
    found = await job.open()
    measuring.check(found, plan)
    recorder = job.begin(found, plan.settings())
    lost = measuring.failures(job.run.rows)
    answers = AnswerFile(job.beside)
    names = [served.name for served in found]
    with shared.bar(measuring.left_over(job.run.rows, plan, names)) as display:
        problems = await measuring.measure(
            found, job.base, plan, recorder, answers, display
        )
    return missing + lost + problems
