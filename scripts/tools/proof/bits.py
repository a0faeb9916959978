# SPDX-License-Identifier: Apache-2.0
"""Prove on a GPU that exact speculation equals plain decode, at the 27B's width.

    scripts/gpu_proof --layers 64 --state DIR --out results/gpu [--arms plain,dflash8]
    scripts/gpu_proof --tp 2 --state DIR --out results/gpu --arms plain,dflash8
    scripts/gpu_proof --prefixes 2048,8192 --arms plain-cold,plain-cache ...
    scripts/gpu_proof --gpus 0,1 --side-by-side 3 --layers 4 --arms plain,widths ...

Random weights (seeded), an oracle drafter that sets acceptance, CUDA graphs on in
every arm. Each arm starts a server of its own; ids and logprobs are compared bit for
bit with the plain arm's, which is kept in --state, so that later calls can go on. One
JSON file per arm is written as soon as the arm is done. Arms without an oracle draft
by themselves, from repetitive prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sglang_exact.client.blocking import Completion
from sglang_exact.hooks.testing import oracle
from sglang_exact.rehearsal.server import Server
from tools import SCRIPTS
from tools.proof import arms as proof_arms
from tools.proof import matrix, prefix_arms
from tools.proof.arms import Arm, Phase, Sizes, Text
from tools.proof.matrix import BREAKS, Row, say


def read_reference(path: Path) -> list[Completion] | None:
    """The plain answers kept by an earlier call."""
    if not path.exists():
        return None
    return [
        Completion(
            tuple(kept["ids"]), tuple(kept["logprobs"]), "", 0, len(kept["ids"]), None,
            {},
        )
        for kept in json.loads(path.read_text())
    ]  # fmt: skip


def draw(
    plan: Path, rate: float, text: Text, reference: list[Completion] | None
) -> None:
    """Tell the oracle the answers to a text's prompts, if they are known."""
    if reference is not None:
        known = [(p, r.ids) for p, r in zip(text.prompts, reference, strict=True)]
        oracle.write_plan(plan, rate, known)


def ask_whole(
    server: Server, phase: Phase, text: Text, reference: list[Completion]
) -> tuple[list[Completion], list[Completion]]:
    """All prompts of a phase at once, each for the rest of the context.

    Each stops at the last token of its plain answer that is not in it before. Returns
    the answers, and the plain ones as far as these go.
    """

    def ask(number: int) -> Completion:
        ids = reference[number].ids
        last = max(i for i, token in enumerate(ids) if ids.index(token) == i)
        ends: Row = {"ignore_eos": False, "stop_token_ids": [ids[last]]}
        return server.client.generate(text.prompts[number], phase.whole, **ends)

    with ThreadPoolExecutor(phase.concurrency) as pool:
        found = list(pool.map(ask, range(phase.prompts)))
    ends = [len(answer.ids) for answer in found]
    return found, [
        dataclasses.replace(plain, ids=plain.ids[:end], logprobs=plain.logprobs[:end])
        for plain, end in zip(reference, ends, strict=False)
    ]


def run_phase(
    server: Server,
    arm: Arm,
    phase: Phase,
    text: Text,
    reference: list[Completion] | None,
    plan: Path,
    new_tokens: int,
) -> tuple[Row, list[Completion]]:
    """One pass over the prompts, compared with the reference where there is one.

    Its `tok_s` is wall clock, prefill included.
    """
    if arm.drawn:
        draw(plan, phase.rate, text, reference)
    # More requests than prompts: some are asked again.
    count = phase.prompts or len(text.prompts)
    asked = [text.prompts[i % len(text.prompts)] for i in range(count)]
    started = time.monotonic()
    if phase.whole and reference is not None:
        found, reference = ask_whole(server, phase, text, reference)
    else:
        found = server.generate_many(
            asked,
            text.tokens or new_tokens,
            concurrency=phase.concurrency,
            return_logprob=phase.logprobs,
            **text.sampling,
        )
    seconds = time.monotonic() - started
    tokens = sum(len(c.ids) for c in found)
    verifies = sum(c.spec_verify_ct for c in found)
    as_expected = matrix.used_drafts(arm, len(found), tokens, verifies, phase.first)
    tally = None
    if reference is not None:
        wanted = [reference[i % len(reference)] for i in range(count)]
        judged = matrix.judge(wanted, found)
        equal = matrix.is_equal(judged, phase.logprobs)
        as_expected &= arm.equal is None or equal == arm.equal
        tally = matrix.tallied(judged, phase.logprobs)
    row: Row = {
        "arm": arm.name,
        "title": arm.title,
        "draft_tokens": arm.draft_tokens if arm.drafter else None,
        "rate": phase.rate if arm.drawn else None,
        "concurrency": phase.concurrency,
        "text": phase.text,
        "prompts": len(asked),
        "tokens": tokens,
        "tally": tally,
        "acceptance_length": matrix.rounded(tokens, verifies),
        "tok_s": round(tokens / seconds, 1),
        "as_expected": as_expected,
    }
    if arm.cache:
        row["prompt_tokens"] = sum(map(len, asked))
        row["cached_tokens"] = cached = sum(map(cached_tokens, found))
        # A cache that was not hit proves nothing.
        row["as_expected"] &= cached > 0
    return row, found


