# SPDX-License-Identifier: Apache-2.0
"""What stock speculation changes and exact speculation does not, on this machine.

    scripts/demo [--json FILE]                  without a GPU: a tiny model, minutes
    scripts/demo --layers 4|64 [--json FILE]    on a GPU: the 27B's width, CUDA graphs
    scripts/demo --trained FOLDER               a trained model's text (`trained.py`)

Random weights; an oracle drafter sets the acceptance. Exit status 0 only if stock
speculation differs from plain decoding and every exact pass equals it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from sglang_exact import __version__
from sglang_exact.host import source as host
from sglang_exact.rehearsal import models
from tools.proof.arms import Arm
from tools.proof.matrix import judge
from tools.proof.passes import Pass, Result, Row, Setup, make_prompts, run_arm

PLAIN = Arm("plain", "plain", phases=(Pass("plain"),))
AGAIN = Arm("plain-again", "plain, again", phases=(Pass("plain, again"),))
# The last prompt spans two KV tiles, which the attention hook needs to show.
CPU_LENGTHS = (8, 11, 17, 24, 260)
GPU_LENGTHS = (37, 257, 511, 1023)
CPU_VOCAB, GPU_VOCAB = 512, 248320
RATE = 0.8
TOKENS = 4
"""Draft tokens of a block."""
Keep = Callable[[list[Result]], None]


def arms(short: tuple[int, ...] | None) -> tuple[Arm, Arm]:
    """The stock and the exact arm; `short` prompts in the passes that repeat."""
    stock = Arm(
        "stock",
        "stock DFLASH",
        "dflash",
        TOKENS,
        mode="stock",
        phases=(Pass("stock DFLASH", RATE, equal=False),),
    )
    exact = Arm(
        "exact",
        "exact DFLASH",
        "dflash",
        TOKENS,
        phases=(
            Pass("exact DFLASH", RATE),
            Pass("exact, all rejected", 0.0, prompts=short),
            Pass("exact, no logprobs", RATE, False, short),
        ),
    )
    return stock, exact


def cpu_setup(work: Path, new_tokens: int) -> Setup:
    """A tiny hybrid model with interpreted kernels."""
    target = models.make_target(work / "target", vocab_size=CPU_VOCAB)
    draft = models.make_draft(work / "dflash", "dflash", vocab_size=CPU_VOCAB)
    prompts = make_prompts(CPU_LENGTHS, CPU_VOCAB)
    return Setup(target, {"dflash": draft}, prompts, new_tokens, work)


def gpu_setup(work: Path, layers: int, new_tokens: int) -> Setup:
    """The 27B's width with random weights; CUDA graphs stay on."""
    target = models.make_27b_target(work / "target", layers)
    draft = models.make_27b_draft(work / "dflash", "dflash", layers, block_size=TOKENS)
    flags = (
        "--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16",
        "--attention-backend", "triton",
        "--max-running-requests", "8", "--cuda-graph-max-bs-decode", "8",
        "--context-length", "8192", "--mem-fraction-static", "0.85",
        "--max-total-tokens", "65536", "--skip-server-warmup", "--disable-radix-cache",
    )  # fmt: skip
    return Setup(
        target,
        {"dflash": draft},
        make_prompts(GPU_LENGTHS, GPU_VOCAB),
        new_tokens,
        work,
        device="cuda",
        flags=flags,
        env={"SGLANG_EXACT_TEST_DUMMY_WEIGHTS": "1"},
        start_timeout_s=240.0,
    )


def run(setup: Setup, side_by_side: int, console: Console, keep: Keep) -> list[Result]:
    """Plain decoding twice, then stock and exact speculation.

    `keep` is called with what there is after each arm. Raises RuntimeError for a
    server that does not start or answer.
    """
    started = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[{time.monotonic() - started:4.0f} s] {text}", markup=False)

    short = tuple(range(len(setup.prompts) - 1)) if setup.device == "cpu" else None
    with ThreadPoolExecutor(side_by_side) as pool:
        plain = pool.submit(run_arm, PLAIN, setup, None, say)
        again = pool.submit(run_arm, AGAIN, setup, None, say)
        found = [plain.result()]
        keep(found)
        reference = found[0].answers[0]
        exact, stock = (
            pool.submit(run_arm, arm, setup, reference, say)
            for arm in reversed(arms(short))
        )
        found.append(_compared(again.result(), reference))
        for job in (stock, exact):
            keep(found)
            found.append(job.result())
    return found


