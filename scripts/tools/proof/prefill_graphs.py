# SPDX-License-Identifier: Apache-2.0
"""Prove that a prefill graph has the bits of the step without it.

    scripts/gpu_prefill_graphs --state DIR --out results/gpu
    scripts/gpu_prefill_graphs --state DIR --out DIR --rehearsal   # without a GPU

One process holds the model, without a server. For every bucket b, steps of b/2 + 1,
b - 1 and b tokens run twice from the same pools: once as the server runs them, padded
to the bucket and replayed, and once eagerly. Compared as integers: logits, every slot
of the KV cache, every conv and GDN state, and what no request of the step owns with
what was there before. A rehearsal has no graphs: it pads the eager step instead.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.proof import matrix
from tools.proof.matrix import DISABLE_VARIABLE, WEIGHTS_VARIABLE, Row, say
from tools.proof.prefill_steps import Stand, cases

ARMS = {
    "exact": "every prefill graph against the step without it",
    "rows-planted": "control: a layer that looks at the number of rows",
    "tables-stale": "control: GDN's tables of the capture, not of the step",
    "default-mode": "control: the host's default mode",
}
"""Arms and their titles; of all but the first the bits are expected to differ."""


def work(answers: Any, words: list[str], rehearsal: bool, arm: str, few: bool) -> None:
    """In a process of its own: every case, one message each, then None."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    stand = Stand(words, rehearsal, arm)
    stand.noise()
    answers.put({"buckets": stand.buckets, "whole": stand.whole})
    todo = list(cases(stand.buckets))[:: 4 if rehearsal else 7 if few else 1]
    for number, case in enumerate(todo):
        found = stand.judge(case, number)
        answers.put({**case._asdict(), **found, "replayed": stand.replayed > number})
        stand.replayed = number + 1
    answers.put(None)


def flags(model: Path, arm: str, rehearsal: bool) -> list[str]:
    """Flags of the host for one arm."""
    words = ["--model-path", str(model), "--skip-tokenizer-init", "--dtype", "bfloat16",
             "--max-running-requests", "8", "--max-mamba-cache-size", "16",
             "--context-length", "2048",
             "--disable-radix-cache", "--mamba-ssm-dtype", "float32",
             "--attention-backend", "triton"]  # fmt: skip
    if arm != "default-mode":
        words += ["--enable-deterministic-inference"]
    if rehearsal:
        from sglang_exact.rehearsal.server import CPU_FLAGS

        return [*words, *CPU_FLAGS, "--max-total-tokens", "2048"]
    return [
        *words, "--load-format", "dummy", "--cuda-graph-max-bs-decode", "8",
        "--cuda-graph-max-bs-prefill", "512", "--mem-fraction-static", "0.8",
        "--max-total-tokens", "4096", "--chunked-prefill-size", "8192",
    ]  # fmt: skip


def environment(arm: str, rehearsal: bool) -> dict[str, str]:
    """Variables of an arm's process; the default mode has no overlay."""
    from sglang_exact.rehearsal.environment import environment as rehearsed

    made = rehearsed() if rehearsal else dict(os.environ)
    made["SGLANG_EXACT_ENABLE"] = "0" if arm == "default-mode" else "1"
    if not rehearsal:
        made[WEIGHTS_VARIABLE] = "1"
    made.pop(DISABLE_VARIABLE, None)
    return made


def ask(arm: str, model: Path, rehearsal: bool, limit_s: float) -> Iterator[Row]:
    """The cases of one arm, as they come.

    Raises:
        RuntimeError: its process ended, or said nothing for `limit_s` seconds.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    before = dict(os.environ)
    os.environ.update(environment(arm, rehearsal))
    try:
        words, few = flags(model, arm, rehearsal), arm != "exact" and not rehearsal
        process = context.Process(
            target=work, args=(answers, words, rehearsal, arm, few)
        )
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    try:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                found = answers.get(timeout=1)
            except queue.Empty:
                if process.is_alive() and time.monotonic() < deadline:
                    continue
                raise RuntimeError(
                    f"{arm}: found its process ended or silent (status "
                    f"{process.exitcode}), expected every case; see the output above"
                ) from None
            deadline = time.monotonic() + limit_s
            if found is None:
                return
            yield found
    finally:
        process.kill()
        process.join()


def row_of(
    arm: str, found: list[Row], buckets: list[int], whole: bool, seconds: float
) -> Row:
    """The outcome of an arm: how many cases differ, and the first.

    whole: GDN's layers are in the graphs, as they have to be under the overlay.
    """
    parts = ("logits", "kv", "states", "foreign")
    wrong = [case for case in found if any(case[part] for part in parts)]
    control = arm != "exact"
    every = all(case["replayed"] for case in found)
    held = bool(wrong) if control else bool(found) and not wrong
    return {
        "arm": arm,
        "title": ARMS[arm],
        "buckets": buckets,
        "cases": len(found),
        "different": {part: sum(bool(c[part]) for c in found) for part in parts},
        "first": wrong[0] if wrong else None,
        "replayed": every,
        "gdn_in_graph": whole,
        "tally": {"compared": len(found), "different": len(wrong)},
        "seconds": round(seconds, 1),
        "as_expected": held and every and (whole or arm == "default-mode"),
    }


class Run(matrix.Matrix):
    """All arms of one call."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(
            "gpu_prefill_graphs", args, Path(args.out) / f"{args.name}.json"
        )

    def one(self, arm: str) -> None:
        """One arm; a failure is noted, not raised."""
        began, found, buckets, whole = time.monotonic(), [], [], False
        model = self.models / f"target-{self.args.layers}"
        try:
            for case in ask(arm, model, self.rehearsal, self.args.start_timeout):
                if "buckets" in case:
                    buckets, whole = case["buckets"], case["whole"]
                    say(f"{arm}: up in {time.monotonic() - began:.0f} s, {buckets}")
                    continue
                found.append(case)
                if len(found) % 50 == 0 or self.rehearsal:
                    say(f"  {case}")
        except RuntimeError as error:
            self.fail(arm, error)
            return
        row = row_of(arm, found, buckets, whole, time.monotonic() - began)
        self.rows[self.key(row)] = row
        say(shown(row))
        self.write()


def shown(row: Row) -> str:
    """One row in one line."""
    parts = ", ".join(f"{n} {part}" for part, n in row["different"].items())
    return (
        f"{row['arm']}: {row['cases']} cases, {row['tally']['different']} different "
        f"({parts}), graphs in all: {row['replayed']}, as expected: "
        f"{row['as_expected']}, first {row['first']}, {row['seconds']} s"
    )


def main(args: argparse.Namespace) -> int:
    """Run the arms; 0 if every row is as expected."""
    run = Run(args)
    run.path.parent.mkdir(parents=True, exist_ok=True)
    run.keep_earlier(args.arms)
    matrix.make_models(run.models, args.layers, run.rehearsal, ())
    for arm in args.arms:
        if run.left() < 0:
            run.not_run.append(arm)
            continue
        run.one(arm)
    for row in run.rows.values():
        say(shown(row))
    return run.finish()
