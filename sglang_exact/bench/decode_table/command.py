# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact bench decode-table`."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer

from sglang_exact.bench import command as shared
from sglang_exact.bench import provenance, servers
from sglang_exact.bench.decode_table import measure as measuring
from sglang_exact.bench.decode_table.tables import tables
from sglang_exact.bench.run import BenchRun, Output
from sglang_exact.view.output import check_pages

LENGTHS = ",".join(map(str, measuring.LENGTHS))
Lengths = Annotated[
    str, typer.Option("--prompt-lengths", help="Prompt tokens, by commas.")
]
Rounds = Annotated[
    int, typer.Option("--rounds", min=1, help="Requests to every server, in turn.")
]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", min=2, help="Tokens of every answer.")
]
Base = Annotated[
    str | None,
    typer.Option("--base", help="NAME that ratios are against; default: the plain."),
]
PromptFile = Annotated[
    Path | None,
    typer.Option("--prompt-file", help="Text, or JSON with token ids; repeated."),
]
Logprobs = Annotated[
    bool, typer.Option("--logprobs", help="Compare chosen logprobs as well.")
]
Flush = Annotated[
    bool, typer.Option("--flush/--no-flush", help="Empty the prefix cache before each.")
]
Markdown = Annotated[
    Path | None, typer.Option("--markdown", help="Write the table here.")
]


def decode_table(
    server: shared.Servers = None,
    plain: shared.Plain = None,
    base: Base = None,
    prompt_lengths: Lengths = LENGTHS,
    rounds: Rounds = 5,
    max_new_tokens: MaxNewTokens = 256,
    prompt_file: PromptFile = None,
    seed: shared.Seed = 42,
    logprobs: Logprobs = False,
    flush: Flush = True,
    api_key: shared.ApiKey = None,
    label: shared.Label = "",
    note: shared.Notes = None,
    request_timeout: shared.Timeout = 1800.0,
    output_file: shared.OutputFile = None,
    markdown: Markdown = None,
) -> None:
    """Decode speed and time to first token, exact against not exact, in one run."""
    path = shared.output_path(output_file, "decode-table")
    output = Output(path)
    run = BenchRun("decode-table", label, list(note or []), command=shared.command())

    async def work() -> list[str]:
        check_pages({"--markdown": markdown}, {"--output-file": path})
        output.earlier()
        addresses = servers.parse(server or [], api_key)
        known = [address.name for address in addresses]
        reference = servers.choose_plain(known, plain)
        against = base or reference or known[0]
        servers.choose(known, against, "--base")
        plan = measuring.Plan(
            shared.numbers(prompt_lengths, "--prompt-lengths"),
            rounds,
            max_new_tokens,
            prompt_file,
            seed,
            logprobs,
            flush,
        )
        run.settings = {**plan.settings(), "plain": reference, "base": against}
        async with AsyncExitStack() as stack:
            opened = await servers.open_all(stack, addresses, timeout=request_timeout)
            run.notes += servers.setup_notes(opened)
            run.provenance = provenance.collect(
                [s.facts for s in opened], {"prompt": seed}
            )
            for served in opened:
                if served.name == reference:
                    servers.check_plain(served)
            measuring.check(opened, plan)
            recorder = output.record(run)
            with shared.bar(plan.tokens(len(opened))) as display:
                problems = await measuring.measure(
                    opened, reference, against, plan, recorder, display
                )
        if problems:
            recorder.save()
        else:
            recorder.finish()
        shared.show(tables(run), path, markdown)
        return problems

    shared.leave(shared.execute(work(), output.held), path)
