# SPDX-License-Identifier: Apache-2.0
"""The row to hand in, the bound that repeats give, and the oracle's plan."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Lies
from verify_runs import against, inputs, settings, silent

from sglang_exact.verify import continuations, plan, record, session, summary
from sglang_exact.verify.evidence_row import SCHEMA, evidence_row, public_name

DOCS = Path(__file__).resolve().parents[2] / "docs" / "verifying.md"
SECRET = "s3cret-k3y"
EXACT = {
    "version": "0.1.0",
    "digest": "d" * 64,
    "numerics": "bitwise",
    "gpu": "NVIDIA RTX PRO 6000",
    "compute_capability": [12, 0],
    "hooks": ["gdn_verify", "attention_verify"],
    "stack": {"torch": "2.13"},
    "test_settings": {"oracle": True},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> summary.Run:
    path = tmp_path_factory.mktemp("private-folder")
    info = {
        "model_path": "/home/alice/private-models/Qwen3.8-27B",
        "speculative_draft_model_path": "/home/alice/private-models/DFlash2",
        "served_model_name": "alices-secret-name",
    }
    lies = Lies({"logprob-bit"}, when=lambda body, _: body["stream"])
    tested = FakeServer(lies=lies, info=info, exact=EXACT, api_key=SECRET)
    tested.accelerator = "NVIDIA H200"
    names = "speculation,streaming,rejected"

    async def go() -> summary.Run:
        plain = FakeServer(speculative=False, exact=EXACT, api_key=SECRET)
        async with plain, tested:
            given = inputs(tested, plain, path, settings(names), key=SECRET)
            return await session.verify(given, silent)

    return asyncio.run(go())


def test_row_says_what_was_done_and_what_was_not(run: summary.Run) -> None:
    row = evidence_row(run)
    assert (row["schema"], row["kind"]) == (SCHEMA, "verify")
    assert (row["verdict"], row["complete"]) == ("divergence", False)
    assert row["open_arms"] == ["streaming", "rejected"]
    arms = row["arms"]
    assert [arms[n]["state"] for n in arms] == ["verified", "diverged", "not exercised"]
    assert (arms["speculation"]["compared"], arms["speculation"]["equal"]) == (3, 3)
    assert arms["streaming"]["equal"] == 0
    assert row["tested"]["exact"]["gpu"] == EXACT["gpu"]
    assert row["tested"]["exact"]["test_settings"] == {"oracle": True}
    assert row["tested"]["hooks"] == 2
    assert row["tested"]["accelerator"] == "NVIDIA H200"
    assert row["reference"]["accelerator"] is None
    assert re.fullmatch("[0-9a-f]{64}", row["tested"]["attestation_sha256"])
    assert row["tested"]["model"] == "Qwen3.8-27B"
    assert row["settings"]["repeats"] == 24


def test_row_holds_nothing_private(run: summary.Run) -> None:
    text = json.dumps(evidence_row(run))
    for word in (
        SECRET,
        "alice",
        "/",
        "127.0.0.1",
        "private",
        'logprob"',
        "prompt_sha",
    ):
        assert word not in text.replace(SCHEMA, "").replace("3/", ""), word
    ids = [r.answer.ids for r in run.references.values()]
    assert all(str(list(answer))[1:-1] not in text for answer in ids)
    # The full result does hold some of it, so the search above can find it.
    assert "alice" in json.dumps(summary.to_json(run))


def test_every_field_of_the_row_is_documented(run: summary.Run) -> None:
    page = DOCS.read_text(encoding="utf-8")
    section = page[page.index("## A row for a table") :]
    section = section[: section.index("\n## ", 3)]
    row = evidence_row(run)
    names = [*row, *row["settings"], *row["arms"]["speculation"], *row["tested"]]
    names += row["tested"]["exact"]
    sizes = {"tp_size", "dp_size", "pp_size"}
    missing = {n for n in names if f"`{n}`" not in section} - sizes
    assert missing == set()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3.8-27B", "Qwen/Qwen3.8-27B"),
        ("/models/bob/Qwen3.8-27B/", "Qwen3.8-27B"),
        ("C:\\Users\\bob\\Qwen", "Qwen"),
        ("~/models/x", "x"),
        ("./x", "x"),
        ("a/b/c", "c"),
        ("s3://key:secret@bucket/x", "x"),
        (
            "/root/.cache/hub/models--Qwen--Qwen3.8-27B/snapshots/ab12",
            "Qwen/Qwen3.8-27B",
        ),
        ("", None),
        (None, None),
        (["x"], None),
    ],
)
def test_model_without_its_place(path: Any, name: str | None) -> None:
    assert public_name(path) == name


@pytest.mark.parametrize(
    ("answers", "percent"),
    [
        *((30, "10"), (299, "1.1"), (300, "1"), (1100, "0.28"), (1200, "0.25")),
        *((2999, "0.11"), (3000, "0.1"), (3001, "0.1"), (30_000, "0.01")),
    ],
)
def test_bound_is_never_rounded_down(answers: int, percent: str) -> None:
    assert summary.bound_percent(answers, answers) == percent
    # The exact end of the interval: (1 - p)**n = 0.05.
    exact = 100 * (1 - 0.05 ** (1 / answers))
    assert exact < float(percent)
    text = summary.failure_bound(answers, answers)
    assert text is not None
    assert f"0 of {answers:,} answers differ" in text
    assert (
        f"below {percent} % with 95 % confidence (rule of three, 3/{answers:,})" in text
    )


def test_no_bound_without_enough_or_with_a_failure() -> None:
    assert summary.bound_percent(29, 29) is None
    assert summary.failure_bound(3000, 2999) is None


def test_bound_is_that_of_the_answers_that_came(tmp_path: Path) -> None:
    """--repeats 3000 gives no bound for 3,000 before they are there."""
    asked = settings("repeats", repeats=40, tokens=12)
    run = asyncio.run(against(FakeServer(step_s=0.004), tmp_path, asked))
    row = summary.arm_row(run, run.results[0])
    assert (row["state"], row["compared"]) == ("verified", 40), row["reasons"]
    assert "below 7.5 %" in row["failure_bound"]
    bad = Lies({"wrong-token"}, position=2, when=lambda _, s: s.requests == 30)
    run = asyncio.run(against(FakeServer(step_s=0.004, lies=bad), tmp_path, asked))
    assert summary.to_json(run)["failure_bound"] is None
    assert plan.Settings().repeats == 1200


def test_plan_of_the_oracle_from_a_record(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    async def go() -> None:
        async with FakeServer(speculative=False) as plain:
            asked = settings("speculation,long-2k,repeats", num_prompts=2)
            given = inputs(plain, plain, tmp_path, asked, by_ids=True)
            assert await session.record_reference(given, silent) == []

    asyncio.run(go())
    path = tmp_path / "run.jsonl"
    known = continuations.continuations(path)
    answers = {tuple(r.answer.ids) for r in record.read(path).references.values()}
    assert {tuple(row["output_ids"]) for row in known} <= answers
    assert sorted(len(row["input_ids"]) for row in known) == [8, 45, 2048, 2048]
    assert continuations.main([str(path), "--rate", "0.5"]) == 0
    written = json.loads(capfdbinary.readouterr().out)
    assert written == {"rate": 0.5, "seed": 1, "continuations": known}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["seed"] += 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert continuations.main([str(path)]) == 2
    assert b"cannot be built again" in capfdbinary.readouterr().err
