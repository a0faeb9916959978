# SPDX-License-Identifier: Apache-2.0
"""Prove on a GPU that traffic, settings and restarts do not move a bit.

    scripts/gpu_traffic --state DIR --out results/gpu [--arms plain,restart-1,...]
    scripts/gpu_traffic --state DIR --out DIR --rehearsal    # logic, without a GPU

Four layers at the 27B's width, random weights (seeded), acceptance set by an oracle
drafter, or by real n-gram tries and repetitive prompts (arm ngram-tries). Each arm is
one server; several run side by side on one GPU. Every answer is compared bit for bit
with the plain server's, which answered each request alone; it is kept in --state, so
that later calls can go on. The JSON result is written anew after each arm; rows of
other arms stay in it.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sglang_exact.bench.exactness import Tally
from sglang_exact.client.blocking import Completion
from sglang_exact.hooks.testing import oracle
from sglang_exact.rehearsal.drafters import DRAFTERS, draft_flags
from sglang_exact.rehearsal.server import Server
from tools.proof import arms as proof_arms
from tools.proof import matrix
from tools.proof.arms import Arm
from tools.proof.matrix import BREAKS, Row, say
from tools.proof.traffic_arms import ALONE, DRAFTED, GPU, REHEARSAL, arms_of
from tools.proof.traffic_asker import PHASES, Asker, finite, said

RATE, LAYERS = 0.7, 4
REHEARSED_TOKENS = 4
"""Draft tokens of a rehearsal's servers."""


