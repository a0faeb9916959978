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
import time
from collections.abc import Sequence
from pathlib import Path

from sglang_exact.rehearsal.server import Server
from tools.proof import matrix, verifier_setup
from tools.proof import verifier_arms as verify_arms
from tools.proof.arms import Arm
from tools.proof.matrix import BREAKS, INTERRUPTED, Row, say
from tools.proof.planted_bit import Proxy, is_named
from tools.proof.verifier_arms import Ask, Scale
from tools.proof.verifier_calls import FAREWELL, Caller, as_expected, figures, shown

# Seconds below which a server or a call is not begun.
LEAST_START, LEAST_CALL = 20.0, FAREWELL + 3.0


def named(arm: Arm, ask: str) -> Row:
    """What a row begins with."""
    return {"arm": arm.name, "title": arm.title, "ask": ask}


def told(found: Sequence[Row]) -> Row:
    """What the verifier said, arm by arm, and added up."""
    sums = {name: sum(one[name] for one in found) for name in ("compared", "different")}
    return {"tally": sums, "arms": list(found)}


def command(words: Sequence[str]) -> str:
    """A call as a user makes it."""
    return shlex.join(["sglang-exact", *words])


class Run(matrix.Matrix):
    """All arms of one call.

    Args:
        args: the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        name = args.name or f"verify-{args.layers}"
        super().__init__("gpu_verify", args, Path(args.out) / f"{name}.json")
        self.scale = verify_arms.REHEARSAL
        if not args.rehearsal:
            self.scale = Scale(args.new, args.repeats, args.long_repeats)
        self.caller = Caller(self.state, self.left)

    def prepare(self) -> None:
        """Folders, models, prompts."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        matrix.make_models(self.models, self.args.layers, self.rehearsal)
        verifier_setup.write_requests(self.state / "requests.jsonl", self.scale)

    def plan(self, arm: Arm) -> Path:
        """The oracle's file of an arm's server."""
        return self.state / f"verify-oracle-{arm.name}.json"

    def server(self, arm: Arm) -> Server:
        """The arm's server, not started."""
        layers = self.args.layers
        return matrix.server(
            arm,
            self.models / f"target-{layers}",
            plan=self.plan(arm),
            log=self.state / f"verify-{arm.name}.log",
            device=self.device,
            flags=verifier_setup.server_flags(arm, self.models, layers, self.scale),
            gpus=self.args.gpu,
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
        self.rows[key] = {**named(arm, verify_arms.START), **row, **told([])}
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
            self.rows[key] = {**named(arm, name), **row}
            say(shown(self.rows[key]))
        except BREAKS as error:
            self.rows.pop(key, None)
            self.fail(key, error)
        self.not_run.remove(key)
        self.write()

    def record(self, arm: Arm, group: str, url: str) -> Row:
        """`sglang-exact record` of one group; goes on with what there is."""
        path = self.record_of(arm, group)
        words = ["record", "--base-url", url, "--output-file", path.name]
        words += ["--arms", ",".join(verify_arms.GROUPS[group])]
        words += self.scale.options(group)
        words += ["--resume"] * path.exists()
        status, said = self.caller.call(f"{arm.name}-record-{group}", words)
        row: Row = {"command": command(words), "expected": "exit 0"}
        row |= {"exit_status": status, "as_expected": status == 0, **told([])}
        return row if status == 0 else {**row, "said": said}

    def ask(self, arm: Arm, ask: Ask, url: str) -> Row:
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
        row: Row = {
            "command": command(words),
            "reference": record.name,
            "drafter": arm.drafter,
            "oracle_rate": ask.rate if arm.drafter else None,
            "expected": ask.expect,
            "exit_status": status,
            "as_expected": fine,
            "headline": result.get("headline"),
            **told(found),
        }
        if proxy is not None:
            row["planted"] = proxy.planted and proxy.planted._asdict()
            row["as_expected"] &= bool(found) and is_named(proxy.planted, found[0])
        return row if path.exists() else {**row, "said": said}

    def facts(self) -> Row:
        """With the sizes of this proof."""
        return {
            **super().facts(),
            "acceptance": "set by the oracle drafter, see oracle_rate",
            "layers": self.args.layers,
            "new_tokens_per_prompt": self.scale.new,
        }


def main(args: argparse.Namespace) -> int:
    """Run the arms; 0 if every call is as expected."""
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    run = Run(args)
    signal.signal(signal.SIGTERM, matrix.stop)
    run.prepare()
    run.keep_earlier()
    try:
        for name in args.arms:
            arm = verify_arms.BY_NAME[name]
            asks = [a for a in arm.phases if a.name in (args.asks or [a.name])]
            start = arm.refusal and verify_arms.START in (
                args.asks or [verify_arms.START]
            )
            if asks or arm.records or start:
                run.one(arm, asks)
    except KeyboardInterrupt:
        run.finish()
        return INTERRUPTED
    return run.finish()
