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
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sglang_exact import host
from sglang_exact.rehearsal import models, oracle
from sglang_exact.rehearsal.client import Completion
from sglang_exact.rehearsal.server import Server, draft_flags
from tools.proof import arms as proof_arms
from tools.proof.passes import DISABLE_VARIABLE
from tools.proof.traffic_arms import (
    ALONE,
    GPU,
    REHEARSAL,
    Arm,
    arms_of,
)
from tools.proof.traffic_asker import PHASES, Asker, said

# Where each compiler and tuner of the stack keeps what it made.
CACHES = (
    "TRITON_CACHE_DIR", "SGLANG_CACHE_DIR", "SGLANG_DG_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "TVM_FFI_CACHE_DIR",
    "CUDA_CACHE_PATH",
)  # fmt: skip
RATE = 0.7


class Run:
    """All arms of one call.

    Args:
        args: the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.shape = REHEARSAL if args.rehearsal else GPU
        # Compilers change folders: the caches named below must not depend on it.
        self.state = Path(args.state).resolve()
        self.models = self.state / "models"
        self.path = Path(args.out) / f"{args.name}.json"
        self.kept = self.state / "traffic-reference.json"
        self.reference: dict[str, Any] = {}
        self.ready = threading.Event()
        self.write_lock = threading.Lock()
        self.rows: list[dict[str, Any]] = []
        self.failed: dict[str, str] = {}
        self.info: dict[str, Any] = {}
        self.commands = [" ".join(["scripts/gpu_traffic", *sys.argv[1:]])]
        self.began = time.monotonic()
        if self.kept.exists():
            self.reference = json.loads(self.kept.read_text())
            self.ready.set()

    def keep_earlier(self, wanted: Sequence[str]) -> None:
        """Take over what an earlier call found of arms that are not run again."""
        if not self.path.exists():
            return
        found = json.loads(self.path.read_text())
        self.rows = [row for row in found["rows"] if row["arm"] not in wanted]
        failed = found["failed"].items()
        self.failed = {arm: why for arm, why in failed if arm not in wanted}
        self.commands = [*found["commands"], *self.commands]

    def prepare(self) -> None:
        """Model folders."""
        Path(self.args.out).mkdir(parents=True, exist_ok=True)
        self.models.mkdir(parents=True, exist_ok=True)
        if self.args.rehearsal:
            models.make_target(self.models / "target-4")
            for kind in ("dflash", "mtp"):
                models.make_draft(self.models / f"{kind}-4", kind)
            return
        models.make_27b_target(self.models / "target-4", 4)
        for kind in ("dflash", "mtp"):
            models.make_27b_draft(self.models / f"{kind}-4", kind, 4)

    def flags(self, arm: Arm) -> list[str]:
        """Flags of an arm's server; explicit pools, so that servers can be beside."""
        shape, width = self.shape, 4
        if self.args.rehearsal:
            draft = self.models / f"{arm.drafter}-4"
            flags = ["--context-length", str(shape.context)]
            if arm.requests:
                flags += ["--max-running-requests", str(arm.requests)]
            if arm.drafter:
                flags += draft_flags(arm.drafter, draft, width)
        else:
            width = 4 if arm.drafter == "mtp" else 8
            base = proof_arms.Arm(
                arm.name,
                arm.title,
                arm.drafter,
                width,
                requests=arm.requests or shape.rows,
            )
            tokens = shape.context * 8
            sizes = proof_arms.Sizes(4, shape.context, 0.95, tokens)
            flags = proof_arms.server_flags(base, self.models, sizes)
        if not arm.overlap and not self.args.rehearsal:
            flags.append("--disable-overlap-schedule")
        graph = "--cuda-graph-bs-decode"
        extra = list(arm.flags)
        if self.args.rehearsal and graph in extra:
            extra = extra[: extra.index(graph)]
        return [*flags, *extra]

    def server(self, arm: Arm, plan: Path) -> Server:
        """The arm's server, not started."""
        env: dict[str, str] = {}
        if not self.args.rehearsal:
            env["SGLANG_EXACT_TEST_DUMMY_WEIGHTS"] = "1"
        if arm.drafter and arm.oracle:
            env[oracle.VARIABLE] = str(plan)
            oracle.write_plan(plan, 0.0, [])
        if arm.disable:
            env[DISABLE_VARIABLE] = arm.disable
        if arm.fresh:
            fresh = self.state / f"empty-{arm.name}-{time.monotonic_ns()}"
            env |= {name: str(fresh / name.lower()) for name in CACHES}
        kind = Server if self.args.rehearsal and not arm.overlap else Overlapped
        return kind(
            self.models / "target-4",
            device="cpu" if self.args.rehearsal else "cuda",
            flags=self.flags(arm),
            env=env,
            log=self.state / f"traffic-{arm.name}.log",
            start_timeout_s=self.args.start_timeout,
        )

    def one(self, arm: Arm) -> None:
        """One arm; a failure is noted, not raised."""
        try:
            self._one(arm)
        except (RuntimeError, OSError, LookupError, ValueError) as error:
            self.failed[arm.name] = str(error)[-3000:]
            print(f"{arm.name}: FAILED\n{str(error)[-2500:]}", flush=True)
        finally:
            if arm.name == "plain":
                self.ready.set()
            self.write()

    def _one(self, arm: Arm) -> None:
        plan = self.state / f"traffic-oracle-{arm.name}.json"
        with self.server(arm, plan) as server:
            up = round(server.started_in_s)
            print(f"{arm.name}: up in {up} s", flush=True)
            self.info = self.info or server.info().get("sglang_exact") or {}
            asker = Asker(server, self.shape)
            if arm.name != "plain":
                self.ready.wait()
            prompts = asker.everything
            if arm.name != "plain" and not self.reference.keys() >= prompts.keys():
                raise RuntimeError(
                    f"found {len(self.reference)} plain answers in {self.kept}, "
                    f"expected {len(prompts)}; fix: run arm plain"
                )
            if arm.drafter and arm.oracle:
                known = [(p, self.reference[n][0]) for n, p in prompts.items()]
                oracle.write_plan(plan, RATE, known)
            for phase in arm.phases:
                began = time.monotonic()
                found = PHASES[phase](asker)
                self._judge(arm, phase, found, time.monotonic() - began)

    def _judge(
        self, arm: Arm, phase: str, found: Sequence[tuple[str, Completion]], s: float
    ) -> None:
        if arm.name == "plain" and phase in ALONE:
            self.reference |= {name: said(answer) for name, answer in found}
            self.kept.write_text(json.dumps(self.reference))
            if phase == ALONE[-1]:
                self.ready.set()
            return
        differ = sorted({n for n, a in found if said(a) != self.reference[n]})
        verifies = sum(answer.spec_verify_ct for _, answer in found)
        tokens = sum(len(answer.ids) for _, answer in found)
        # The first token is the prefill's, each verify gives one more of its own.
        kept = arm.oracle or tokens > len(found) + verifies
        row = {
            "arm": arm.name,
            "title": arm.title,
            "phase": phase,
            "drafter": arm.drafter,
            "oracle": arm.oracle and arm.drafter is not None,
            "answers": len(found),
            "tokens": tokens,
            "tokens_per_verify": round(tokens / verifies, 2) if verifies else None,
            "differ": differ,
            "control": not arm.equal,
            "as_expected": bool(differ) != arm.equal
            and bool(verifies) == bool(arm.drafter)
            and kept,
            "seconds": round(s, 1),
        }
        self.rows.append(row)
        shown = " ".join(f"{k}={v}" for k, v in row.items() if k != "arm")
        print(f"{arm.name}: {shown}", flush=True)

    def write(self) -> None:
        """The result so far; kept whole if this call is ended."""
        result = {
            "command": self.commands[-1],
            "commands": self.commands,
            "date": time.strftime("%Y-%m-%d"),
            "gpu": "none: rehearsal, interpreted kernels" if self.args.rehearsal
            else proof_arms.gpu(),
            "weights": "random, seeded per parameter",
            "acceptance": f"set by the oracle drafter, rate {RATE}",
            "layers": 4,
            "new_tokens_per_prompt": self.shape.new,
            "chunk_sizes": {"small": self.shape.chunks[0],
                            "large": self.shape.chunks[1]},
            "versions": {"sglang": host.version("sglang"), **host.stack_versions()},
            "attestation": self.info,
            "rows": self.rows,
            "failed": self.failed,
        }  # fmt: skip
        with self.write_lock:
            new = self.path.with_name(f".{self.path.name}")
            new.write_text(json.dumps(result, indent=1) + "\n")
            new.replace(self.path)


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
    known = {arm.name: arm for arm in arms_of(run.shape)}
    wanted = args.arms
    if not run.reference and "plain" not in wanted:
        print("found no reference in --state, expected arm plain to run first")
        return 2
    run.prepare()
    run.keep_earlier(wanted)
    skipped = []

    def one(name: str) -> None:
        if time.monotonic() - run.began > args.budget:
            skipped.append(name)
        else:
            run.one(known[name])

    with ThreadPoolExecutor(args.side_by_side) as pool:
        list(pool.map(one, wanted))
    bad = [r["arm"] for r in run.rows if not r["as_expected"]]
    seconds = time.monotonic() - run.began
    print(f"unexpected: {bad}; failed: {list(run.failed)}; not run: {skipped}; "
          f"{seconds:.0f} s")  # fmt: skip
    return 1 if bad or run.failed or not run.rows else 0