class Run(matrix.Matrix):
    """All arms of one call.

    Args:
        args: the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__("gpu_traffic", args, Path(args.out) / f"{args.name}.json")
        self.shape = REHEARSAL if args.rehearsal else GPU
        self.kept = self.state / "traffic-reference.json"
        self.reference: dict[str, Any] = {}
        self.ready = threading.Event()
        if self.kept.exists():
            self.reference = json.loads(self.kept.read_text())
            self.ready.set()

    def prepare(self) -> None:
        """Model folders."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        matrix.make_models(self.models, LAYERS, self.rehearsal, DRAFTED)

    def flags(self, arm: Arm) -> list[str]:
        """Flags of an arm's server; explicit pools, so that servers can be beside."""
        shape, extra = self.shape, list(arm.flags)
        if self.rehearsal:
            flags = ["--context-length", str(shape.context)]
            if arm.requests:
                flags += ["--max-running-requests", str(arm.requests)]
            if arm.drafter:
                draft = self.models / f"{arm.drafter}-{LAYERS}"
                flags += draft_flags(arm.drafter, draft, REHEARSED_TOKENS)
            graph = "--cuda-graph-bs-decode"
            return [*flags, *(extra[: extra.index(graph)] if graph in extra else extra)]
        width = DRAFTERS[arm.drafter].tokens if arm.drafter else arm.draft_tokens
        arm = arm._replace(draft_tokens=width, requests=arm.requests or shape.rows)
        sizes = proof_arms.Sizes(LAYERS, shape.context, 0.95, shape.context * 8)
        flags = proof_arms.server_flags(arm, self.models, sizes)
        flags += ["--disable-overlap-schedule"] * (not arm.overlap)
        return [*flags, *extra]

    def server(self, arm: Arm, plan: Path) -> Server:
        """The arm's server, not started."""
        return matrix.server(
            arm,
            self.models / f"target-{LAYERS}",
            plan=plan,
            log=self.state / f"traffic-{arm.name}.log",
            device=self.device,
            flags=self.flags(arm),
            kind=Overlapped if arm.overlap else None,
            start_timeout_s=self.args.start_timeout,
        )

    def one(self, arm: Arm) -> None:
        """One arm; a failure is noted, not raised."""
        if self.left() < 0:
            self.not_run.append(arm.name)
            return
        try:
            self._one(arm)
        except BREAKS as error:
            self.fail(arm.name, error)
        finally:
            if arm.records:
                self.ready.set()
            self.write()

    def _one(self, arm: Arm) -> None:
        plan = self.state / f"traffic-oracle-{arm.name}.json"
        with self.server(arm, plan) as server:
            self.starts[arm.name] = round(server.started_in_s, 1)
            say(f"{arm.name}: up in {server.started_in_s:.0f} s")
            if not arm.disable:
                self.info = self.info or server.info().get("sglang_exact") or {}
            asker = Asker(server, self.shape)
            if not arm.records:
                self.ready.wait()
            prompts = asker.everything
            if not arm.records and not self.reference.keys() >= prompts.keys():
                raise RuntimeError(
                    f"found {len(self.reference)} plain answers in {self.kept}, "
                    f"expected {len(prompts)}; fix: run arm plain"
                )
            if arm.drawn:
                known = [(p, self.reference[n][0]) for n, p in prompts.items()]
                oracle.write_plan(plan, RATE, known)
            for phase in arm.phases:
                began = time.monotonic()
                found = PHASES[phase](asker)
                seconds = time.monotonic() - began
                sent = None
                if phase == "crowd" and arm.equal:
                    sent = asker.preempted()
                self._judge(arm, phase, found, seconds, sent)

    def _judge(
        self,
        arm: Arm,
        phase: str,
        found: Sequence[tuple[str, Completion]],
        s: float,
        sent: int | None = None,
    ) -> None:
        """Write a row; `sent` to host memory, where none proves nothing."""
        if arm.records and phase in ALONE:
            self.reference |= {name: said(answer) for name, answer in found}
            self.kept.write_text(json.dumps(self.reference))
            if phase == ALONE[-1]:
                self.ready.set()
            return
        tally, differ = self._tally(found)
        verifies = sum(answer.spec_verify_ct for _, answer in found)
        tokens = sum(len(answer.ids) for _, answer in found)
        row: Row = {
            "arm": arm.name,
            "title": arm.title,
            "phase": phase,
            "drafter": arm.drafter,
            "oracle": arm.drawn,
            "answers": len(found),
            "tokens": tokens,
            "acceptance_length": matrix.rounded(tokens, verifies),
            "tally": tally.to_json(),
            "differ": differ,
            "control": not arm.equal,
            "as_expected": bool(differ) != arm.equal
            and sent != 0
            and matrix.used_drafts(arm, len(found), tokens, verifies),
            **({} if sent is None else {"preempted": sent}),
            "seconds": round(s, 1),
        }
        self.rows[self.key(row)] = row
        shown = " ".join(f"{k}={v}" for k, v in row.items() if k != "arm")
        say(f"{arm.name}: {shown}")

    def _tally(
        self, found: Sequence[tuple[str, Completion]]
    ) -> tuple[Tally, list[str]]:
        """Answers held against the reference's, and the names of those that differ."""
        tally, differ = Tally(), set()
        for name, answer in found:
            wanted = self.reference[name]
            ids = list(answer.ids) == wanted[0]
            told = said(answer)
            same = told == wanted and finite(answer)
            tally.compared += 1
            tally.ids_equal += ids
            # After ids and reason three lists of the prompt, then the chosen ones.
            if wanted[5]:
                tally.logprobs += 1
                tally.logprobs_equal += told[2:] == wanted[2:] and finite(answer)
            if not same:
                differ.add(name)
                tally.first = tally.first or {"request": name, "ids": ids}
        return tally, sorted(differ)

    def facts(self) -> Row:
        """With the sizes of this proof."""
        small, large = self.shape.chunks
        return {
            **super().facts(),
            "acceptance": f"set by the oracle drafter, rate {RATE}",
            "layers": LAYERS,
            "new_tokens_per_prompt": self.shape.new,
            "chunk_sizes": {"small": small, "large": large},
        }

    def run(self, wanted: Collection[str], side_by_side: int) -> int:
        """The arms of these names, several at once; the exit status."""
        known = {arm.name: arm for arm in arms_of(self.shape)}
        with ThreadPoolExecutor(side_by_side) as pool:
            list(pool.map(self.one, [known[name] for name in wanted]))
        return self.finish()


class Overlapped(Server):
    """A server with overlap scheduling, the host's default, on the CPU too."""

    def command(self) -> list[str]:
        line = super().command()
        if self.device == "cpu":
            line.remove("--disable-overlap-schedule")
        return line


def main(args: argparse.Namespace) -> int:
    """Run the arms; 0 if every row is as expected."""
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    run = Run(args)
    if not run.reference and "plain" not in args.arms:
        say("found no reference in --state, expected arm plain to run first")
        return 2
    run.prepare()
    run.keep_earlier(args.arms)
    return run.run(args.arms, args.side_by_side)
