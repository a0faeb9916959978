# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact bench accept`."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer

from sglang_exact.bench import command as shared
from sglang_exact.bench import datasets as data
from sglang_exact.bench import provenance, servers
from sglang_exact.bench.accept import measure as measuring
from sglang_exact.bench.accept import published
from sglang_exact.bench.accept import tables as accept_table
from sglang_exact.bench.accept.answers import AnswerFile
from sglang_exact.bench.run import BenchRun, Output
from sglang_exact.bench.run import resume as resumed
from sglang_exact.view.output import check_pages

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
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Add to --output-file what it lacks, also other servers."
    ),
]
Markdown = Annotated[
    Path | None, typer.Option("--markdown", help="Write the tables here.")
]


def accept(
    server: shared.Servers = None,
    plain: shared.Plain = None,
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
    api_key: shared.ApiKey = None,
    label: shared.Label = "",
    note: shared.Notes = None,
    request_timeout: shared.Timeout = 1800.0,
    output_file: shared.OutputFile = None,
    resume: Resume = False,
    markdown: Markdown = None,
) -> None:
    """Speed-up and acceptance length on GSM8K, MATH-500, HumanEval, MBPP, MT-Bench."""
    path = shared.output_path(output_file, "accept")
    kept_answers = path.with_suffix(".plain.jsonl")
    output = Output(path, [kept_answers], resume)
    run = BenchRun("accept", label, list(note or []), command=shared.command())

    async def work() -> list[str]:
        check_pages({"--markdown": markdown}, {"--output-file": path})
        figures = published.load(published_file) if published_file else published.CARD
        addresses = servers.parse(server or [], api_key)
        kept = output.earlier()
        known = [address.name for address in addresses]
        known += [row["server"] for row in kept.rows] if kept is not None else []
        base = servers.choose_plain(known, plain)
        flights = shared.numbers(concurrency, "--concurrency")
        chosen = shared.names(dataset)
        found, missing = data.find_all(
            chosen,
            data.parse_paths(dataset_path or [], chosen),
            hub=hub,
            say=shared.say,
        )
        for text in missing:
            shared.say(f"not measured: {text}")
        if not found:
            raise data.DataError("found none of the data sets that were asked for")
        plan = measuring.Plan(
            found,
            flights,
            num_prompts,
            max_new_tokens,
            enable_thinking,
            logprobs,
            ignore_eos,
        )
        run.settings = {**plan.settings(), "plain": base}
        run.notes += [f"not measured: {text}" for text in missing]
        run.notes += measuring.repeats(plan)
        async with AsyncExitStack() as stack:
            opened = await servers.open_all(stack, addresses, timeout=request_timeout)
            run.notes += servers.setup_notes(opened)
            run.provenance = provenance.collect([s.facts for s in opened])
            measuring.check(opened, base, plan)
            lost = []
            if kept is not None:
                resumed(kept, run, path)
                lost = measuring.failures(run.rows)
            answers = AnswerFile(kept_answers)
            recorder = output.record(run)
            names = [served.name for served in opened]
            with shared.bar(measuring.left_over(run.rows, plan, names)) as display:
                problems = lost + await measuring.measure(
                    opened, base, plan, recorder, answers, display
                )
        if not problems and not missing:
            recorder.finish()
        shown = accept_table.tables(run, figures)
        shared.show([*shown, published.table()], path, markdown)
        return missing + problems

    shared.leave(shared.execute(work(), output.held), path)
