# SPDX-License-Identifier: Apache-2.0
"""The same problems on several servers, graded, problem by problem.

An exact server gives the same ids and so the same grades; the table shows both, since
equal scores alone say little: two servers may be wrong about different problems.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from sglang_exact.bench import datasets, servers
from sglang_exact.bench.datasets import DataError
from sglang_exact.bench.drive import CannotRun, drive
from sglang_exact.bench.exactness import Tally
from sglang_exact.bench.quality.grading import NOT_GRADED, SHOWN, Grader
from sglang_exact.bench.rows import MATH_INSTRUCTION, request_of
from sglang_exact.bench.run import Recorder, save
from sglang_exact.bench.servers import Served
from sglang_exact.client.answer import IDS_ONLY, Answer, Request, Sample
from sglang_exact.client.http import Client
from sglang_exact.client.wire import clean

DEFAULT_SET = "math500"
DEFAULT_COUNT = 100
TAIL = 400
"""Characters of an answer that the record keeps; the whole is beside it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: what is asked, the right answer as LaTeX, its subject."""

    request: Request
    answer: str
    subject: str


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """The problems of one run and where they are from."""

    name: str
    source: str
    sha256: str
    rows: int
    problems: tuple[Problem, ...]

    def to_json(self) -> dict[str, Any]:
        """What a record keeps of the set."""
        return {
            "name": self.name,
            "source": self.source,
            "sha256": self.sha256,
            "rows": self.rows,
            "used": len(self.problems),
        }


def load(path: Path | None, count: int | None, *, hub: bool = True) -> ProblemSet:
    """The first `count` problems of a JSONL file, or of MATH-500 on the hub.

    A row has `answer` and one of `problem`, `question`, `messages`, `text` (sent as it
    is, without a chat template) and `input_ids`; `subject` and `unique_id` if it likes.

    Raises DataError with every bad row.
    """
    if path is not None:
        name, source = path.stem, path.name
        try:
            raw = path.expanduser().read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    else:
        name, source = DEFAULT_SET, f"hub {datasets.KNOWN[DEFAULT_SET].hub.repo} test"
        raw = _from_hub(hub)
    problems, wrong = [], []
    lines = [line for line in raw.splitlines() if line.strip()]
    for number_, line in enumerate(lines[:count], 1):
        try:
            problems.append(_problem(name, number_, orjson.loads(line)))
        except ValueError as error:
            wrong.append(f"line {number_}: {error}")
    if not lines:
        wrong.append("found no rows")
    ids = [problem.request.id for problem in problems]
    twice = sorted({i for i in ids if ids.count(i) > 1})
    if twice:
        wrong.append(f"found unique_id {', '.join(twice[:3])} more than once")
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise DataError(f"{source}: {'; '.join(wrong[:5])}{more}")
    digest = hashlib.sha256(raw).hexdigest()
    return ProblemSet(name, source, digest, len(lines), tuple(problems))


def _from_hub(hub: bool) -> bytes:
    fix = "give --dataset-path FILE with problem and answer in each line"
    if not hub:
        raise DataError(f"MATH-500: no package ships it, the hub was not asked; {fix}")
    try:
        return datasets.from_hub(datasets.KNOWN[DEFAULT_SET].hub)
    except DataError as error:
        raise DataError(
            f"MATH-500: no package ships it, {error}; fix: {fix}"
        ) from error


def _problem(name: str, place: int, row: Any) -> Problem:
    if not isinstance(row, dict):
        raise ValueError("found no object")
    answer = row.get("answer")
    if type(answer) in (int, float):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError("found no answer, expected the right one as text")
    subject = row.get("subject", row.get("type", "all"))
    known = row.get("unique_id")
    key = known if isinstance(known, str) else f"{name}-{place:04d}"
    return Problem(_request(key, row), answer, str(subject))


def _request(key: str, row: Mapping[str, Any]) -> Request:
    for field in ("problem", "question"):
        if isinstance(row.get(field), str):
            message = {"role": "user", "content": row[field] + MATH_INSTRUCTION}
            return Request(key, 1, messages=(message,))
    return request_of(key, None, row)


class Writer(Client):
    """The client, which also keeps the text of every answer, by request."""

    texts: dict[str, str]

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.texts = {}

    def heard(self, request: Request, answer: Any) -> None:
        """Keep the text of one answer."""
        self.texts[request.id] = _text(answer, request.messages is not None)


def _text(body: Any, chat: bool) -> str:
    if not chat:
        found = body.get("text")
        return found if isinstance(found, str) else ""
    message = body["choices"][0].get("message")
    found = message.get("content") if isinstance(message, dict) else None
    return found if isinstance(found, str) else ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask, how long answers may be, how many at once."""

    problems: ProblemSet
    max_new_tokens: int = 4096
    concurrency: int = 8
    thinking: bool | None = False
    plain: str | None = None

    def settings(self, grader: str) -> dict[str, Any]:
        """What decides whether two runs may be compared."""
        return {
            "dataset": self.problems.to_json(),
            "max_new_tokens": self.max_new_tokens,
            "concurrency": self.concurrency,
            "enable_thinking": self.thinking,
            "temperature": 0,
            "math_verify": grader,
            "plain": self.plain,
        }

    def requests(self) -> list[Request]:
        """The requests, in the order of the set."""
        return [
            replace(
                p.request, max_new_tokens=self.max_new_tokens, thinking=self.thinking
            )
            for p in self.problems.problems
        ]


