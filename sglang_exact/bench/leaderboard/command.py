# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact bench leaderboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_exact.bench import command as shared
from sglang_exact.bench import servers
from sglang_exact.bench.command import Given
from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.leaderboard import launch
from sglang_exact.bench.leaderboard import measure as board
from sglang_exact.bench.leaderboard import tables as leaderboard_table
from sglang_exact.bench.leaderboard.run_log import RunLog
from sglang_exact.bench.run import BenchRun, Recorder
from sglang_exact.view import files as plotting
from sglang_exact.view.options import with_options
from sglang_exact.view.output import check_pages

Servers = Annotated[
    list[str] | None,
    typer.Option(
        "--server",
        help="NAME=URL; NAME@TEXT for more draft lengths of one configuration.",
    ),
]
Launch = Annotated[
    list[str] | None,
    typer.Option(
        "--launch",
        help="NAME=COMMAND with {port} and {draft_tokens}: started for every length.",
    ),
]
Lengths = Annotated[
    str, typer.Option("--draft-lengths", help="Drafts per verify step, for --launch.")
]
Runs = Annotated[int, typer.Option("--runs", min=1, help="Runs of every length.")]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", min=2, help="Tokens of every run.")
]
Prompt = Annotated[
    str | None, typer.Option("--prompt", help="One of the verifier's, by name.")
]
PromptFile = Annotated[
    Path | None, typer.Option("--prompt-file", help="Text, or JSON with token ids.")
]
Csv = Annotated[
    Path, typer.Option("--csv", help="Every run; an existing file is gone on with.")
]
StartTimeout = Annotated[
    float, typer.Option("--start-timeout", help="Seconds until a server answers.")
]


def _leaderboard(
    given: Given,
    server: Servers = None,
    launch_command: Launch = None,
    plain: Annotated[
        str, typer.Option("--plain", help="NAME of the plain configuration.")
    ] = servers.PLAIN,
    draft_lengths: Lengths = "1-15",
    runs: Runs = 10,
    max_new_tokens: MaxNewTokens = 1500,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    seed: shared.Seed = 42,
    csv: Csv = Path("leaderboard.csv"),
    start_timeout: StartTimeout = 1800.0,
) -> None:
    """One prompt, every draft length, every drafter: best mean speed."""
    path = given.output_file or csv.with_suffix(".json")
    logs: list[RunLog] = []
    run = BenchRun("leaderboard", given.label, list(given.note or []))
    run.command = shared.command()
    pages = {
        "--output-file": None if path.exists() else path,
        "--markdown": given.markdown,
        "--plot": given.plot,
    }

    async def work() -> list[str]:
        kept = {"--csv": csv, "record": path if path.exists() else None}
        check_pages(pages, kept)
        if given.plot is not None and not plotting.available():
            typer.echo(plotting.MISSING, err=True)
        addresses = servers.parse(server, given.api_key) if server else []
        templates = launch.parse(launch_command or [], plain)
        lengths = shared.numbers(draft_lengths, "--draft-lengths")
        everything = board.targets(addresses, templates, lengths, plain)
        if not everything:
            raise CannotRun(
                "found nothing to measure; expected --server NAME=URL or --launch "
                "NAME=COMMAND"
            )
        plan = board.Plan(runs, max_new_tokens, prompt_file, prompt, seed)
        log = RunLog(csv)
        logs.append(log)
        run.settings = {
            "runs": runs,
            "max_new_tokens": max_new_tokens,
            "draft_lengths": lengths if templates else None,
            "plain": plain,
            "csv": csv.name,
            "temperature": 0,
            "ignore_eos": True,
        }
        run.rows, run.exactness = leaderboard_table.summarize(log.lines, plain)
        board.go_on(run, path, log)
        recorder = Recorder(run, path)
        total = board.planned_tokens(plan, log, everything)
        with shared.bar(total) as display:
            problems = await board.Board(
                plan,
                log,
                recorder,
                display,
                plain,
                key=given.api_key,
                timeout=given.request_timeout,
                start_timeout=start_timeout,
            ).measure(everything)
        if not problems:
            recorder.finish()
        return problems

    def held() -> Path | None:
        return csv if logs and logs[0].lines else None

    problems = shared.execute(work(), held)
    shared.show(leaderboard_table.tables(run), path, given.markdown)
    typer.echo(f"runs: {csv}")
    problems = problems + shared.draw(leaderboard_table.plot, run, given.plot)
    shared.leave(problems, csv)


leaderboard = with_options(_leaderboard, Given, without=("server", "plain", "resume"))
