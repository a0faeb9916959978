# SPDX-License-Identifier: Apache-2.0
"""The verifier against the real engine: it verifies the overlay and it can fail.

Hooks that are off are in test_verify_hooks.py, whole suites in test_verify_suites.py.
CPU, interpreted kernels, random weights, acceptance set by the oracle: this proves that
the tool sees what the engine does, not that a GPU keeps the bits.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOKENS = 8
PROMPTS = ([5, 6, 7, 8, 9, 10, 11, 12], [100, 90, 80, 70, 60, 50, 40, 30, 20, 10, 400])


def command(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `sglang-exact` as a user does."""
    main = "from sglang_exact.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", main, *args],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=cwd,
        check=False,
    )


def with_prompts(path: Path, prompts: Sequence[list[int]]) -> Path:
    rows = [{"input_ids": ids, "max_new_tokens": TOKENS} for ids in prompts]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (path / "prompts.jsonl").write_text(lines)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_prompts(tmp_path_factory.mktemp("verify"), PROMPTS)


def recorded(folder: Path, models: Path, mode: str) -> Path:
    """The record of a plain server of this mode, made once."""
    from sglang_exact.rehearsal.server import Server

    path = folder / f"plain-{mode}.jsonl"
    if path.exists():
        return path
    with Server(models / "target", mode=mode) as server:
        done = command(
            *("record", "--base-url", server.url, "--prompts", "prompts.jsonl"),
            *("--arms", "speculation", "--output-file", str(path)),
            cwd=folder,
        )
    assert done.returncode == 0, done.stderr
    return path


def rows(path: Path, kind: str) -> list[dict]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in found if row["kind"] == kind]


def oracle(
    folder: Path,
    reference: Path,
    rate: float,
    prompts: Sequence[list[int]] = PROMPTS,
) -> dict[str, str]:
    """Environment that makes drafts out of the recorded answers."""
    from sglang_exact.hooks.testing.oracle import VARIABLE, write_plan

    answers = [row["answer"]["ids"] for row in rows(reference, "reference")]
    path = folder / "oracle.json"
    write_plan(path, rate, list(zip(prompts, answers, strict=True)))
    return {VARIABLE: str(path)}


def verify(
    folder: Path, url: str, reference: Path, arms: str, *extra: str
) -> tuple[int, dict]:
    done = command(
        *("verify", "--base-url", url, "--reference", str(reference)),
        *("--prompts", "prompts.jsonl", "--arms", arms, "--json", "result.json"),
        *extra,
        cwd=folder,
    )
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1, 2), done.stderr
    return done.returncode, json.loads((folder / "result.json").read_text())


def states(result: dict) -> dict[str, str]:
    return {row["arm"]: row["state"] for row in result["arms"]}


def test_overlay_is_verified(folder: Path, tiny_models: Path) -> None:
    from sglang_exact.rehearsal.server import Server, draft_flags

    reference = recorded(folder, tiny_models, "exact")
    header = rows(reference, "header")[0]
    assert (header["by_ids"], header["vocab_size"]) == (True, 512)
    env = oracle(folder, reference, 0.6)
    flags = draft_flags("dflash", tiny_models / "dflash")
    arms = "speculation,without-logprobs,streaming"
    with Server(tiny_models / "target", flags=flags, env=env) as server:
        status, result = verify(folder, server.url, reference, arms)
        assert (status, set(states(result).values())) == (0, {"verified"}), result
        first = result["arms"][0]
        assert first["acceptance"]["micro"] > 1.2
        assert first["logprobs_compared"] is True
        # The oracle file is read again: the same server now rejects every draft.
        oracle(folder, reference, 0.0)
        also = ("--server", f"reject-all={server.url}")
        status, result = verify(folder, server.url, reference, "rejected", *also)
        assert (status, states(result)) == (0, {"rejected": "verified"}), result


def test_stock_speculation_diverges(folder: Path, tiny_models: Path) -> None:
    from sglang_exact.rehearsal.server import Server, draft_flags

    reference = recorded(folder, tiny_models, "stock")
    env = oracle(folder, reference, 0.6)
    flags = draft_flags("dflash", tiny_models / "dflash")
    with Server(tiny_models / "target", mode="stock", flags=flags, env=env) as server:
        status, result = verify(folder, server.url, reference, "speculation")
    assert (status, states(result)) == (1, {"speculation": "diverged"}), result
    found = result["arms"][0]["first_divergence"]
    assert found["position"] == 1, "the first token that a verify step gives"
    assert found["survives_one_in_flight"] is True
    assert found["suspicion"] == "kernel", found


TEXTS = ("thequickbrownfoxjumpsoverthelazydog", "onetwothreefourfivesixseven")


def test_text_prompts_and_stop_strings(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, tiny_models: Path
) -> None:
    """Servers with a tokenizer: prompts are text, and strings can end an answer."""
    from tokenizers import Tokenizer

    from sglang_exact.hooks.testing import oracle
    from sglang_exact.rehearsal import models, tokenizer
    from sglang_exact.rehearsal.server import Server, draft_flags

    class TextServer(Server):
        def command(self) -> list[str]:
            return [x for x in super().command() if x != "--skip-tokenizer-init"]

    target = tmp_path_factory.mktemp("text") / "target"
    tokenizer.make_tokenizer(models.make_target(target))
    lines = [json.dumps({"text": t, "max_new_tokens": TOKENS}) for t in TEXTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    arms = "speculation,streaming,stops"
    asked = ("--prompts", "prompts.jsonl", "--arms", arms)
    with TextServer(target) as server:
        done = command(
            *("record", "--base-url", server.url, "--output-file", "plain.jsonl"),
            *asked,
            cwd=tmp_path,
        )
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "plain.jsonl", "header")[0]["by_ids"] is False
    read = Tokenizer.from_file(str(target / "tokenizer.json"))
    known = {}
    for row in rows(tmp_path / "plain.jsonl", "reference"):
        ids = tuple(read.encode(TEXTS[int(row["prompt"][-3:]) - 1]).ids)
        assert row["answer"]["prompt_tokens"] == len(ids)
        known[ids] = max(known.get(ids, []), row["answer"]["ids"], key=len)
    oracle.write_plan(tmp_path / "oracle.json", 0.6, list(known.items()))
    env = {oracle.VARIABLE: str(tmp_path / "oracle.json")}
    flags = draft_flags("dflash", tiny_models / "dflash")
    with TextServer(target, flags=flags, env=env) as server:
        status, result = verify(tmp_path, server.url, tmp_path / "plain.jsonl", arms)
    assert (status, set(states(result).values())) == (0, {"verified"}), result["arms"]
