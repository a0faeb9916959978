# SPDX-License-Identifier: Apache-2.0
"""Speed over context: synthetic loads of ISL = OSL through aiperf, answers compared.

One request in flight, greedy, EOS ignored, output pinned to its length. At each length
all servers are measured one after the other before the next length begins, so that a
speed-up compares neighbours in time.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_exact.bench import provenance, servers
from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.exactness import Tally, total
from sglang_exact.bench.run import Recorder
from sglang_exact.bench.servers import Served
from sglang_exact.bench.stats import spread
from sglang_exact.bench.sweep import aiperf
from sglang_exact.bench.sweep import exports as aiperf_exports
from sglang_exact.bench.sweep.aiperf import Shape, Target
from sglang_exact.bench.sweep.exports import Reply, Result
from sglang_exact.bench.sweep.tables import decode_median, exact_cell
from sglang_exact.view.output import now
from sglang_exact.view.tables import number

SHAPES = (
    Shape(512, 30, 2),
    Shape(4096, 10, 2),
    Shape(12288, 5, 1),
    Shape(36864, 3, 1),
)
SEED = 42
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        shapes: loads, in the order they are run.
        program: aiperf.
        tokenizer: folder or hub name; None for each server's own model path.
        endpoint: "completions" (token ids are compared) or "chat" (text is).
        seed: of the synthetic prompts.
        plain: name of the server that speed-up and exactness refer to.
        artifacts: folder for aiperf's exports, one per server and length.
    """

    shapes: tuple[Shape, ...]
    program: Path
    artifacts: Path
    tokenizer: str | None = None
    endpoint: str = "completions"
    seed: int = SEED
    plain: str | None = None

    def settings(self) -> dict[str, Any]:
        """What decides whether two sweeps may be compared."""
        return {
            "aiperf": aiperf_exports.VERSION,
            "lengths": {
                str(s.length): {"requests": s.requests, "warmups": s.warmups}
                for s in self.shapes
            },
            "endpoint": self.endpoint,
            "concurrency": 1,
            "temperature": 0,
            "ignore_eos": True,
            "min_tokens": "ISL = OSL",
            "seed": self.seed,
            "plain": self.plain,
        }


def shapes(
    lengths: Sequence[int], requests: Sequence[int], warmups: Sequence[int]
) -> tuple[Shape, ...]:
    """The loads asked for; what is left out is the protocol's.

    Raises CannotRun where the lists do not fit together.
    """
    if not lengths and not requests and not warmups:
        return SHAPES
    known = {s.length: s for s in SHAPES}
    lengths = lengths or list(known)
    problems = [
        f"found {len(given)} values for {name} and {len(lengths)} lengths"
        for name, given in (("--requests", requests), ("--warmups", warmups))
        if given and len(given) != len(lengths)
    ]
    problems += [
        f"found length {n} without a number of requests"
        for n in lengths
        if n not in known and not requests
    ]
    least = (("--lengths", lengths, 2), ("--requests", requests, 1))
    problems += [
        f"found {name} {n}" for name, given, low in least for n in given if n < low
    ]
    if len(set(lengths)) != len(lengths):
        problems.append("found a length twice")
    if problems:
        raise CannotRun(
            f"{'; '.join(problems)}; expected one value per length, lengths of 2 or "
            f"more; the protocol knows {', '.join(map(str, known))}"
        )
    return tuple(
        Shape(
            n,
            requests[i] if requests else known[n].requests,
            warmups[i] if warmups else (known[n].warmups if n in known else 1),
        )
        for i, n in enumerate(lengths)
    )


def check(plan: Plan, found: Sequence[Served]) -> None:
    """Raise CannotRun with every server that cannot take the loads."""
    longest = max(s.length for s in plan.shapes)
    problems = []
    for served in found:
        context = served.info.fields.get("context_length")
        if type(context) is int and context < 2 * longest:
            problems.append(
                f"server {served.name}: found context_length {context}, expected "
                f"{2 * longest} or more for ISL = OSL = {longest}; fix: leave that "
                "length out with --lengths, or serve with a larger --context-length"
            )
        if served.by_ids:
            problems.append(
                f"server {served.name}: found --skip-tokenizer-init, expected a "
                "tokenizer: aiperf sends text; fix: serve without that flag"
            )
        if plan.tokenizer is None and not served.info.fields.get("model_path"):
            problems.append(
                f"server {served.name}: found no model_path; fix: give --tokenizer"
            )
    if problems:
        raise CannotRun("; ".join(problems))


def target(plan: Plan, served: Served, key: str | None) -> Target:
    """Where aiperf sends its load."""
    fields = served.info.fields
    model = fields.get("served_model_name") or fields.get("model_path") or "default"
    tokenizer = plan.tokenizer or str(fields.get("model_path"))
    return Target(served.client.url, str(model), tokenizer, plan.endpoint, key)


