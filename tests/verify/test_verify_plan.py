# SPDX-License-Identifier: Apache-2.0
"""Prompts and plans: what the package promises to ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_exact.verify import arms, plan, prefixes, prompts
from sglang_exact.verify.prompts import PromptError


def build(suite: str = "standard", **changes: object) -> plan.Plan:
    chosen = plan.Settings(suite=suite)._replace(**changes)
    return plan.build(chosen, by_ids=False, vocab_size=1000)


def test_built_in_prompts() -> None:
    found = prompts.built_in()
    assert len(found) == prompts.BUILT_IN == 24
    assert len({p.id for p in found}) == len({p.sha256() for p in found}) == 24
    kinds = {p.kind for p in found}
    assert kinds == {
        "chat", "code", "maths", "prose", "language", "repetition", "near-tie",
    }  # fmt: skip
    assert set(plan.DEEP_PROMPTS) <= {p.id for p in found}


@pytest.mark.parametrize("suite", ["standard", "full"])
def test_suites_generate_ten_thousand_tokens(suite: str) -> None:
    base = next(a for a in build(suite).arms if a.arm.name == "speculation")
    assert len(base.jobs) == 24
    assert base.tokens() >= 10_000


def test_suites_grow() -> None:
    names = [{p.arm.name for p in build(suite).arms} for suite in arms.SUITES]
    assert names[0] < names[1] < names[2]
    assert names[2] == {arm.name for arm in arms.ARMS}


def test_repeats_bound() -> None:
    found = {p.arm.name: p for p in build(repeats=3000).arms}["repeats"]
    assert len(found.jobs) == 3000
    assert found.arm.in_flight == 8


def test_plan_digest_follows_the_settings() -> None:
    assert build().digest() == build().digest()
    assert build().digest() != build(tokens=9).digest()


@pytest.mark.parametrize("vocab_size", [16, 512, 32000, 248320])
def test_id_prompts_stay_in_the_vocabulary(vocab_size: int) -> None:
    found = prompts.seeded_ids(vocab_size, seed=1)
    assert found == prompts.seeded_ids(vocab_size, seed=1)
    assert found != prompts.seeded_ids(vocab_size, seed=2)
    assert len(found) == 24
    for prompt in found:
        assert prompt.ids is not None and 8 <= len(prompt.ids) < 120
        assert all(0 <= token < vocab_size for token in prompt.ids)


def test_ids_are_the_same_on_every_machine() -> None:
    assert prompts.id_prompt("x", 4, 1000, 1).ids == (180, 336, 767, 507)


def test_unknown_vocabulary_blocks_only_what_needs_it() -> None:
    found = plan.build(plan.Settings(), by_ids=False, vocab_size=None)
    blocked = {p.arm.name for p in found.arms if p.refusal}
    by_ids = {*arms.LONG, *prefixes.CASES}
    assert blocked == {p.arm.name for p in found.arms if p.arm.cases in by_ids}
    by_ids = plan.build(plan.Settings(), by_ids=True, vocab_size=None)
    assert all("--vocab-size" in p.refusal for p in by_ids.arms)


def test_own_prompts(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(
        '{"text": "a", "id": "one", "max_new_tokens": 7}\n\n{"input_ids": [1, 2]}\n'
    )
    base = build(prompts=path, arms=("speculation",)).arms[0].jobs
    assert [job.case.max_new_tokens for job in base] == [7, 512]
    with pytest.raises(PromptError, match="needs input_ids|need"):
        plan.build(plan.Settings(prompts=path), by_ids=True, vocab_size=9)


def test_bad_own_prompts_name_every_line(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"text": ""}\n[]\n{oops\n{"text": "a", "input_ids": [1]}\n')
    with pytest.raises(PromptError, match="line 1.*line 2.*line 3.*line 4"):
        prompts.load_jsonl(path)
    with pytest.raises(PromptError, match="cannot be read"):
        prompts.load_jsonl(tmp_path / "none")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown arms nothing; expected"):
        build(arms=("nothing",))
    with pytest.raises(ValueError, match="expected one of quick"):
        build("huge")


def test_long_list_of_bad_prompts_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_bytes(b"\xff\n" * 5000)
    with pytest.raises(PromptError, match="line 20: .*; and 4980 more$") as found:
        prompts.load_jsonl(path)
    assert "line 21:" not in str(found.value)


def test_many_own_prompts_are_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(f'{{"text": "a {n}"}}\n' for n in range(20_000)))
    assert len(prompts.load_jsonl(path)) == 20_000
    path.write_text('{"text": "a", "id": "x"}\n{"text": "b", "id": "x"}\n')
    with pytest.raises(PromptError, match="ids used more than once: x"):
        prompts.load_jsonl(path)


def test_names_of_prompts_are_fit_for_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    rows = ('"id": "a\\u001b[31m\\nb"', '"id": "\\u0007"', '"id": "plain:1"')
    path.write_text("".join(f'{{"text": "x", {row}}}\n' for row in rows))
    names = [prompt.id for prompt in prompts.load_jsonl(path)]
    assert names == ["a [31m b", "user-002", "plain:1"]
