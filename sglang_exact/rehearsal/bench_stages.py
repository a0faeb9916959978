# SPDX-License-Identifier: Apache-2.0
"""What `scripts/gpu_bench` asks one server, and the records it keeps.

The measuring is that of `sglang-exact bench`; here servers come one after the other, so
the plain answers that exactness and the oracle need are kept in a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_exact.bench import (
    accept,
    decode_table,
    memory,
    provenance,
    report_runs,
    stats,
)
from sglang_exact.bench import cost_model as modelling
from sglang_exact.bench.datasets import Dataset
from sglang_exact.bench.exactness import total
from sglang_exact.bench.run import BenchRun, Recorder, load, write_atomic
from sglang_exact.bench.servers import Served
from sglang_exact.rehearsal import bench_arms, oracle
from sglang_exact.rehearsal.bench_arms import Role, Scale
from sglang_exact.verify.console import Silent
from sglang_exact.verify.model import Sample
from sglang_exact.verify.record import sample_from_json, sample_to_json

Row = dict[str, Any]
NOTES = (
    "random weights, seeded by parameter name: speeds are those of the shapes",
    "acceptance was set by an oracle, it is not a draft model's",
    "one server at a time: between servers clocks may have moved, ratios are of "
    "medians",
)


class Books:
    """The plain answers, kept in a file so that a later call can go on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.accept: dict[str, accept.Book] = {}
        self.decode: dict[str, dict[int, Sample]] = {}
        if path.exists():
            self._read(json.loads(path.read_text()))

    def _read(self, raw: dict[str, Any]) -> None:
        for name, book in raw["accept"].items():
            answers = {k: sample_from_json(v) for k, v in book["answers"].items()}
            speeds = {int(c): v for c, v in book["tok_s"].items()}
            self.accept[name] = accept.Book(answers, speeds)
        for name, found in raw["decode"].items():
            self.decode[name] = {int(n): sample_from_json(s) for n, s in found.items()}

    def save(self) -> None:
        """Write everything."""
        raw = {
            "accept": {
                name: {
                    "answers": {k: sample_to_json(v) for k, v in b.answers.items()},
                    "tok_s": b.tok_s,
                }
                for name, b in self.accept.items()
            },
            "decode": {
                name: {n: sample_to_json(s) for n, s in found.items()}
                for name, found in self.decode.items()
            },
        }
        write_atomic(self.path, json.dumps(raw).encode())


