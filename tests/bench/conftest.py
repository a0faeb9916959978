# SPDX-License-Identifier: Apache-2.0
"""One pair of real engines on the CPU for all bench commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The fake server of the verifier's tests is the base of the one here.
sys.path.append(str(Path(__file__).resolve().parents[1] / "verify"))

from bench_runs import PROMPTS, EnginePair, write_ids  # noqa: E402

ORACLE_TOKENS = 24


@pytest.fixture(scope="session")
def engine_pair(
    tiny_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EnginePair]:
    """Both servers, for the whole session; ready in under a minute."""
    from sglang_exact.hooks.testing.oracle import VARIABLE, write_plan
    from sglang_exact.rehearsal.server import Server, draft_flags

    work = tmp_path_factory.mktemp("bench-engines")
    target, plan = tiny_models / "target", work / "oracle.json"
    write_plan(plan, 0.0, [])
    metrics = ["--enable-metrics"]
    flags = [*draft_flags("dflash", tiny_models / "dflash"), *metrics]
    env = {VARIABLE: str(plan)}
    with (
        Server(target, flags=metrics, log=work / "plain.log") as plain,
        Server(target, flags=flags, env=env, log=work / "spec.log") as spec,
    ):
        known = plain.generate_many(PROMPTS, ORACLE_TOKENS, concurrency=2)
        pairs = [(p, c.ids) for p, c in zip(PROMPTS, known, strict=True)]
        write_plan(plan, 0.7, pairs)
        yield EnginePair(plain.url, spec.url, tiny_models, plan)


@pytest.fixture
def ids_file(tmp_path: Path) -> Path:
    """PROMPTS as a local data set of token ids."""
    return write_ids(tmp_path / "ids.jsonl")
