# SPDX-License-Identifier: Apache-2.0
"""The verifier against the real engine: it verifies the overlay and it can fail.

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
# Verify and decode attention agree on up to one key tile of 256.
LONG = ([3 + (7 * i * i + i) % 500 for i in range(260)],)
DISABLE = "SGLANG_EXACT_TEST_DISABLE_HOOKS"


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


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_prompts(tmp_path_factory.mktemp("verify-long"), LONG)


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
    from sglang_exact.rehearsal.oracle import VARIABLE, write_plan

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


@pytest.mark.parametrize("hook", ["gdn_verify", "attention_verify"])
def test_one_hook_off_diverges(
    request: pytest.FixtureRequest, tiny_models: Path, hook: str
) -> None:
    from sglang_exact.rehearsal.server import Server, draft_flags

    long = hook == "attention_verify"
    folder: Path = request.getfixturevalue("long_folder" if long else "folder")
    reference = recorded(folder, tiny_models, "exact")
    env = oracle(folder, reference, 0.6, LONG if long else PROMPTS) | {DISABLE: hook}
    flags = draft_flags("dflash", tiny_models / "dflash")
    with Server(tiny_models / "target", flags=flags, env=env) as server:
        status, result = verify(folder, server.url, reference, "speculation")
    assert (status, states(result)) == (1, {"speculation": "diverged"}), result
    servers = result["provenance"]["servers"]
    tests = servers[0]["exact"]["test_settings"]
    assert tests["disabled_hooks"] == [hook]