def _compared(found: Result, reference: list[Any]) -> Result:
    """An arm that ran beside the reference, compared with it afterwards."""
    rows = [
        row._replace(tally=judge(reference, answer))
        for row, answer in zip(found.rows, found.answers, strict=True)
    ]
    return found._replace(rows=rows)


def table(rows: list[Row]) -> Table:
    """The rows for people."""
    shown = Table(
        title="Prompts with the bits of plain decoding under the overlay",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    shown.add_column("", no_wrap=True)
    for name in ("ids\nequal", "logprobs\nequal", "accept\nlength"):
        shown.add_column(name, justify="right")
    shown.add_column("first\ndifference", no_wrap=True)
    shown.add_column("as\npromised")
    for row in rows:
        tally, where = row.tally, "none"
        if tally.first is not None:
            where = f"prompt {tally.first['request']}, token {tally.first['position']}"
        good = "[green]yes[/]" if row.as_promised else "[red]NO[/]"
        shown.add_row(
            row.title,
            f"{tally.ids_equal}/{tally.compared}",
            f"{tally.logprobs_equal}/{tally.compared}" if row.logprobs else "not asked",
            "-" if row.acceptance_length is None else f"{row.acceptance_length:.2f}",
            where,
            good if row.exercised else "[red]NOT EXERCISED[/]",
        )
    return shown


def record(results: list[Result], setup: Setup, args: argparse.Namespace) -> Any:
    """Everything a reader needs to judge or repeat the run, as JSON types."""
    attested = [r.attestation for r in results if r.attestation]
    return {
        "command": shlex.join(["scripts/demo", *args.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "sglang_exact": __version__,
        "versions": {"sglang": host.version("sglang"), **host.stack_versions()},
        "device": setup.device,
        "weights": "random, seeded",
        "drafts": f"set by an oracle, rate {RATE}",
        "prompt_lengths": [len(p) for p in setup.prompts],
        "new_tokens_per_prompt": setup.new_tokens,
        "attestation": attested[-1] if attested else None,
        "logprobs": "float32, compared and shown as int32 bits",
        "rows": [row.record() for r in results for row in r.rows],
    }


def side_by_side(layers: int | None) -> int:
    """Servers at once: one per core of two; a GPU holds one of 64 layers."""
    return 1 if layers == 64 else 2


def main(args: argparse.Namespace) -> int:
    """Run the demonstration; 0 if everything is as promised, 1 if not."""
    if args.trained:
        from tools.proof import trained

        return trained.main(args)
    console = Console()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sglang-exact-demo-") as temporary:
        work = Path(args.work or temporary)
        work.mkdir(parents=True, exist_ok=True)
        if args.layers:
            setup = gpu_setup(work, args.layers, args.new_tokens or 64)
        else:
            setup = cpu_setup(work, args.new_tokens or 16)

        def keep(found: list[Result], ok: bool = False) -> None:
            # After every arm: what is here is kept if this is ended.
            if args.json:
                made = {"ok": ok, **record(found, setup, args)}
                made["seconds"] = round(time.monotonic() - started, 1)
                text = json.dumps(made, indent=1) + "\n"
                Path(args.json).write_text(text, encoding="utf-8")

        try:
            results = run(setup, side_by_side(args.layers), console, keep)
        except RuntimeError as error:
            console.print(f"FAILED: {error}", markup=False, highlight=False)
            return 1
        rows = [row for result in results for row in result.rows]
        good = all(row.as_promised for row in rows)
        keep(results, good)
    console.print(table(rows))
    if args.json:
        console.print(f"written: {args.json}", markup=False)
    console.print(
        "Stock speculation changed the answers; exact speculation did not change a bit."
        if good
        else "NOT as promised: see the table.",
        style="bold green" if good else "bold red",
    )
    return 0 if good else 1
