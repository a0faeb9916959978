# SPDX-License-Identifier: Apache-2.0
"""Grading, and the quality command problem by problem."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from bench_runs import against, record
from bench_server import BenchServer
from fake_server import Lies

from sglang_exact.bench.datasets import DataError
from sglang_exact.bench.quality import grading
from sglang_exact.bench.quality import measure as quality
from sglang_exact.bench.quality.grading import (
    CORRECT,
    NOT_GRADED,
    WRONG,
    Grader,
    GraderMissing,
)

PROBLEMS = [
    {"problem": "one half plus one quarter", "answer": "\\frac{3}{4}", "subject": "N"},
    {"problem": "two times six", "answer": "12", "subject": "N"},
    {"problem": "who", "answer": "\\text{Evelyn}", "subject": "W", "unique_id": "w/1"},
]
RIGHT = ["\\boxed{0.75}", "so \\boxed{11}, no: \\boxed{12}", "\\boxed{\\text{Evelyn}}"]


class Pupil(BenchServer):
    """Answers each problem with the text of its place in `texts`."""

    texts: list[str] = RIGHT

    async def chat(self, request: web.Request) -> web.Response:
        response = await super().chat(request)
        asked = (await request.json())["messages"][0]["content"]
        if response.status != 200:
            return response
        body = json.loads(response.body)  # type: ignore[arg-type]
        for row, text in zip(PROBLEMS, self.texts, strict=True):
            if asked.startswith(row["problem"]):
                body["choices"][0]["message"]["content"] = text
        return web.json_response(body)


def pupil(texts: list[str] = RIGHT, **more: Any) -> Pupil:
    made = Pupil(**more)
    made.texts = texts
    return made


def run_quality(path: Path, servers: dict[str, Any], *args: str, **more: Any) -> Any:
    lines = "".join(json.dumps(row) + "\n" for row in PROBLEMS)
    (path / "set.jsonl").write_text(lines)
    code, out, err = against(
        servers, "quality", "--dataset-path", "set.jsonl", "--max-new-tokens", "12",
        "--output-file", "run.json", *args, cwd=path, **more,
    )  # fmt: skip
    kept = path / "run.json"
    return code, out, err, record(kept) if kept.exists() else None


@pytest.fixture(scope="module")
def grader() -> Any:
    pytest.importorskip("math_verify")
    with Grader() as made:
        yield made


@pytest.mark.parametrize(
    ("gold", "text", "state"),
    [
        ("\\frac{3}{4}", "so \\boxed{0.75}.", CORRECT),
        ("\\frac{3}{4}", "so \\boxed{0.7}.", WRONG),
        ("x^2+7x+10", "\\boxed{(x+2)(x+5)}", CORRECT),
        ("(-\\infty, 3]", "\\boxed{(-\\infty,3)}", WRONG),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "\\boxed{(3,\\pi/2)}", CORRECT),
        ("\\text{(C)}", "\\boxed{C}", CORRECT),
        ("12", "first \\boxed{11}, wait, \\boxed{12}", CORRECT),
        ("12", "first \\boxed{12}, wait, \\boxed{11}", WRONG),
        ("5", "<think>\\boxed{5}</think> it is \\boxed{6}", WRONG),
        ("5", "no answer here", WRONG),
        ("5", "", WRONG),
    ],
)
def test_grades(grader: Grader, gold: str, text: str, state: str) -> None:
    assert grader.grade(gold, text).state == state


def test_answers_that_take_the_grader_down_cost_one_grade() -> None:
    pytest.importorskip("math_verify")
    with Grader(timeout_s=6) as own:
        began = time.monotonic()
        found = own.grade("5", "\\boxed{9^{9^{9^{9}}}}")
        assert found.state == NOT_GRADED and found.why
        assert time.monotonic() - began < 40
        assert own.grade("5", "\\boxed{5}").state == CORRECT


def test_missing_grader_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "PACKAGE", "no-such-package")
    with pytest.raises(GraderMissing, match="pip install math-verify==0.9.0"):
        Grader()


def test_same_answers_same_grades(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    servers = {"spec": pupil(), "plain": pupil(speculative=False)}
    code, out, err, run = run_quality(tmp_path, servers, "--markdown", "q.md")
    assert code == 0, err
    assert run["complete"] and len(run["rows"]) == 6
    assert {row["state"] for row in run["rows"]} == {CORRECT}
    assert run["rows"][0]["server"] == "plain", "the reference is asked first"
    found = run["exactness"]
    assert (found["compared"], found["ids_equal"]) == (3, 3)
    assert run["settings"]["dataset"]["used"] == 3
    assert len(run["settings"]["dataset"]["sha256"]) == 64
    assert "ids equal 3/3" in out and "grades differ in 0 problems" in out
    whole = (tmp_path / "run.answers.jsonl").read_text().splitlines()
    assert len(whole) == 6 and "boxed" in json.loads(whole[0])["text"]
    assert "3 (100 %)" in (tmp_path / "q.md").read_text()
    asked = servers["plain"].calls[-1]
    assert asked["messages"][0]["content"].endswith("within \\boxed{}.")
    assert asked["chat_template_kwargs"] == {"enable_thinking": False}


def test_differences_are_named_problem_by_problem(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    # The same score with other problems: totals alone would not show it.
    first = ["\\boxed{0.75}", "\\boxed{13}", "\\boxed{\\text{Evelyn}}"]
    second = ["\\boxed{0.75}", "\\boxed{12}", "\\boxed{\\text{Ada}}"]
    lies = Lies({"wrong-token"})
    servers = {
        "plain": pupil(first, speculative=False),
        "spec": pupil(second, lies=lies),
    }
    code, out, _, run = run_quality(tmp_path, servers)
    assert code == 0
    assert "grades differ in 2 problems, 1 gained, 1 lost" in out
    assert "ids equal 0/3" in out
    assert "w/1" in out and "13 (wrong, plain)" in out
    states = {(r["server"], r["problem"]): r["state"] for r in run["rows"]}
    assert states["plain", "w/1"] == CORRECT and states["spec", "w/1"] == WRONG


def test_failed_answers_do_not_count_as_wrong(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    lies = Lies({"no-token-ids"})
    servers = {"plain": pupil(speculative=False), "spec": pupil(lies=lies)}
    code, _, err, run = run_quality(tmp_path, servers)
    assert code == 2 and "what was measured is in run.json" in err
    assert not run["complete"]
    spec = [r for r in run["rows"] if r["server"] == "spec"]
    assert {r["state"] for r in spec} <= {NOT_GRADED}
    plain = [r for r in run["rows"] if r["server"] == "plain"]
    assert {r["state"] for r in plain} == {CORRECT}, "kept with their grades"


def test_interrupt_keeps_the_answers(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    slow = pupil(speculative=False, lies=Lies({"hang"}))
    slow.lies.when = lambda _, server: False

    async def chat(request: web.Request) -> web.Response:
        import asyncio

        if len([c for c in slow.calls if "messages" in c]) >= 1:
            await asyncio.sleep(600)
        return await Pupil.chat(slow, request)

    slow.chat = chat  # type: ignore[method-assign]
    path = tmp_path / "run.json"
    code, _, err, run = run_quality(
        tmp_path, {"plain": slow}, "--concurrency", "1",
        stop_when=lambda: path.exists() and len(record(path)["rows"]) == 1,
    )  # fmt: skip
    assert code == 130 and "interrupted" in err
    assert len(run["rows"]) == 1 and run["rows"][0]["tail"] and not run["complete"]


def test_bad_sets_are_refused_with_every_reason(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"problem": "x"}\n[]\n{"answer": "5"}\n')
    with pytest.raises(DataError) as told:
        quality.load(path, 100)
    for part in ("line 1: found no answer", "line 2", "line 3"):
        assert part in str(told.value)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no rows"):
        quality.load(tmp_path / "empty.jsonl", 100)
    with pytest.raises(DataError, match="cannot be read"):
        quality.load(tmp_path / "absent.jsonl", 100)
    with pytest.raises(DataError, match="--dataset-path"):
        quality.load(None, 100, hub=False)


def test_rows_of_other_kinds(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    rows = [
        {"question": "q", "answer": 5},
        {"text": "raw", "answer": "5", "type": "T"},
        {"input_ids": [1, 2], "answer": "5"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, two, three = quality.load(path, 100).problems
    assert one.answer == "5" and one.request.messages is not None
    assert (two.request.text, two.subject) == ("raw", "T")
    assert three.request.ids == (1, 2)
    assert len(quality.load(path, 2).problems) == 2


def test_server_without_tokenizer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    servers = {"plain": pupil(speculative=False, info={"skip_tokenizer_init": True})}
    code, _, err, run = run_quality(tmp_path, servers)
    assert code == 2 and "grading needs text" in err and run is None


def test_grading_process_gets_no_module_of_this_package() -> None:
    """Its folder holds a memory.py and a report.py: none may shadow a library's."""
    assert grading.__file__.endswith("grading.py")
    code = (
        "import sys, runpy; sys.argv = ['x'];"
        "sys.path[:] = [p for p in sys.path if p];"
        f"runpy.run_path({grading.__file__!r});"
        "assert 'sglang_exact' not in sys.modules"
    )
    import subprocess

    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
