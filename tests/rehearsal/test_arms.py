# SPDX-License-Identifier: Apache-2.0
"""Arms and the demonstration, with servers that answer from a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_exact.client.blocking import Completion
from tools.proof import demo, matrix, options
from tools.proof.arms import Arm
from tools.proof.matrix import is_equal, judge, tallied
from tools.proof.passes import Pass, Setup, run_arm

Answer = Callable[["FakeServer", Sequence[int], bool], Completion]


def completion(
    ids: Sequence[int], logprobs: Sequence[int] = (), verified: int = 0
) -> Completion:
    return Completion(
        tuple(ids), tuple(logprobs), "length", verified, len(ids), None, {}
    )


class FakeServer:
    """Stands in for `server.Server`; `answer` decides what it says."""

    answer: Answer
    started_in_s = 0.0

    def __init__(self, model: Path, **options: Any) -> None:
        self.options = options

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def info(self) -> dict[str, Any]:
        return {"sglang_exact": {"numerics": "unverified"}}

    @property
    def rate(self) -> float | None:
        """What the oracle file says right now."""
        path = self.options["env"].get("SGLANG_EXACT_TEST_ORACLE")
        return json.loads(Path(path).read_text())["rate"] if path else None

    def generate_many(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, **options: Any
    ) -> list[Completion]:
        answer = type(self).answer
        return [answer(self, prompt, options["return_logprob"]) for prompt in prompts]


def as_promised(server: FakeServer, prompt: Sequence[int], logprobs: bool) -> Any:
    """Exact speculation; the stock arm's logprobs differ at the second token."""
    ids = [len(prompt), 1, 2, 3]
    bits = [10, 11, 12, 13]
    if server.options["mode"] == "stock":
        bits[1] += 1
    # Three tokens after the prefill: one per verify if all drafts are rejected.
    verified = {None: 0, 0.0: 3}.get(server.rate, 1)
    return completion(ids, bits if logprobs else (), verified)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], None]:
    monkeypatch.setattr(matrix, "Server", FakeServer)

    def choose(function: Answer) -> None:
        monkeypatch.setattr(FakeServer, "answer", staticmethod(function), False)

    choose(as_promised)
    return choose


def test_judge() -> None:
    """Ids and bits as integers; what was asked for and is missing is not equal."""
    reference = [completion([1, 2, 3], [7, 8, 9]), completion([4, 5], [1, 2])]
    same = judge(reference, reference)
    assert is_equal(same, logprobs=True) and same.first is None
    other = [completion([1, 2, 3], [7, -8, 9]), completion([4], [1])]
    found = judge(reference, other)
    assert not is_equal(found, logprobs=True)
    assert (found.ids_equal, found.logprobs_equal) == (1, 0)
    assert found.first == {
        "request": "0",
        "what": ["logprobs"],
        "position": 1,
        "ids": [2, 2],
    }
    assert tallied(found, logprobs=False)["logprobs_equal"] is None
    silent = [completion(c.ids) for c in reference]
    assert is_equal(judge(reference, silent), logprobs=False)
    assert not is_equal(judge(reference, silent), logprobs=True)
    with pytest.raises(ValueError, match="expected 2"):
        judge(reference, other[:1])


def test_a_logprob_that_is_no_number_proves_nothing() -> None:
    """Null on both sides is one and the same text, and no equal bit."""
    broken: Any = [completion([1, 2], [7, None])]  # type: ignore[list-item]
    found = judge(broken, broken)
    assert found.ids_equal == 1 and not is_equal(found, logprobs=True)


def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path, {"dflash": tmp_path}, [[1], [1, 2], [1, 2, 3]], 4, tmp_path)


def test_passes(tmp_path: Path, answer: Callable[[Answer], None]) -> None:
    shared = setup(tmp_path)
    plain = run_arm(Arm("plain", "plain", phases=(Pass("plain"),)), shared, None, print)
    reference = plain.answers[0]
    assert plain.rows[0].as_promised
    steps = (
        Pass("oracle", 0.8),
        Pass("rejected", 0.0, prompts=(2,)),
        Pass("no logprobs", 0.8, logprobs=False, prompts=(0, 1)),
    )
    exact = run_arm(
        Arm("exact", "exact", "dflash", phases=steps), shared, reference, print
    )
    assert [row.tally.compared for row in exact.rows] == [3, 1, 2]
    assert [row.tally.logprobs_equal for row in exact.rows] == [3, 1, 0]
    assert all(row.as_promised for row in exact.rows)
    json.dumps([row.record() for row in exact.rows])


