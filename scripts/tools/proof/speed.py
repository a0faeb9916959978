# SPDX-License-Identifier: Apache-2.0
"""Measure the overlay against the host on one GPU, without a model and without a hub.

    scripts/gpu_bench --out DIR [--only decode-table,accept] [--arms plain,...]
    scripts/gpu_bench --rehearsal --out DIR       the same on the CPU: wiring alone

The 27B's width with RANDOM WEIGHTS (seeded) and acceptance SET BY AN ORACLE: speeds are
those of the shapes, acceptance is no draft model's. One server per arm, each started
once: plain, exact-dflash2, host-plain, host-dflash2 and one per further width. Records
of `sglang-exact bench` lie in --out after every stage; a later call with the same --out
asks only what is not there yet (--again: everything), with the plain answers of the
first. --budget is kept to: a stage is cut off at its end, and what it has is a row that
says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import jinja2

from sglang_exact.bench import provenance, servers
from sglang_exact.bench import runs as report_runs
from sglang_exact.bench.cost_model import inputs
from sglang_exact.bench.cost_model import model as modelling
from sglang_exact.bench.cost_model import tables as showing
from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.report import build as reporting
from sglang_exact.bench.servers import Served
from sglang_exact.view.output import now, write_atomic
from tools.proof import matrix
from tools.proof import speed_arms as bench_arms
from tools.proof import speed_books as bench_books
from tools.proof.matrix import INTERRUPTED
from tools.proof.speed_arms import Role
from tools.proof.speed_setup import Place
from tools.proof.speed_stages import NOTES, Stages

FAILED = 2
# GPU time is dear: whatever breaks in one stage costs that stage alone.
BREAKS = (
    ArithmeticError, AttributeError, ExceptionGroup, ImportError, LookupError, OSError,
    RuntimeError, TypeError, ValueError, jinja2.TemplateError,
)  # fmt: skip


def say(text: str) -> None:
    """Progress, at once."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