def check(plan: Plan, found: Sequence[Served]) -> None:
    """Raise CannotRun with every server that cannot be asked."""
    problems = [
        f"server {one.name}: found --skip-tokenizer-init, expected a tokenizer: "
        "grading needs text; fix: serve without that flag"
        for one in found
        if one.by_ids
    ]
    if problems:
        raise CannotRun("; ".join(problems))


async def measure(
    plan: Plan,
    found: Sequence[Served],
    recorder: Recorder,
    grader: Grader,
    answers: Path,
    *,
    begin: Callable[[str], None] = lambda text: None,
    done: Callable[[], None] = lambda: None,
) -> None:
    """Ask every server every problem, then grade; rows are kept as they come.

    `answers` gets every whole answer as a JSON line. Raises CannotRun where a server
    stops answering.
    """
    plain: dict[str, Sample] = {}
    total = Tally()
    for served in sorted(found, key=lambda one: one.name != plan.plain):
        begin(served.name)
        await servers.flush(served, served.name, recorder.note)
        rows = await _ask(plan, served, plain, total, recorder, answers, done)
        try:
            await _grade(plan, served, rows, grader)
        finally:
            save(recorder.run, recorder.path)
        recorder.note(_cut_note(served.name, rows))


def _cut_note(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    cut = sum(str(row["finish"]).startswith("length") for row in rows)
    return f"{name}: {cut} of {len(rows)} answers end at max_new_tokens"


async def _ask(
    plan: Plan,
    served: Served,
    plain: dict[str, Sample],
    total: Tally,
    recorder: Recorder,
    answers: Path,
    done: Callable[[], None],
) -> list[dict[str, Any]]:
    """One row per problem, not graded yet."""
    if not isinstance(served.client, Writer):
        raise RuntimeError("found a client that keeps no text, expected a Writer")
    writer = served.client
    known = {p.request.id: p for p in plan.problems.problems}
    is_plain = served.name == plan.plain
    rows: list[dict[str, Any]] = []

    def keep(answer: Answer) -> None:
        equal = None
        if answer.sample is not None and is_plain:
            servers.needs_no_counters(served, [answer.sample.counters.verify])
            plain[answer.request] = answer.sample
        elif answer.sample is not None:
            reference = plain.get(answer.request)
            equal = total.add(answer.request, answer.sample, reference)
        text = writer.texts.get(answer.request, "")
        row = _row(served.name, known[answer.request], answer, text, equal)
        row["plain"] = is_plain
        rows.append(row)
        line = {"server": served.name, "problem": answer.request, "text": text}
        with answers.open("ab") as file:
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        recorder.run.exactness = total.to_json()
        recorder.add(row)
        done()

    await drive(writer, plan.requests(), plan.concurrency, options=IDS_ONLY, done=keep)
    return rows


def _row(
    server: str, problem: Problem, answer: Answer, text: str, equal: bool | None
) -> dict[str, Any]:
    sample = answer.sample
    return {
        "server": server,
        "problem": answer.request,
        "subject": problem.subject,
        "answer": problem.answer,
        "state": NOT_GRADED,
        "found": "",
        "why": answer.error,
        "ids_equal": equal,
        "tokens": len(sample.ids) if sample else None,
        "finish": sample.finish if sample else "failed",
        "tail": text[-TAIL:],
    }


async def _grade(
    plan: Plan, served: Served, rows: Sequence[dict[str, Any]], grader: Grader
) -> None:
    """Fill in the grades. The grader is a process; waiting for it blocks no server."""
    texts = served.client.texts if isinstance(served.client, Writer) else {}
    for row in rows:
        if row["finish"] == "failed":
            continue
        text = texts.get(row["problem"], "")
        grade = await asyncio.to_thread(grader.grade, row["answer"], text)
        # What a model wrote gets onto terminals: no control characters.
        found = clean(grade.found, SHOWN)
        row |= {"state": grade.state, "found": found, "why": grade.why}
