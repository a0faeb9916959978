# SPDX-License-Identifier: Apache-2.0
"""Prove on a GPU that exact speculation equals plain decode, at the 27B's width.

    scripts/gpu_proof --layers 64 --state DIR --out results/gpu [--arms plain,dflash8]
    scripts/gpu_proof --tp 2 --state DIR --out results/gpu --arms plain,dflash8
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
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sglang_exact import host
from sglang_exact.rehearsal import models, oracle
from sglang_exact.rehearsal.client import Completion
from sglang_exact.rehearsal.drafters import DRAFT_KINDS
from sglang_exact.rehearsal.server import Server
from tools import ROOT
from tools.proof import arms as proof_arms
from tools.proof.arms import Arm, Phase, Sizes, Text
from tools.proof.passes import DISABLE_VARIABLE, compare

SAY = threading.Lock()


class Row(NamedTuple):
    """The outcome of one phase of one arm; tok_s is wall clock, prefill included."""

    arm: str
    title: str
    draft_tokens: int | None
    rate: float | None
    concurrency: int
    prompts: int
    tokens: int
    ids_equal: int | None
    logprobs_equal: int | None
    first_difference: int | None
    accept_length: float | None
    tok_s: float
    as_expected: bool


def say(text: str) -> None:
    """One line at a time, whatever the thread."""
    with SAY:
        print(text, flush=True)


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


def run_phase(
    server: Server,
    arm: Arm,
    phase: Phase,
    text: Text,
    reference: list[Completion] | None,
    plan: Path,
    new_tokens: int,
) -> tuple[Row, list[Completion]]:
    """One pass over the prompts, compared with the reference where there is one."""
    prompts, drawn = text.prompts, arm.drafter is not None and arm.oracle
    if drawn and reference is not None:
        known = [(p, r.ids) for p, r in zip(prompts, reference, strict=True)]
        oracle.write_plan(plan, phase.rate, known)
    # More requests than prompts: some are asked again.
    asked = [prompts[i % len(prompts)] for i in range(phase.prompts)]
    started = time.monotonic()
    found = server.generate_many(
        asked,
        new_tokens,
        concurrency=phase.concurrency,
        return_logprob=phase.logprobs,
        **text.sampling,
    )
    seconds = time.monotonic() - started
    tokens = sum(len(c.ids) for c in found)
    verifies = sum(c.spec_verify_ct for c in found)
    ids = logprobs = first = None
    as_expected = bool(verifies) == bool(arm.drafter)
    if arm.drafter and not arm.oracle:
        # The first token is the prefill's, each verify gives one more of its own.
        as_expected &= tokens > len(found) + verifies
    if reference is not None:
        wanted = [reference[i % len(reference)] for i in range(phase.prompts)]
        result = compare(wanted, found, phase.logprobs)
        ids, logprobs = result.ids_equal, result.logprobs_equal
        first = result.first.token if result.first else None
        as_expected &= arm.equal is None or result.equal == arm.equal
    row = Row(
        arm.name,
        arm.title,
        arm.tokens if arm.drafter else None,
        phase.rate if drawn else None,
        phase.concurrency,
        len(asked),
        tokens,
        ids,
        logprobs,
        first,
        round(tokens / verifies, 2) if verifies else None,
        round(tokens / seconds, 1),
        as_expected,
    )
    return row, found


class Proof:
    """What every arm needs: where things are, and which GPU is free.

    Args:
        args: the command line.
        sizes: of the servers.
        new_tokens: per prompt.
    """

    def __init__(self, args: argparse.Namespace, sizes: Sizes) -> None:
        self.args, self.sizes = args, sizes
        self.state, self.out = Path(args.state), Path(args.out)
        self.models = self.state / "models"
        self.texts = proof_arms.texts(24, proof_arms.VOCAB)
        gpus = args.gpus.split(",")
        groups = [",".join(gpus)] if sizes.tp > 1 else gpus
        # The host sizes its pools by what is free when it starts: one at a time.
        self.starting = {group: threading.Lock() for group in groups}
        self.workers = [g for g in groups for _ in range(args.side_by_side)]
        self.rows: list[Row] = []
        self.failed: list[str] = []
        self.skipped: list[str] = []
        self.began = time.monotonic()

    def kept(self, text: str) -> Path:
        """The plain answers to one text's prompts."""
        more = "" if text == "random" else f"-{text}"
        return (
            self.state / f"reference-{self.sizes.layers}-tp{self.sizes.tp}{more}.json"
        )

    def reference(self, arm: Arm, text: str) -> list[Completion] | None:
        """The plain answers to one text; None where this arm needs none.

        Raises:
            RuntimeError: there are none yet.
        """
        found = read_reference(self.kept(text))
        free = arm.records or (arm.equal is None and not arm.drafter)
        if found is None and not free:
            raise RuntimeError(
                f"found no plain answers to the {text} prompts in --state; run arm "
                + ("plain" if text == "random" else "plain-repeated")
            )
        return found

    def prepare(self) -> None:
        """Make folders and model configurations."""
        self.state.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        layers = self.sizes.layers
        models.make_27b_target(self.models / f"target-{layers}", layers)
        for kind in DRAFT_KINDS:
            models.make_27b_draft(self.models / f"{kind}-{layers}", kind, layers)

    @contextlib.contextmanager
    def server(self, arm: Arm, gpus: str, plan: Path) -> Iterator[Server]:
        """The arm's server, ready; started alone on its GPU."""
        env = {"SGLANG_EXACT_TEST_DUMMY_WEIGHTS": "1", "CUDA_VISIBLE_DEVICES": gpus}
        if arm.drafter and arm.oracle:
            env[oracle.VARIABLE] = str(plan)
            oracle.write_plan(plan, 0.0, [])
        if arm.disable:
            env[DISABLE_VARIABLE] = arm.disable
        server = Server(
            self.models / f"target-{self.sizes.layers}",
            mode=arm.mode,
            device="cuda",
            deterministic=arm.deterministic,
            flags=proof_arms.server_flags(arm, self.models, self.sizes),
            env=env,
            log=self.state / f"{self.args.name}-{arm.name}.log",
            start_timeout_s=self.args.start_timeout,
        )
        with self.starting[gpus]:
            server.start()
        try:
            yield server
        finally:
            server.stop()

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
                text = self.texts[phase.text]
                row, found = run_phase(
                    server, arm, phase, text, reference, plan, self.args.new
                )
                rows.append(row)
                say("  " + " ".join("-" if x is None else str(x) for x in row))
                if reference is None and arm.records:
                    kept = [{"ids": c.ids, "logprobs": c.logprobs} for c in found]
                    self.kept(phase.text).write_text(json.dumps(kept))
            if arm.name in self.args.profile.split(","):
                self.profile(arm, server, plan, self.reference(arm, "random"))
        self.write(arm, rows, info, server.started_in_s)
        self.rows += rows

    def profile(
        self, arm: Arm, server: Server, plan: Path, reference: list[Completion] | None
    ) -> None:
        """scripts/profile_steps on the arm's server, at 1 and 8 requests in flight."""
        ids = self.state / "prompts.json"
        prompts = self.texts["random"].prompts
        ids.write_text(json.dumps(prompts))
        if arm.drafter and reference is not None:
            known = [(p, r.ids) for p, r in zip(prompts, reference, strict=True)]
            oracle.write_plan(plan, proof_arms.CARD_RATE, known)
        for in_flight in (1, 8):
            name = f"{self.args.name}-{arm.name}-steps-{in_flight}.json"
            done = subprocess.run(
                [
                    sys.executable, str(ROOT / "scripts" / "profile_steps"),
                    "--url", server.url, "--traces", str(self.state / "traces"),
                    "--out", str(self.out / name), "--ids", str(ids),
                    "--in-flight", str(in_flight), "--new", str(self.args.new),
                ],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            say(f"{arm.name}: profile at {in_flight}\n{done.stdout}{done.stderr}")

    def write(
        self, arm: Arm, rows: list[Row], info: dict[str, Any], started_in_s: float
    ) -> None:
        """The arm's rows with all that is needed to read them."""
        result = {
            "command": " ".join(["scripts/gpu_proof", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%d"),
            "gpu": proof_arms.gpu(),
            "weights": "random, seeded per parameter",
            "acceptance": "set by the oracle drafter" if arm.oracle
            else "the drafter's own, repetitive prompts",
            "layers": self.sizes.layers,
            "tp": self.sizes.tp,
            "new_tokens_per_prompt": self.args.new,
            "side_by_side": len(self.workers),
            "versions": {"sglang": host.version("sglang"), **host.stack_versions()},
            "start_s": round(started_in_s, 1),
            "attestation": info,
            "rows": [row._asdict() for row in rows],
        }  # fmt: skip
        path = self.out / f"{self.args.name}-{arm.name}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")

    def work(self, arms: queue.SimpleQueue[Arm], gpus: str) -> None:
        """Take arms until there are none."""
        while True:
            try:
                arm = arms.get_nowait()
            except queue.Empty:
                return
            if time.monotonic() - self.began > self.args.budget:
                self.skipped.append(arm.name)
                continue
            try:
                self.run(arm, gpus)
            except (RuntimeError, OSError) as error:
                self.failed.append(arm.name)
                say(f"{arm.name}: FAILED\n{str(error)[-2500:]}")

    def run_all(self, arms: list[Arm]) -> None:
        """The plain arms first: all others are compared with them."""
        first: queue.SimpleQueue[Arm] = queue.SimpleQueue()
        for arm in [arm for arm in arms if arm.records]:
            if not all(self.kept(phase.text).exists() for phase in arm.phases):
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
        arms = [a._replace(requests=min(a.requests, args.requests)) for a in arms]
    proof = Proof(
        args,
        Sizes(args.layers, args.context, args.mem_fraction, args.total_tokens, args.tp),
    )
    proof.prepare()
    proof.run_all(arms)
    say("\n" + " ".join(Row._fields))
    for row in proof.rows:
        say(" ".join("-" if x is None else str(x) for x in row))
    seconds = time.monotonic() - proof.began
    say(f"not run: {proof.skipped}; failed: {proof.failed}; {seconds:.0f} s")
    fine = proof.rows and not proof.failed and all(r.as_expected for r in proof.rows)
    return 0 if fine else 1