class Bench:
    """One call: which arms and stages, where, and what came of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.scale = args.scale
        device, layers = ("cpu", 4) if args.rehearsal else ("cuda", args.layers)
        self.place = Place(
            self.out / "models", device, layers, args.mem_fraction, args.host_backends
        )
        label = f"27B width, {layers} layers, random weights"
        self.stages = Stages(
            self.out,
            provenance.scrub_words(["scripts/gpu_bench", *sys.argv[1:]]),
            self.scale,
            modelling.keep_rate(args.acceptance, args.width),
            say,
            "rehearsal on the CPU: speeds say nothing" if args.rehearsal else label,
            tuple(args.note),
            args.gpu_index,
            not args.rehearsal,
        )
        self.failed = self.stages.failed
        self.not_run: list[str] = []
        self.began = time.monotonic()
        self.here = self.setting()
        self.kept = bench_books.earlier(self.out, self.here)
        self.times: list[dict[str, Any]] = self.kept.get("stages", [])
        self.open: dict[str, str] = self.kept.get("open", {})

    def setting(self) -> dict[str, Any]:
        """What all rows in --out have to share; contexts and arms are added freely."""
        args, scale = self.args, self.scale
        host = any(role.arm.mode == "stock" for role in args.roles)
        return {
            "machine": provenance.machine({"gpu": provenance.gpus(args.gpu_index)}),
            "rehearsal": args.rehearsal,
            "layers": args.layers,
            "width": args.width,
            "acceptance": args.acceptance,
            **({"host_backends": args.host_backends} if host else {}),
            "mem_fraction": args.mem_fraction,
            "new_tokens": [scale.new_tokens, scale.decode_tokens],
            "load": [list(pair) for pair in scale.load],
        }

    def kept_setting(self) -> dict[str, Any]:
        """What later calls have to share; how the host ran only where it has rows."""
        kept = {**self.kept.get("setting", {}), **self.here}
        if not self.stages.has_rows("host-"):
            kept.pop("host_backends", None)
        return kept

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return float(self.args.budget) - (time.monotonic() - self.began)

    def run(self, roles: list[Role], stages: list[str]) -> None:
        """Every arm, every stage of it that was asked for and is not there yet."""
        asked = [(role, self.asked(role, stages)) for role in roles]
        for role, wanted in asked:
            # Whatever ends this call: what it did not come to is not done.
            self.mark(role, wanted, "not reached")
        for role, wanted in asked:
            if not wanted:
                continue
            if self.left() <= 0:
                self.not_run.append(role.arm.name)
                self.mark(role, wanted, "no time was left")
                continue
            wanted = self.possible(role, wanted)
            if not wanted:
                continue
            try:
                self.arm(role, wanted)
            except BREAKS as error:
                self.failed.append(f"{role.arm.name}: {str(error)[-1500:]}")
                self.mark(role, wanted, "the server did not start")
                say(f"{role.arm.name}: FAILED\n{str(error)[-3000:]}")
            self.summary()

    def asked(self, role: Role, stages: list[str]) -> list[str]:
        """The stages of an arm that this call is to measure."""
        wanted = [s for s in stages if s in role.stages]
        if "accept" in wanted and "widths" in wanted:
            wanted.remove("widths")
        if self.args.again:
            return wanted
        return [s for s in wanted if not self.is_there(role, s)]

    def mark(self, role: Role, stages: list[str], why: str) -> None:
        """Remember, for later calls as well, what is still to be measured."""
        self.open |= {f"{role.arm.name} {stage}": why for stage in stages}

    def is_there(self, role: Role, stage: str) -> bool:
        """Whether an earlier call measured a stage; says so."""
        if not self.stages.is_done(role, stage):
            return False
        say(f"{role.arm.name} {stage}: is in {self.out}")
        self.open.pop(f"{role.arm.name} {stage}", None)
        return True

    def possible(self, role: Role, stages: list[str]) -> list[str]:
        """The stages whose reference has answered; the others are reported."""
        lacking = self.stages.lacking(role, stages)
        if lacking:
            self.failed.append(
                f"{role.arm.name}: found no answers of {role.reference} for "
                f"{', '.join(lacking)} in {self.stages.books.path}; expected arm "
                f"{role.reference} to run them first; fix: add it to --arms"
            )
            self.mark(role, lacking, f"no answers of {role.reference}")
            say(self.failed[-1])
            self.summary()
        return [stage for stage in stages if stage not in lacking]

    def arm(self, role: Role, stages: list[str]) -> None:
        """Start the arm's server, run its stages, stop it.

        Raises RuntimeError where the server does not start.
        """
        arm, gpu = role.arm, self.args.gpu_index
        say(f"{arm.name}: starting")
        with matrix.server(
            arm, self.place.target(), plan=self.stages.plan,
            log=self.out / f"{arm.name}.log", device=self.place.device,
            flags=self.place.flags(arm, self.scale),
            env=bench_arms.forced(arm, self.args.acceptance),
            gpus=None if gpu is None else str(gpu),
            start_timeout_s=min(self.args.start_timeout, self.left()),
        ) as server:  # fmt: skip
            self.timed(arm.name, "start", server.started_in_s)
            for stage in stages:
                if self.left() <= 0:
                    self.not_run.append(f"{arm.name} {stage}")
                    self.mark(role, [stage], "no time was left")
                    continue
                self.mark(role, [stage], "cut off")
                began, failed = time.monotonic(), len(self.failed)
                try:
                    asyncio.run(self.stage(role, stage, server.url))
                except BREAKS as error:
                    text = _said(error)
                    self.failed.append(f"{arm.name} {stage}: {text}")
                    say(f"    {stage}: {text}")
                if len(self.failed) == failed:
                    del self.open[f"{arm.name} {stage}"]
                else:
                    self.mark(role, [stage], self.failed[-1])
                self.timed(arm.name, stage, time.monotonic() - began)
                self.summary()

    async def stage(self, role: Role, stage: str, url: str) -> None:
        """One stage on the open server."""
        works: dict[str, Callable[[Role, Served], Awaitable[None]]] = {
            "memory": self.stages.memory,
            "decode-table": self.stages.decode,
            "accept": self.stages.accept,
            "in-step": self.stages.in_step,
            "acceptance": self.stages.acceptance,
            "widths": self.stages.widths,
            bench_arms.PREFIX: self.stages.prefix_cache,
        }
        address = servers.Address(role.arm.name, url)
        async with asyncio.timeout(self.left()), AsyncExitStack() as stack:
            timeout = self.args.request_timeout
            (served,) = await servers.open_all(stack, [address], timeout=timeout)
            await works[stage](role, served)

    def timed(self, arm: str, stage: str, seconds: float) -> None:
        """Remember and show how long something took."""
        self.times.append({"arm": arm, "stage": stage, "seconds": round(seconds, 1)})
        say(f"{arm}: {stage} took {seconds:.0f} s")

    def summary(self) -> None:
        """Cost model, report, times and failures, as far as things have come."""
        for make in (self.cost_model, self.report):
            try:
                make()
            except BREAKS as error:
                text = f"{make.__name__}: {type(error).__name__} {error}"
                if text not in self.failed:
                    self.failed.append(text)
        command = " ".join(self.stages.command)
        text = json.dumps(
            {
                "command": command,
                "commands": [*self.kept.get("commands", []), command],
                "date": now(),
                "setting": self.kept_setting(),
                "notes": list(NOTES),
                "stages": self.times,
                "seconds": round(time.monotonic() - self.began, 1),
                "failed": self.failed,
                "not_run": self.not_run,
                "open": self.open,
            },
            indent=1,
        )
        write_atomic(self.out / bench_books.SUMMARY, f"{text}\n".encode())

    def report(self) -> None:
        """One page and one Markdown file of all records."""
        verbs = ("accept", "decode-table", "memory", "cost-model")
        paths = [p for v in verbs if (p := self.out / f"{v}.json").exists()]
        loaded, problems = report_runs.load_all(paths)
        made = reporting.build(loaded, problems, now())
        write_atomic(self.out / "report.html", reporting.html(made).encode())
        write_atomic(self.out / "report.md", reporting.markdown(made).encode())

    def cost_model(self) -> None:
        """From the exact arms' steps at one in flight, where there are any."""
        paths = [self.out / f"{verb}.json" for verb in ("accept", "memory")]
        loaded, _ = report_runs.load_all(p for p in paths if p.exists())
        found = inputs.steps(loaded)
        names = {f.server for f in found if not f.server.startswith("host-")}
        try:
            title, steps = inputs.choose(
                found, servers=sorted(names), load=bench_arms.TITLE
            )
            model = modelling.Model(steps)
        except (CannotRun, ValueError):
            return
        limit, why = inputs.limit(
            loaded, self.args.bandwidth, None, self.args.gpu_index
        )
        swept = [f.step for f in found if "acceptance set" in f.load]
        # Made anew from the records: nothing of an earlier one is in it.
        (self.out / "cost-model.json").unlink(missing_ok=True)
        recorder = self.stages.record(
            "cost-model", showing.settings(model, title, limit)
        )
        recorder.run.rows = showing.rows(
            model, showing.WIDTHS, (1, 2, 3, 4, 5.46, 6, 8, 10, 12), limit,
            modelling.checks_against(model, swept),
        )  # fmt: skip
        recorder.run.provenance = loaded[0].run.provenance
        for text in [*model.notes, *([why] if why else [])]:
            recorder.note(text)
        recorder.finish()


def _said(error: BaseException) -> str:
    """What stopped a stage, for people."""
    if isinstance(error, TimeoutError):
        return "--budget is used up; what there is is kept"
    kind = "" if isinstance(error, CannotRun) else f"{type(error).__name__} "
    return f"{kind}{error}"


def main(args: argparse.Namespace) -> int:
    """Measure; 0 if everything that was asked for is there."""
    signal.signal(signal.SIGTERM, matrix.stop)
    try:
        bench = Bench(args)
    except ValueError as error:
        say(str(error))
        return FAILED
    try:
        bench.run(args.roles, args.stages)
    except KeyboardInterrupt:
        bench.failed.append("interrupted")
        bench.summary()
        say("interrupted; what was measured is kept")
        return INTERRUPTED
    bench.stages.finish({key.rpartition(" ")[2] for key in bench.open})
    bench.summary()
    for text in bench.failed:
        say(f"FAILED: {text}")
    say(f"not run: {bench.not_run or 'nothing'}; report: {bench.out / 'report.html'}")
    if bench.open:
        say(f"still to be measured: {', '.join(sorted(bench.open))}")
    return FAILED if bench.failed or bench.not_run else 0