@pytest.mark.parametrize(
    ("rate", "verified", "exercised"),
    [(0.8, 1, True), (0.8, 3, False), (0.8, 0, False), (0.0, 3, True), (0.0, 1, False),
     (None, 0, True), (None, 1, False)],
)  # fmt: skip
def test_what_was_not_exercised_is_not_as_promised(
    tmp_path: Path,
    answer: Callable[[Answer], None],
    rate: float | None,
    verified: int,
    exercised: bool,
) -> None:
    """Equal answers prove nothing if no draft was kept, or none was rejected."""
    answer(lambda server, prompt, logprobs: completion([1, 2, 3, 4], (), verified))
    reference = [completion([1, 2, 3, 4])] * 3
    arm = Arm("arm", "arm", "dflash", phases=(Pass("x", rate, logprobs=False),))
    (row,) = run_arm(arm, setup(tmp_path), reference, print).rows
    assert row.equal
    assert row.exercised is exercised
    assert row.as_promised is exercised


def run_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Any]:
    monkeypatch.setattr(demo, "cpu_setup", lambda work, tokens: setup(tmp_path))
    out = tmp_path / "out.json"
    status = demo.main(options.demo(["--json", str(out), "--work", str(tmp_path)]))
    return status, json.loads(out.read_text())


def test_demo(
    tmp_path: Path,
    answer: Callable[[Answer], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, found = run_demo(tmp_path, monkeypatch)
    assert status == 0
    assert found["ok"] is True
    assert [row["as_promised"] for row in found["rows"]] == [True] * 6
    assert [row["expected"] for row in found["rows"]].count("different") == 1
    assert "did not change a bit" in capsys.readouterr().out


def test_demo_fails_when_stock_is_equal(
    tmp_path: Path, answer: Callable[[Answer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A demonstration that cannot tell the two apart has shown nothing."""

    def equal(server: FakeServer, prompt: Sequence[int], logprobs: bool) -> Any:
        server.options["mode"] = "exact"
        return as_promised(server, prompt, logprobs)

    answer(equal)
    status, found = run_demo(tmp_path, monkeypatch)
    assert status == 1
    assert found["ok"] is False


def test_demo_keeps_what_there_is_when_a_server_fails(
    tmp_path: Path,
    answer: Callable[[Answer], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def silent(server: FakeServer, prompt: Sequence[int], logprobs: bool) -> Any:
        if server.options["mode"] == "stock":
            raise RuntimeError("found no answer from the server, expected one")
        return as_promised(server, prompt, logprobs)

    answer(silent)
    status, found = run_demo(tmp_path, monkeypatch)
    assert status == 1
    assert found["ok"] is False
    assert [row["arm"] for row in found["rows"]] == ["plain", "plain-again"]
    assert "FAILED: found no answer" in capsys.readouterr().out


def test_servers_of_a_gpu(tmp_path: Path) -> None:
    """Two of four layers share a GPU: no pool takes all that is free."""
    made = demo.gpu_setup(tmp_path, 4, 64)
    flags = list(made.flags)
    pool = int(flags[flags.index("--max-total-tokens") + 1])
    context = int(flags[flags.index("--context-length") + 1])
    assert context < pool <= 8 * context
    assert [demo.side_by_side(layers) for layers in (None, 4, 64)] == [2, 2, 1]


@pytest.mark.parametrize("where", ["plain-again", "oracle", "rejected"])
def test_demo_fails_on_one_bit(
    tmp_path: Path,
    answer: Callable[[Answer], None],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    def wrong(server: FakeServer, prompt: Sequence[int], logprobs: bool) -> Any:
        found = as_promised(server, prompt, logprobs)
        here = {
            "plain-again": "plain-again" in str(server.options["log"]),
            "oracle": server.options["mode"] == "exact" and server.rate == demo.RATE,
            "rejected": server.rate == 0.0,
        }[where]
        if here and len(prompt) == 2 and logprobs:
            bits = (*found.logprobs[:3], found.logprobs[3] ^ 1)
            return completion(found.ids, bits, found.spec_verify_ct)
        return found

    answer(wrong)
    status, found = run_demo(tmp_path, monkeypatch)
    assert status == 1
    bad = [row for row in found["rows"] if not row["as_promised"]]
    assert len(bad) == 1
    assert bad[0]["tally"]["first_difference"]["position"] == 3