@dataclass(slots=True)
class Stages:
    """The stages of one run of `scripts/gpu_bench`.

    Attributes:
        out: folder of the records.
        command: for the records, without secrets.
        scale: how much is asked.
        rate: part of the oracle's drafts that are right, outside the acceptance stage.
        say: progress, one line.
        label: of the records.
        notes: further ones of the records.
        gpu_index: for NVML; None for the only GPU.
        nvml: whether NVML is asked at all.
        failed: what went wrong on the way.
    """

    out: Path
    command: list[str]
    scale: Scale
    rate: float
    say: Callable[[str], None]
    label: str = "27B width, random weights"
    notes: tuple[str, ...] = ()
    gpu_index: int | None = None
    nvml: bool = True
    failed: list[str] = field(default_factory=list)
    books: Books = field(init=False)
    data: Dataset = field(init=False)

    def __post_init__(self) -> None:
        self.books = Books(self.out / "plain-answers.json")
        self.data = bench_arms.data_set(self.scale)

    @property
    def plan(self) -> Path:
        """The oracle's file."""
        return self.out / "oracle.json"

    def record(self, verb: str, settings: Row) -> Recorder:
        """The record of a verb in --out, new or as an earlier call left it."""
        path = self.out / f"{verb}.json"
        run = load(path) if path.exists() else BenchRun(verb, self.label)
        run.notes = list(dict.fromkeys([*run.notes, *NOTES, *self.notes]))
        run.command = self.command
        run.settings |= settings
        return Recorder(run, path)

    def keep(self, recorder: Recorder, served: Served, row: Row, *same: str) -> None:
        """Put a row in the place of one of an earlier call, with its server.

        `same` are the keys that, with the server, tell a row from another.
        """
        run, keys = recorder.run, ("server", *same)
        run.rows = [r for r in run.rows if any(r[k] != row[k] for k in keys)]
        run.rows.append(row)
        if any("exactness" in row for row in run.rows):
            run.exactness = total(run.rows)
        before = [s for s in report_runs.servers(run) if s.get("name") != served.name]
        seeds = {"prompts": bench_arms.SEED}
        run.provenance = provenance.collect([*before, served.facts], seeds)
        run.complete = False
        recorder.save()

    def finish(self) -> None:
        """Everything that was asked for is measured."""
        for verb in ("accept", "decode-table", "memory"):
            if (self.out / f"{verb}.json").exists():
                self.record(verb, {}).finish()

    def tell_oracle(self, rate: float, known: list[tuple[Any, Any]]) -> None:
        """What the drafter knows, and how much of it is right."""
        oracle.write_plan(self.plan, rate, known)

    def known(self, reference: str) -> list[tuple[Any, Any]]:
        """Prompts with their plain continuations."""
        answers = self.books.accept[reference].answers
        prompts = [(r, answers.get(r.id)) for r in self.data.prompts]
        return [(r.ids, s.ids) for r, s in prompts if s is not None]

    def lacking(self, role: Role, stages: list[str]) -> list[str]:
        """Stages for which the reference's answers are not known yet."""
        if role.arm.name == role.reference:
            return []
        answers = dict.fromkeys(bench_arms.STAGES, self.books.accept)
        found: dict[str, Any] = {**answers, "decode-table": self.books.decode}
        return [s for s in stages if s != "memory" and role.reference not in found[s]]

    async def memory(self, role: Role, served: Served) -> None:
        """Before anything is asked: what the host names and what NVML sees."""
        recorder = self.record("memory", {"unit": "GiB"})
        gpu = None
        try:
            gpu = memory.device(self.gpu_index) if self.nvml else None
        except memory.NoNvml as error:
            recorder.note(f"NVML is left out: {error}")
        usage = await memory.usage(served)
        row = memory.row(served, usage, served.name == "plain", gpu)
        self.keep(recorder, served, row)

    async def accept(
        self, role: Role, served: Served, title: str = bench_arms.TITLE
    ) -> None:
        """Speed at every concurrency, answers against the reference's."""
        if served.name != role.reference:
            self.tell_oracle(self.rate, self.known(role.reference))
        await self.loads(role, served, title, self.scale.load)
        if role.arm.mode == "stock" and role.arm.drafter and title == bench_arms.TITLE:
            # Stock verify leaves plain decoding's ids, and with them the oracle. With
            # its own answers as continuation its acceptance comes near the setting.
            await self.own_answers(role, served)

    async def loads(
        self, role: Role, served: Served, title: str, load_: tuple[tuple[int, int], ...]
    ) -> None:
        """One row per concurrency in the accept record."""
        data = replace(self.data, title=title)
        plan = accept.Plan(
            (self.data,), [c for c, _ in load_], self.scale.prompts,
            self.scale.new_tokens, ignore_eos=True,
        )  # fmt: skip
        recorder = self.record(
            "accept", plan.settings() | {"load": [list(pair) for pair in load_]}
        )
        book = self.books.accept.setdefault(role.reference, accept.Book())
        scratch = Recorder(BenchRun("accept"), self.out / "unfinished.json")
        for concurrency, count in load_:
            own = accept.Plan(
                (data,), (concurrency,), count, self.scale.new_tokens, ignore_eos=True
            )
            unit = accept.Unit(
                served, served.name == role.reference, data, concurrency, own
            )
            self.failed += await unit.run(book, scratch, Silent())
            row = scratch.run.rows[-1]
            self.say(f"    {title}, {concurrency} in flight: {_brief(row)}")
            self.keep(recorder, served, row, "title", "concurrency")
        scratch.path.unlink(missing_ok=True)
        self.books.save()

    async def own_answers(self, role: Role, served: Served) -> None:
        """The same load with the server's own answers as the oracle's continuation."""
        load_, known = self.scale.load[:1], []
        for request in self.data.take(sum(load_[0])):
            asked = bench_arms.greedy(request, self.scale.new_tokens)
            answer = await served.client.ask(asked)
            if answer.sample is not None:
                known.append((request.ids, answer.sample.ids))
        self.tell_oracle(self.rate, known)
        title = f"{bench_arms.TITLE}, oracle of its own answers"
        await self.loads(role, served, title, load_)

    async def acceptance(self, role: Role, served: Served) -> None:
        """Speed over acceptance length, one in flight."""
        for length in self.scale.swept:
            if length > role.arm.tokens:
                continue
            rate = modelling.keep_rate(length, role.arm.tokens)
            self.tell_oracle(rate, self.known(role.reference))
            title = f"{bench_arms.TITLE}, acceptance set to {length:g}"
            await self.loads(role, served, title, self.scale.load[:1])

    async def widths(self, role: Role, served: Served) -> None:
        """One in flight for the cost model; the main arms have it from `accept`."""
        if served.name != role.reference:
            self.tell_oracle(self.rate, self.known(role.reference))
        await self.loads(role, served, bench_arms.TITLE, self.scale.load[:1])

    async def decode(self, role: Role, served: Served) -> None:
        """Decode speed and time to first token at every context."""
        scale, name = self.scale, served.name
        plan = decode_table.Plan(
            scale.contexts, max(scale.rounds), scale.decode_tokens, seed=42
        )
        recorder = self.record(
            "decode-table",
            plan.settings()
            | {"order": "server by server", "rounds": list(scale.rounds)},
        )
        answers = self.books.decode.setdefault(role.reference, {})
        for length, rounds in zip(scale.contexts, scale.rounds, strict=True):
            ids = bench_arms.context_ids(scale, length)
            known = answers.get(length)
            if role.arm.drafter and known is not None:
                self.tell_oracle(self.rate, [(ids, known.ids)])
            part = decode_table.Part(
                length, f"ids of seed {bench_arms.SEED}", ids, plan, role.reference,
                name, Silent(), reference=None if name == role.reference else known,
            )  # fmt: skip
            await part.warm_up([served])
            for index in range(rounds):
                await part.round(index)
            self.failed += part.problems
            for row in part.rows():
                if name == role.reference and part.reference is not None:
                    answers[length] = part.reference
                self.say(f"    {length} tokens: {_brief(row)}")
                self.keep(recorder, served, row, "prompt_tokens")
                _ratios(recorder)
        self.books.save()


