# SPDX-License-Identifier: Apache-2.0
"""Prove the verifier's matrix on one GPU, with `sglang-exact verify` itself.

    scripts/gpu_verify --layers 4 --state DIR --out results/gpu [--arms plain,dflash]
    scripts/gpu_verify --state DIR --out DIR --rehearsal    # logic, without a GPU

The 27B's width, random weights (seeded), an oracle drafter. One arm is one server, one
after the other; the plain server is recorded first, and its record kept in --state for
later calls. Each ask of an arm is one call of `sglang-exact verify`, as a user makes
it, and its exit status is held against what is expected: equal, or a divergence where
the host is stock, a hook is off or a bit was planted. The JSON result is written anew
after every call; rows of other asks stay in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from sglang_exact import host
from sglang_exact.rehearsal import oracle
from sglang_exact.rehearsal.server import Server
from tools.proof import arms as proof_arms
from tools.proof import verifier_arms as verify_arms
from tools.proof import verifier_setup
from tools.proof.passes import DISABLE_VARIABLE
from tools.proof.planted_bit import Proxy, is_named
from tools.proof.verifier_arms import Arm, Ask, Scale
from tools.proof.verifier_calls import (
    FAREWELL,
    INTERRUPTED,
    Caller,
    as_expected,
    figures,
    shown,
)

# Seconds below which a server or a call is not begun.
LEAST_START, LEAST_CALL = 20.0, FAREWELL + 3.0
BREAKS = (RuntimeError, OSError, LookupError, ValueError)


class Run:
    """All arms of one call.

    Args:
        args: the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.scale = verify_arms.REHEARSAL
        if not args.rehearsal:
            self.scale = Scale(args.new, args.repeats, args.long_repeats)
        self.state = Path(args.state).resolve()
        self.models = self.state / "models"
        name = args.name or f"verify-{args.layers}"
        self.path = Path(args.out).resolve() / f"{name}.json"
        self.rows: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self.starts: dict[str, float] = {}
        self.not_run: list[str] = []
        self.bad: list[str] = []
        self.info: dict[str, Any] = {}
        self.commands = [shlex.join(["scripts/gpu_verify", *sys.argv[1:]])]
        self.began = time.monotonic()
        self.caller = Caller(self.state, self.left)

    def keep_earlier(self) -> None:
        """Take over what earlier calls found; what is asked again replaces it."""
        if not self.path.exists():
            return
        found = json.loads(self.path.read_text())
        self.rows = {f"{r['arm']} {r['ask']}": r for r in found["rows"]}
        self.failed, self.starts = found["failed"], found["start_s"]
        self.not_run, self.info = found["not_run"], found["attestation"]
        self.commands = [*found["commands"], *self.commands]
        self.bad = [k for k, r in self.rows.items() if not r["as_expected"]]

    def prepare(self) -> None:
        """Folders, models, prompts."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        layers, rehearsal = self.args.layers, self.args.rehearsal
        verifier_setup.make_models(self.models, layers, rehearsal)
        verifier_setup.write_requests(self.state / "requests.jsonl", self.scale)

    def left(self) -> float:
        """Seconds of --budget that are left."""
        return float(self.args.budget - (time.monotonic() - self.began))

    def plan(self, arm: Arm) -> Path:
        """The oracle's file of an arm's server."""
        return self.state / f"verify-oracle-{arm.name}.json"

    def server(self, arm: Arm) -> Server:
        """The arm's server, not started."""
        env: dict[str, str] = {}
        if not self.args.rehearsal:
            env["SGLANG_EXACT_TEST_DUMMY_WEIGHTS"] = "1"
            env["CUDA_VISIBLE_DEVICES"] = self.args.gpu
        if arm.drafter:
            env[oracle.VARIABLE] = str(self.plan(arm))
            oracle.write_plan(self.plan(arm), 0.0, [])
        if arm.disable:
            env[DISABLE_VARIABLE] = arm.disable
        env |= dict(arm.env)
        layers = self.args.layers
        return Server(
            self.models / f"target-{layers}",
            mode=arm.mode,
            device="cpu" if self.args.rehearsal else "cuda",
            deterministic=arm.deterministic,
            flags=verifier_setup.server_flags(arm, self.models, layers, self.scale),
            env=env,
            log=self.state / f"verify-{arm.name}.log",
            start_timeout_s=min(self.args.start_timeout, self.left()),
        )

    def record_of(self, arm: Arm, group: str) -> Path:
        """The record that an arm is compared with: the plain one if it has no own.

        Raises:
            ValueError: there is none yet.
        """
        tail = f"{self.args.layers}-{self.scale.new}-{group}.jsonl"
        for name in dict.fromkeys((arm.reference, "plain")):
            path = self.state / f"record-{name}-{tail}"
            if path.exists() or group in arm.records:
                return path
        raise ValueError(f"found no {path}, expected a record; fix: run arm plain")

    def one(self, arm: Arm, asks: Sequence[Ask]) -> None:
        """One arm; a failure is noted, not raised."""
        todo = [f"record-{group}" for group in arm.records] + [a.name for a in asks]
        todo += [verify_arms.START] * bool(arm.refusal)
        keys = [f"{arm.name} {name}" for name in todo]
        self.not_run = [key for key in self.not_run if key not in keys] + keys
        if self.left() < LEAST_START:
            say(f"{arm.name}: not run, no time is left")
            return
        self.failed.pop(arm.name, None)
        try:
            with self.server(arm) as server:
                self.starts[arm.name] = round(server.started_in_s, 1)
                say(f"{arm.name}: up in {server.started_in_s:.0f} s")
                if arm.mode == "exact" and not arm.disable and not arm.env:
                    self.info = self.info or server.info().get("sglang_exact") or {}
                for group in arm.records:
                    self.guarded(arm, f"record-{group}", server, group)
                for ask in asks:
                    self.guarded(arm, ask.name, server, ask)
                if arm.refusal:
                    raise LookupError("found a server that started, expected none")
        except BREAKS as error:
            if arm.refusal:
                self.refused(arm, error)
            else:
                self.fail(arm.name, error)

    def refused(self, arm: Arm, error: BaseException) -> None:
        """A row for a server that did not start, as it shall; else a failure."""
        key = f"{arm.name} {verify_arms.START}"
        self.not_run.remove(key)
        if arm.refusal not in str(error):
            self.rows.pop(key, None)
            self.fail(arm.name, error)
            return
        row = {"expected": verify_arms.NO_START, "exit_status": None, "seconds": 0}
        row |= {"drafter": arm.drafter, "as_expected": True, "said": arm.refusal}
        named = {"arm": arm.name, "ask": verify_arms.START}
        self.rows[key] = {**named, **row, "arms": []}
        say(f"{arm.name}: refused to start: {arm.refusal}")
        self.write()

    def guarded(self, arm: Arm, name: str, server: Server, what: Ask | str) -> None:
        """One call on a server; a failure is noted and the next call goes on."""
        key = f"{arm.name} {name}"
        if self.left() < LEAST_CALL:
            say(f"{key}: not run, no time is left")
            return
        self.failed.pop(key, None)
        began = time.monotonic()
        try:
            if isinstance(what, Ask):
                row = self.ask(arm, what, server.url)
            else:
                row = self.record(arm, what, server.url)
            row["seconds"] = round(time.monotonic() - began, 1)
            self.rows[key] = {"arm": arm.name, "ask": name, **row}
            self.bad = [k for k, r in self.rows.items() if not r["as_expected"]]
            say(shown(self.rows[key]))
        except BREAKS as error:
            self.rows.pop(key, None)
            self.fail(key, error)
        self.not_run.remove(key)
        self.write()

    def fail(self, key: str, error: BaseException) -> None:
        self.failed[key] = str(error)[-3000:]
        say(f"{key}: FAILED\n{str(error)[-2500:]}")
        self.write()

    def record(self, arm: Arm, group: str, url: str) -> dict[str, Any]:
        """`sglang-exact record` of one group; goes on with what there is."""
        path = self.record_of(arm, group)
        words = ["record", "--base-url", url, "--output-file", path.name]
        words += ["--arms", ",".join(verify_arms.GROUPS[group])]
        words += self.scale.options(group)
        words += ["--resume"] * path.exists()
        status, said = self.caller.call(f"{arm.name}-record-{group}", words)
        row: dict[str, Any] = {"command": self.command(words), "expected": "exit 0"}
        row |= {"exit_status": status, "as_expected": status == 0, "arms": []}
        return row if status == 0 else {**row, "said": said}

    def ask(self, arm: Arm, ask: Ask, url: str) -> dict[str, Any]:
        """`sglang-exact verify`, once; through the proxy for a planted bit."""
        record = self.record_of(arm, ask.group)
        if arm.drafter:
            verifier_setup.write_plan(self.plan(arm), record, ask.group, ask.rate)
        with contextlib.ExitStack() as stack:
            proxy = stack.enter_context(Proxy(url)) if ask.planted else None
            words = ["verify", "--base-url", proxy.url if proxy else url]
            words += ["--reference", record.name, *ask.options(self.scale, url)]
            status, said, words = self.caller.verify(f"{arm.name}-{ask.name}", words)
        path = self.state / f"verify-{arm.name}-{ask.name}.json"
        result = json.loads(path.read_text()) if path.exists() else {"arms": []}
        found = figures(result)
        fine = as_expected(ask, status, found, self.args.rehearsal)
        row: dict[str, Any] = {
            "command": self.command(words),
            "reference": record.name,
            "drafter": arm.drafter,
            "oracle_rate": ask.rate if arm.drafter else None,
            "expected": ask.expect,
            "exit_status": status,
            "as_expected": fine,
            "headline": result.get("headline"),
            "arms": found,
        }
        if proxy is not None:
            row["planted"] = proxy.planted and proxy.planted._asdict()
            row["as_expected"] &= bool(found) and is_named(proxy.planted, found[0])
        return row if path.exists() else {**row, "said": said}

    @staticmethod
    def command(words: Sequence[str]) -> str:
        return shlex.join(["sglang-exact", *words])

    def write(self) -> None:
        """The result so far; kept whole if this call is ended."""
        result = {
            "command": self.commands[-1],
            "commands": self.commands,
            "date": time.strftime("%Y-%m-%d"),
            "gpu": "none: rehearsal, interpreted kernels" if self.args.rehearsal
            else proof_arms.gpu(),
            "weights": "random, seeded per parameter",
            "acceptance": "set by the oracle drafter, see oracle_rate",
            "layers": self.args.layers,
            "new_tokens_per_prompt": self.scale.new,
            "versions": {"sglang": host.version("sglang"), **host.stack_versions()},
            "start_s": self.starts,
            "attestation": self.info,
            "rows": list(self.rows.values()),
            "failed": self.failed,
            "not_run": self.not_run,
        }  # fmt: skip
        new = self.path.with_name(f".{self.path.name}")
        new.write_text(json.dumps(result, indent=1) + "\n")
        new.replace(self.path)

    def finish(self) -> int:
        """The last line and the exit status; 0 if all is as expected."""
        self.write()
        lost = list(self.failed)
        say(
            f"{len(self.rows)} calls; unexpected: {self.bad}; "
            f"without a result: {lost}; not run: {self.not_run}; "
            f"{time.monotonic() - self.began:.0f} s"
        )
        return 1 if self.bad or self.failed or self.not_run or not self.rows else 0


def say(text: str) -> None:
    """A line, at once."""
    print(text, flush=True)


def stop(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main(args: argparse.Namespace) -> int:
    """Run the arms; 0 if every call is as expected."""
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    run = Run(args)
    # A scheduler ends jobs with SIGTERM; servers must not outlive this.
    signal.signal(signal.SIGTERM, stop)
    run.prepare()
    run.keep_earlier()
    try:
        for name in run.args.arms:
            arm = verify_arms.BY_NAME[name]
            asks = [a for a in arm.asks if a.name in (run.args.asks or [a.name])]
            start = arm.refusal and verify_arms.START in (
                run.args.asks or [verify_arms.START]
            )
            if asks or arm.records or start:
                run.one(arm, asks)
    except KeyboardInterrupt:
        run.finish()
        return INTERRUPTED
    return run.finish()
