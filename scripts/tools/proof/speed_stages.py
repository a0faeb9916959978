# SPDX-License-Identifier: Apache-2.0
"""What `scripts/gpu_bench` asks one server, and the records it keeps.

The measuring is that of `sglang-exact bench`; here servers come one after the other, so
the plain answers that exactness and the oracle need are kept in a file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_exact.bench import provenance, stats
from sglang_exact.bench import runs as report_runs
from sglang_exact.bench.accept import measure as accept
from sglang_exact.bench.cost_model import model as modelling
from sglang_exact.bench.datasets import Dataset
from sglang_exact.bench.decode_table import measure as decode_table
from sglang_exact.bench.exactness import show, total
from sglang_exact.bench.memory import measure as memory
from sglang_exact.bench.run import BenchRun, Recorder, load
from sglang_exact.bench.servers import Served
from sglang_exact.hooks.testing import oracle
from sglang_exact.view.console import Silent
from tools.proof import speed_arms as bench_arms
from tools.proof import speed_prefix, speed_setup
from tools.proof.speed_arms import Role, Scale
from tools.proof.speed_books import Books

Row = dict[str, Any]
NOTES = (
    "random weights, seeded by parameter name: speeds are those of the shapes",
    "acceptance was set by an oracle, it is not a draft model's",
    "one server at a time: between servers clocks may have moved, ratios are of "
    "medians",
    "the base of host-dflash2 is host-plain, that of the exact arms is plain",
    "host-dflash2 was told how many drafts to accept, whatever they are "
    "(SGLANG_SIMULATE_ACC_LEN): its answers are compared with nothing",
)
VERB = {
    "memory": "memory",
    bench_arms.PREFIX: bench_arms.PREFIX,
    "decode-table": "decode-table",
    **dict.fromkeys(("accept", "in-step", "acceptance", "widths"), "accept"),
}
"""The record that a stage's rows go to."""
Loads = tuple[tuple[int, int], ...]


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
        self.data = speed_setup.data_set(self.scale)

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

        `same` are the keys that, with the server, tell a row from another. A row that
        was cut off does not take the place of a whole one.
        """
        run, keys = recorder.run, ("server", *same)
        before = [r for r in run.rows if all(r[k] == row[k] for k in keys)]
        if row.get("partial") and any(not r.get("partial") for r in before):
            return
        run.rows = [r for r in run.rows if r not in before]
        run.rows.append(row)
        if any("exactness" in row for row in run.rows):
            run.exactness = total(run.rows)
        others = [s for s in report_runs.servers(run) if s.get("name") != served.name]
        seeds = {"prompts": bench_arms.SEED}
        run.provenance = provenance.collect(
            [*others, served.facts], seeds, self.gpu_index
        )
        run.complete = False
        recorder.save()

    def finish(self, left: set[str]) -> None:
        """Everything that was asked for is measured, but for the stages `left`."""
        for verb in sorted(set(VERB.values()) - {VERB[stage] for stage in left}):
            if (self.out / f"{verb}.json").exists():
                self.record(verb, {}).finish()

    def has_rows(self, prefix: str) -> bool:
        """Whether a server whose name begins so has a row in any record."""
        paths = [self.out / f"{verb}.json" for verb in set(VERB.values())]
        return any(
            row["server"].startswith(prefix)
            for path in paths
            if path.exists()
            for row in load(path).rows
        )

    def is_done(self, role: Role, stage: str) -> bool:
        """Whether an earlier call measured all of a stage."""
        path = self.out / f"{VERB[stage]}.json"
        rows = load(path).rows if path.exists() else []
        own = [row for row in rows if row["server"] == role.arm.name]
        if stage == "memory":
            return bool(own)
        if stage == bench_arms.PREFIX:
            size = self.scale.prefix
            return len(own) >= len(size.lengths) + 2
        if stage == "decode-table":
            found = {row["prompt_tokens"]: row["rounds"] for row in own}
            wanted = zip(self.scale.contexts, self.scale.rounds, strict=True)
            return all(found.get(length, 0) >= rounds for length, rounds in wanted)
        whole = {
            (row["title"], row["concurrency"])
            for row in own
            if not row["partial"] and not row["failed"]
        }
        return whole >= self.cells(role, stage)

    def cells(self, role: Role, stage: str) -> set[tuple[str, int]]:
        """Title and requests in flight of every row that a stage gives the accept
        record."""
        first, every = self.scale.load[:1], self.scale.load
        if stage == "acceptance":
            titles = [swept_title(n) for n in self.lengths(role)]
            return {(title, c) for title in titles for c, _ in first}
        if stage == "in-step":
            return {(IN_STEP, c) for c, _ in every if c > 1}
        return {
            (bench_arms.TITLE, c) for c, _ in (first if stage == "widths" else every)
        }

    def lengths(self, role: Role) -> list[float]:
        """The acceptance lengths that an arm's blocks can have."""
        return [n for n in self.scale.swept if n <= role.arm.draft_tokens]

    def tell_oracle(
        self, rate: float, known: list[tuple[Any, Any]], in_step: bool = False
    ) -> None:
        """What the drafter knows, and how much of it is right."""
        seed = IN_STEP_SEED if in_step else 1
        oracle.write_plan(self.plan, rate, known, seed=seed, in_step=in_step)

    def known(self, reference: str) -> list[tuple[Any, Any]]:
        """Prompts with their plain continuations."""
        answers = self.books.accept[reference].answers
        prompts = [(r, answers.get(r.id)) for r in self.data.prompts]
        return [(r.ids, s.ids) for r, s in prompts if s is not None]

    def lacking(self, role: Role, stages: list[str]) -> list[str]:
        """Stages for which the reference's answers are not known yet.

        Without them there is nothing to compare with, and an oracle keeps no draft:
        speed and acceptance would be of another setting than the table says.
        """
        if role.arm.name == role.reference:
            return []
        decode = self.books.decode.get(role.reference, {})
        found = {
            "memory": True,
            bench_arms.PREFIX: True,
            "decode-table": any(n in decode for n in self.scale.contexts),
            "accept": bool(self.known_loads(role, self.scale.load)),
        }
        first = bool(self.known_loads(role, self.scale.load[:1]))
        return [stage for stage in stages if not found.get(stage, first)]

    def known_loads(self, role: Role, load_: Loads) -> Loads:
        """The loads of which the reference has answered every timed prompt."""
        if role.arm.name == role.reference:
            return load_
        book = self.books.accept.get(role.reference, accept.Book())
        return tuple(
            (c, count)
            for c, count in load_
            if all(r.id in book.answers for r in self.data.take(count, c))
        )

    async def memory(self, role: Role, served: Served) -> None:
        """Before anything is asked: what the host names and what NVML sees."""
        recorder = self.record("memory", {"unit": "GiB"})
        gpu = None
        try:
            gpu = memory.device(self.gpu_index) if self.nvml else None
        except memory.NoNvml as error:
            recorder.note(f"NVML is left out: {error}")
        usage = await memory.usage(served)
        plain = served.name == role.reference
        row = memory.row(served, usage, plain, gpu, role.reference)
        self.keep(recorder, served, row)

    async def prefix_cache(self, role: Role, served: Served) -> None:
        """What cached prefixes save."""
        recorder = self.record(bench_arms.PREFIX, self.scale.prefix._asdict())
        async for row in speed_prefix.measure(served, self.scale):
            self.say(f"    {row}")
            self.keep(recorder, served, row, "title")

    async def accept(self, role: Role, served: Served) -> None:
        """Speed at every concurrency, answers against the reference's."""
        if served.name != role.reference:
            self.tell_oracle(self.rate, self.known(role.reference))
        load_ = self.known_loads(role, self.scale.load)
        self.failed += [
            f"{served.name} accept, {c} in flight: found no answers of "
            f"{role.reference} to its prompts"
            for c, _ in self.scale.load
            if c not in dict(load_)
        ]
        await self.loads(role, served, bench_arms.TITLE, load_)

    async def in_step(self, role: Role, served: Served) -> None:
        """Drafts wrong at the same places of every answer.

        As where the host is told how many to accept: requests that begin together end
        together, and prefills do not come between the steps of the others.
        """
        self.tell_oracle(self.rate, self.known(role.reference), in_step=True)
        load_ = self.known_loads(role, self.scale.load)
        await self.loads(role, served, IN_STEP, tuple(x for x in load_ if x[0] > 1))

    async def loads(self, role: Role, served: Served, title: str, load_: Loads) -> None:
        """One row per concurrency in the accept record; what was cut off is kept."""
        data, every = replace(self.data, title=title), self.scale.load
        plan = accept.Plan(
            (self.data,), [c for c, _ in every], self.scale.prompts,
            self.scale.new_tokens, ignore_eos=True,
        )  # fmt: skip
        recorder = self.record(
            "accept", plan.settings() | {"load": [list(pair) for pair in every]}
        )
        book = self.books.accept.setdefault(role.reference, accept.Book())
        if bench_arms.is_forced(role.arm):
            book = accept.Book(tok_s=book.tok_s)
        scratch = Recorder(BenchRun("accept"), self.out / "unfinished.json")
        for concurrency, count in load_:
            own = accept.Plan(
                (data,), (concurrency,), count, self.scale.new_tokens, ignore_eos=True
            )
            unit = accept.Unit(
                served, served.name == role.reference, data, concurrency, own
            )
            try:
                self.failed += await unit.run(book, scratch, Silent())
            finally:
                # Also when time is up: a row says itself that it was cut off.
                for row in scratch.run.rows:
                    self.say(f"    {title}, {concurrency} in flight: {_brief(row)}")
                    self.keep(recorder, served, row, "title", "concurrency")
                for text in scratch.run.notes:
                    recorder.note(text)
                scratch.run.rows.clear()
                scratch.path.unlink(missing_ok=True)
                self.books.save()

    async def acceptance(self, role: Role, served: Served) -> None:
        """Speed over acceptance length, one in flight."""
        for length in self.lengths(role):
            rate = modelling.keep_rate(length, role.arm.draft_tokens)
            self.tell_oracle(rate, self.known(role.reference))
            await self.loads(role, served, swept_title(length), self.scale.load[:1])

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
        recorder = self.record("decode-table", {})
        lengths = {row["prompt_tokens"] for row in recorder.run.rows}
        recorder.run.settings |= plan.settings() | {
            "prompt_lengths": sorted({*lengths, *scale.contexts}),
            "order": decode_table.ONE_BY_ONE,
            "rounds": "of every row its own",
        }
        answers = self.books.decode.setdefault(role.reference, {})
        for length, rounds in zip(scale.contexts, scale.rounds, strict=True):
            ids = speed_setup.context_ids(scale, length)
            known = answers.get(length)
            if known is None and name != role.reference:
                self.failed.append(
                    f"{name} decode-table, {length} tokens: found no answer of "
                    f"{role.reference}"
                )
                continue
            if role.arm.drafter and known is not None:
                self.tell_oracle(self.rate, [(ids, known.ids)])
            apart = name == role.reference or bench_arms.is_forced(role.arm)
            part = decode_table.Part(
                length, f"ids of seed {bench_arms.SEED}", ids, plan, role.reference,
                name, Silent(), reference=None if apart else known,
            )  # fmt: skip
            try:
                await part.warm_up([served])
                for index in range(rounds):
                    await part.round(index)
            finally:
                self.failed += part.problems
                if name == role.reference and part.reference is not None:
                    answers[length] = part.reference
                self.books.save()
                for row in part.rows():
                    self.say(f"    {length} tokens: {_brief(row)}")
                    self.keep(recorder, served, row, "prompt_tokens")
                    _ratios(recorder)


IN_STEP = f"{bench_arms.TITLE}, requests in step"
IN_STEP_SEED = 6
"""Its one pattern gives 256 tokens the acceptance length that the rate stands for: 5.45
in blocks of 8 for 5.46."""


def swept_title(length: float) -> str:
    """Of the rows of one acceptance length."""
    return f"{bench_arms.TITLE}, acceptance set to {length:g}"


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
    equal, got = show(row["exactness"]), row.get("acceptance")
    cut = ", cut off" if row.get("partial") else ""
    return f"{speed:,.1f} tok/s, {equal}{cut}" + (
        f", acceptance {got['micro']:.2f}" if got else ""
    )