def cached_tokens(answer: Completion) -> int:
    """Tokens of its prompt that were not computed again."""
    return int(answer.raw["meta_info"].get("cached_tokens") or 0)


def shown(row: Row) -> str:
    """One row in one line."""
    tally = row["tally"] or {}
    first = tally.get("first_difference") or {}
    cells = [
        row["arm"], row["draft_tokens"], row["rate"], row["concurrency"],
        row["prompts"], row["tokens"], tally.get("ids_equal"),
        tally.get("logprobs_equal"), first.get("position"),
        row["acceptance_length"], row["tok_s"], row.get("cached_tokens"),
        row["as_expected"],
    ]  # fmt: skip
    return " ".join("-" if x is None else str(x) for x in cells)


HEAD = (
    "arm draft_tokens rate concurrency prompts tokens ids_equal logprobs_equal "
    "first_difference acceptance_length tok_s cached_tokens as_expected"
)


class Proof(matrix.Matrix):
    """What every arm needs: where things are, and which GPU is free.

    Args:
        args: the command line.
        sizes: of the servers.
    """

    def __init__(self, args: argparse.Namespace, sizes: Sizes) -> None:
        super().__init__("gpu_proof", args, Path(args.out) / f"{args.name}.json")
        self.sizes, self.out = sizes, Path(args.out)
        self.vocab = proof_arms.FAMILIES.get(args.family, proof_arms.VOCAB)
        self.texts = proof_arms.texts(24, self.vocab)
        gpus = args.gpus.split(",")
        groups = [",".join(gpus)] if sizes.tp > 1 else gpus
        # The host sizes its pools by what is free when it starts: one at a time.
        self.starting = {group: threading.Lock() for group in groups}
        self.workers = [g for g in groups for _ in range(args.side_by_side)]

    def kept(self, arm: Arm, text: str) -> Path:
        """The plain answers to one text's prompts that an arm is compared with."""
        more = "" if arm.reference == "plain" else f"-{arm.reference}"
        more += "" if text == "random" else f"-{text}"
        if text not in self.texts:
            more += "".join(f"-{n}" for n in self.args.prefixes)
        return (
            self.state / f"reference-{self.sizes.layers}-tp{self.sizes.tp}{more}.json"
        )

    def text(self, arm: Arm, name: str) -> Text:
        """The prompts of a phase; some hold answers that are known by then."""
        if name in self.texts:
            return self.texts[name]
        lengths, vocab = self.args.prefixes, proof_arms.VOCAB
        if name == prefix_arms.PREFIXES:
            prompts = prefix_arms.make_prefixes(lengths, vocab)
        else:
            known = self.reference(arm, prefix_arms.PREFIXES) or ()
            said = [answer.ids for answer in known]
            prompts = prefix_arms.make_answers(lengths, vocab, said)
        return Text(prompts, {}, prefix_arms.NEW)

    def reference(self, arm: Arm, text: str) -> list[Completion] | None:
        """The plain answers to one text; None where this arm needs none.

        Raises:
            RuntimeError: there are none yet.
        """
        found = read_reference(self.kept(arm, text))
        free = arm.records or (arm.equal is None and not arm.drafter)
        if found is None and not free:
            raise RuntimeError(
                f"found no plain answers to the {text} prompts in --state; run arm "
                + next(
                    one.name
                    for one in proof_arms.ARMS
                    if text in one.records and one.reference == arm.reference
                )
            )
        return found

    def prepare(self) -> None:
        """Make folders and model configurations."""
        self.out.mkdir(parents=True, exist_ok=True)
        matrix.make_models(
            self.models,
            self.sizes.layers,
            family=self.args.family,
            scheme=self.args.scheme,
        )

    @contextlib.contextmanager
    def server(self, arm: Arm, gpus: str, plan: Path) -> Iterator[Server]:
        """The arm's server, ready; started alone on its GPU."""
        made = matrix.server(
            arm,
            self.models / f"target-{self.sizes.layers}",
            plan=plan,
            log=self.state / f"{self.args.name}-{arm.name}.log",
            flags=[
                *proof_arms.server_flags(arm, self.models, self.sizes),
                *arm.flags,
            ],
            gpus=gpus,
            start_timeout_s=self.args.start_timeout,
        )
        with self.starting[gpus]:
            made.start()
        try:
            yield made
        finally:
            made.stop()

    def run(self, arm: Arm, gpus: str) -> None:
        """One arm from start to its JSON file.

        Raises:
            RuntimeError: the server did not start, or gave no answer.
        """
        for phase in arm.phases:
            self.reference(arm, phase.text)
        plan = self.state / f"oracle-{self.args.name}-{arm.name}.json"
        rows = []
        with self.server(arm, gpus, plan) as server:
            say(f"{arm.name}: up in {server.started_in_s:.0f} s on GPU {gpus}")
            info = server.info().get("sglang_exact") or {}
            for phase in arm.phases:
                reference = self.reference(arm, phase.text)
                text = self.text(arm, phase.text)
                row, found = run_phase(
                    server, arm, phase, text, reference, plan, self.args.new
                )
                rows.append(row)
                say(f"  {shown(row)}")
                if reference is None and arm.records:
                    kept = [{"ids": c.ids, "logprobs": c.logprobs} for c in found]
                    self.kept(arm, phase.text).write_text(json.dumps(kept))
            if arm.name in self.args.profile.split(","):
                self.profile(arm, server, plan)
        self.write_arm(arm, rows, info, server.started_in_s)
        self.rows |= {f"{arm.name} {i}": row for i, row in enumerate(rows)}

    def profile(self, arm: Arm, server: Server, plan: Path) -> None:
        """scripts/profile_steps on the arm's server, at 1 and 8 requests in flight."""
        ids, text = self.state / "prompts.json", self.texts["random"]
        ids.write_text(json.dumps(text.prompts))
        if arm.drafter:
            draw(plan, proof_arms.CARD_RATE, text, self.reference(arm, "random"))
        for in_flight in (1, 8):
            name = f"{self.args.name}-{arm.name}-steps-{in_flight}.json"
            done = subprocess.run(
                [
                    sys.executable, str(SCRIPTS / "profile_steps"),
                    "--url", server.url, "--traces", str(self.state / "traces"),
                    "--out", str(self.out / name), "--ids", str(ids),
                    "--in-flight", str(in_flight), "--new", str(self.args.new),
                ],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            say(f"{arm.name}: profile at {in_flight}\n{done.stdout}{done.stderr}")

    def write_arm(
        self, arm: Arm, rows: list[Row], info: Row, started_in_s: float
    ) -> None:
        """The arm's rows with all that is needed to read them, in a file of their
        own."""
        result = {
            **self.facts(),
            "acceptance": "set by the oracle drafter" if arm.oracle
            else "the drafter's own, repetitive prompts",
            "family": self.args.family or "qwen3_5",
            "scheme": self.args.scheme or None,
            "layers": self.sizes.layers,
            "tp": self.sizes.tp,
            "new_tokens_per_prompt": self.text(arm, arm.phases[0].text).tokens
            or self.args.new,
            "side_by_side": len(self.workers),
            "start_s": round(started_in_s, 1),
            "attestation": info,
            "rows": rows,
        }  # fmt: skip
        matrix.write(self.out / f"{self.args.name}-{arm.name}.json", result)

    def write(self) -> None:
        """Every arm has a file of its own, written when it is done."""

    def work(self, arms: queue.SimpleQueue[Arm], gpus: str) -> None:
        """Take arms until there are none."""
        while True:
            try:
                arm = arms.get_nowait()
            except queue.Empty:
                return
            if self.left() < 0:
                self.not_run.append(arm.name)
                continue
            try:
                self.run(arm, gpus)
            except BREAKS as error:
                self.fail(arm.name, error)

    def run_all(self, arms: list[Arm]) -> None:
        """The plain arms first: all others are compared with them."""
        first: queue.SimpleQueue[Arm] = queue.SimpleQueue()
        for arm in [arm for arm in arms if arm.records]:
            if not all(self.kept(arm, phase.text).exists() for phase in arm.phases):
                first.put(arm)
                arms.remove(arm)
        self.work(first, self.workers[0])
        todo: queue.SimpleQueue[Arm] = queue.SimpleQueue()
        for arm in arms:
            todo.put(arm)
        threads = [
            threading.Thread(target=self.work, args=(todo, gpus))
            for gpus in self.workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def main(args: argparse.Namespace) -> int:
    """Run the arms; 0 if every row is as expected."""
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    arms = proof_arms.chosen(args.arms)
    if args.requests:
        most = [min(a.requests or proof_arms.REQUESTS, args.requests) for a in arms]
        arms = [a._replace(requests=n) for a, n in zip(arms, most, strict=True)]
    proof = Proof(
        args,
        Sizes(args.layers, args.context, args.mem_fraction, args.total_tokens, args.tp),
    )
    proof.prepare()
    proof.run_all(arms)
    say(f"\n{HEAD}")
    for row in proof.rows.values():
        say(shown(row))
    return proof.finish()
