# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact bench decode-table`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_exact.bench import command as shared
from sglang_exact.bench import servers
from sglang_exact.bench.decode_table import measure as measuring
from sglang_exact.bench.decode_table.tables import tables

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


@shared.measures("decode-table", tables)
async def decode_table(
    job: shared.Job,
    base: Base = None,
    prompt_lengths: Lengths = LENGTHS,
    rounds: Rounds = 5,
    max_new_tokens: MaxNewTokens = 256,
    prompt_file: PromptFile = None,
    seed: shared.Seed = 42,
    logprobs: Logprobs = False,
    flush: Flush = True,
) -> list[str]:
    """Decode speed and time to first token, exact against not exact, in one run."""
    names = [address.name for address in job.addresses]
    against = servers.choose(names, base or job.base or names[0], "--base")
    plan = measuring.Plan(
        shared.numbers(prompt_lengths, "--prompt-lengths"),
        rounds,
        max_new_tokens,
        prompt_file,
        seed,
        logprobs,
        flush,
    )
    found = await job.open()
    measuring.check(found, plan)
    settings = {**plan.settings(), "base": against}
    recorder = job.begin(found, settings, {"prompt": seed})
    with shared.bar(plan.tokens(len(found))) as display:
        return await measuring.measure(
            found, job.base, against, plan, recorder, display
        )