async def measure(
    plan: Plan,
    found: Sequence[Served],
    recorder: Recorder,
    *,
    key: str | None = None,
    say: Say = lambda text: None,
) -> None:
    """Run every load on every server; rows that are there already are kept.

    Raises CannotRun when aiperf fails; what was measured is in the record.
    """
    run = recorder.run
    done = {(row["server"], row["length"]) for row in run.rows}
    todo = [(s, f) for s in plan.shapes for f in _plain_first(plan, found)]
    for number_, (shape, served) in enumerate(todo, 1):
        if (served.name, shape.length) in done:
            continue
        folder = plan.artifacts / f"{_file_name(served.name)}-{shape.length}"
        say(
            f"[{number_}/{len(todo)}] {served.name}: ISL = OSL = {shape.length}, "
            f"{shape.warmups} + {shape.requests} requests"
        )
        where = target(plan, served, key)
        words = aiperf.command(plan.program, where, shape, plan.seed, folder)
        # A run that was cut off leaves exports that would be read as this one's.
        shutil.rmtree(folder, ignore_errors=True)
        await servers.flush(served, served.name, recorder.note)
        await aiperf.run(words, folder, where.tokenizer)
        result = aiperf_exports.read(folder)
        row = _row(plan, served, shape, result, words)
        row["exactness"] = _exactness(plan, served.name, shape, result.replies)
        if row["plain"]:
            steps = [result.verify_steps]
            servers.needs_no_counters(served, steps)
        recorder.add(row)
        say(f"    {_brief(row)}")
        _complain(row, shape, result, served, recorder)
    run.exactness = totals(run.rows)


def _plain_first(plan: Plan, found: Sequence[Served]) -> list[Served]:
    return sorted(found, key=lambda served: served.name != plan.plain)


def _file_name(name: str) -> str:
    # A name holds no percent sign: no two names become one.
    return name.replace(" ", "%20")


def _row(
    plan: Plan, served: Served, shape: Shape, result: Result, words: list[str]
) -> dict[str, Any]:
    decode, ttft = spread(result.decode_tok_s), spread(result.ttft_ms)
    latency = spread(result.latency_ms)
    steps, tokens = result.verify_steps, result.tokens
    return {
        "server": served.name,
        "length": shape.length,
        "requests": result.requests,
        "failed": result.errors,
        "warmups": shape.warmups,
        "isl": result.isl,
        "osl": result.osl,
        "decode_tok_s": decode.to_json() if decode else None,
        "ttft_ms": ttft.to_json() if ttft else None,
        "latency_ms": latency.to_json() if latency else None,
        "output_tok_s": result.output_tok_s,
        # As in the host: tokens over verify steps, the prefill's token included.
        "acceptance_length": tokens / steps if steps and tokens else None,
        "plain": served.name == plan.plain,
        "measured": now(),
        "command": provenance.scrub_words(words),
    }


def _exactness(
    plan: Plan, name: str, shape: Shape, replies: Sequence[Reply]
) -> dict[str, Any] | None:
    """Answers against the plain server's of the same length, prompt by prompt."""
    if plan.plain is None or name == plan.plain:
        return None
    folder = plan.artifacts / f"{_file_name(plan.plain)}-{shape.length}"
    if not (folder / aiperf_exports.RAW).is_file():
        return None
    plain = aiperf_exports.read(folder).replies
    return compare(plain, replies, shape.requests)


def compare(
    plain: Sequence[Reply], other: Sequence[Reply], asked: int = 0
) -> dict[str, Any]:
    """Pair replies by prompt and count equal ones; by text where there are no ids.

    `asked` is how many there should be: one that is missing was not compared.
    """
    known = {reply.prompt: reply for reply in plain}
    tally, by_ids = Tally(), True
    for place, reply in enumerate(other):
        want = known.get(reply.prompt)
        if want is None:
            tally.missing.append(reply.prompt)
            continue
        sides: tuple[Sequence[Any], Sequence[Any]] = (want.text, reply.text)
        if want.ids is not None and reply.ids is not None:
            sides = (want.ids, reply.ids)
        else:
            by_ids = False
        same = sides[0] == sides[1]
        tally.count(str(place), same, None if same else {"position": _part(*sides)})
    tally.missing += ["not answered"] * (asked - len(other))
    return tally.to_json() | {"what": "ids" if by_ids else "text"}


def _part(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = zip(one, other, strict=False)
    shorter = min(len(one), len(other))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), shorter)


def _complain(
    row: dict[str, Any],
    shape: Shape,
    result: Result,
    served: Served,
    recorder: Recorder,
) -> None:
    """Note what makes a row mean less than it seems to."""
    name, length = row["server"], row["length"]
    if row["failed"]:
        recorder.note(f"{name}, {length}: {row['failed']} requests failed")
    if row["requests"] + row["failed"] != shape.requests:
        recorder.note(
            f"{name}, {length}: found {row['requests']} answered requests, expected "
            f"{shape.requests}"
        )
    for key, counts in (("isl", result.prompt_tokens), ("osl", result.output_tokens)):
        other = [n for n in counts if n != length]
        if row[key] is None:
            recorder.note(f"{name}, {length}: the server reports no token counts")
        elif other:
            recorder.note(
                f"{name}, {length}: {len(other)} of {len(counts)} requests have "
                f"another {key.upper()}, {min(other):g} to {max(other):g}"
            )
        elif row[key] != length:
            recorder.note(f"{name}, {length}: mean {key.upper()} is {row[key]:g}")
    if served.info.speculative() and row["acceptance_length"] is None:
        recorder.note(
            f"{name}: no acceptance length: found no spec_verify_calls counter in "
            "/metrics; fix: serve with --enable-metrics"
        )


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What of the measured rows is missing, for people."""
    return [
        f"{row['server']}, {row['length']}: {row['failed']} requests"
        for row in rows
        if row["failed"]
    ]


def totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The exactness of all rows together."""
    texts = [r["exactness"]["what"] == "text" for r in rows if r.get("exactness")]
    return total(rows) | {"what": "text" if any(texts) else "ids"}


def _brief(row: Mapping[str, Any]) -> str:
    equal = "reference" if row["plain"] else exact_cell(row.get("exactness"))
    return f"decode {number(decode_median(row))} tok/s, {equal}"