def _ratios(recorder: Recorder) -> None:
    """Medians over those of stock plain decoding, of `plain` where it was not run.

    Servers do not take turns here, so there are no ratios inside a round.
    """
    run = recorder.run
    names = {row["server"] for row in run.rows}
    run.settings["base"] = "host-plain" if "host-plain" in names else "plain"
    base = {
        row["prompt_tokens"]: row
        for row in run.rows
        if row["server"] == run.settings["base"]
    }
    for row in run.rows:
        other = base.get(row["prompt_tokens"], {})
        for key, made in (("decode_tok_s", "speed_ratio"), ("ttft_s", "ttft_ratio")):
            found = stats.ratio(_median(row[key]), _median(other.get(key)))
            spread = stats.spread([found]) if found is not None else None
            row[made] = spread.to_json() if spread else None
    recorder.save()


def _median(found: Row | None) -> float | None:
    return found["median"] if found else None


def _brief(row: Row) -> str:
    speed = row.get("tok_s") or _median(row.get("decode_tok_s")) or 0
    found, got = row["exactness"], row.get("acceptance")
    equal = f"ids equal {found['ids_equal']}/{found['compared']}"
    return f"{speed:,.1f} tok/s, {equal}" + (
        f", acceptance {got['micro']:.2f}" if got else ""
    )
