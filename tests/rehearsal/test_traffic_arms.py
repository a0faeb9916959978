# SPDX-License-Identifier: Apache-2.0
"""The arms of scripts/gpu_traffic: complete, with controls, each with valid flags."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from sglang_exact.client.blocking import Completion  # noqa: E402
from tools.proof import traffic, traffic_arms, traffic_asker  # noqa: E402
from tools.proof.arms import Arm  # noqa: E402

SHAPES = {False: traffic_arms.GPU, True: traffic_arms.REHEARSAL}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return traffic


def run(script: ModuleType, folder: Path, rehearsal: bool) -> Any:
    args = argparse.Namespace(
        state=str(folder), out=str(folder), rehearsal=rehearsal, start_timeout=1.0,
        name="traffic", budget=1e9,
    )  # fmt: skip
    return script.Run(args)


@pytest.mark.parametrize("rehearsal", [False, True])
def test_every_arm_has_a_server(
    script: ModuleType,
    tmp_path: Path,
    rehearsal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference first, four controls, three restarts with caches of their own."""
    monkeypatch.chdir(tmp_path)
    made = run(script, Path("state"), rehearsal)
    arms = traffic_arms.arms_of(SHAPES[rehearsal])
    assert arms[0].name == "plain"
    assert sum(not arm.equal for arm in arms) == 4
    folders = set()
    for arm in arms:
        assert set(arm.phases) <= set(traffic_asker.PHASES)
        server = made.server(arm, tmp_path / f"{arm.name}.json")
        line = " ".join(server.command())
        assert ("--speculative-algorithm" in line) == (arm.drafter is not None)
        assert set(arm.flags) <= set(line.split()) or rehearsal
        if arm.fresh:
            folders.add(server.environment()["TRITON_CACHE_DIR"])
            assert Path(server.environment()["SGLANG_DG_CACHE_DIR"]).is_absolute()
    assert len(folders) == 3


def test_a_later_call_keeps_the_rows_of_other_arms(
    script: ModuleType, tmp_path: Path
) -> None:
    first = run(script, tmp_path, True)
    rows = [{"arm": n, "phase": "flow", "as_expected": True} for n in ("plain", "mtp")]
    first.rows = {first.key(row): row for row in rows}
    first.failed = {"ngram": "no server", "mtp": "no answer"}
    first.write()
    later = run(script, tmp_path, True)
    later.keep_earlier(["mtp"])
    assert list(later.rows.values()) == rows[:1]
    assert later.failed == {"ngram": "no server"}
    later.write()
    kept = json.loads((tmp_path / "traffic.json").read_text())
    assert kept["rows"] == rows[:1] and len(kept["commands"]) == 2


def test_half_a_reference_is_none(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain server died on the way: an arm says so and nothing else breaks."""
    made = run(script, tmp_path, True)
    made.reference = {"prompt-12": []}
    made.ready.set()
    server = contextlib.nullcontext(
        SimpleNamespace(started_in_s=1.0, info=dict, client=None)
    )
    monkeypatch.setattr(made, "server", lambda arm, plan: server)
    made.one(Arm("dflash", "DFLASH", "dflash"))
    assert "expected 29; fix: run arm plain" in made.failed["dflash"]


def completion(ids: tuple[int, ...], value: float) -> Completion:
    meta = {"output_token_logprobs": [[value, ids[0], None]]}
    return Completion(ids, (), "length", 1, len(ids), 1.0, {"meta_info": meta})


def test_judge_sees_one_bit(script: ModuleType, tmp_path: Path) -> None:
    """A row is as expected only if nothing differs, or if a control differs."""
    made = run(script, tmp_path, True)
    same, other = completion((4, 5), 0.5), completion((4, 5), 0.5000001)
    made.reference = {"prompt": traffic_asker.said(same)}
    arm = Arm("x", "X", "dflash")
    for found, equal, expected in (
        (same, True, True),
        (other, True, False),
        (completion((4, 6), 0.5), True, False),
        (other, False, True),
        (same, False, False),
    ):
        made._judge(arm._replace(equal=equal), "flow", [("prompt", found)], 1.0)
        assert made.rows["x flow"]["as_expected"] is expected
    # Without a single verification a speculative arm proves nothing.
    idle = Completion((4, 5), (), "length", 0, 2, None, same.raw)
    made._judge(arm, "flow", [("prompt", idle)], 1.0)
    assert made.rows["x flow"]["as_expected"] is False
    # Nor does a crowd of which nobody was sent to host memory.
    for sent, expected in ((0, False), (1, True)):
        made._judge(arm, "crowd", [("prompt", same)], 1.0, sent)
        assert made.rows["x crowd"]["as_expected"] is expected


def test_a_logprob_that_is_no_number_differs(
    script: ModuleType, tmp_path: Path
) -> None:
    """Also where the plain server said the same: null proves nothing."""
    made = run(script, tmp_path, True)
    meta = {"output_token_logprobs": [[None, 4]]}
    broken = Completion((4,), (), "length", 1, 1, 1.0, {"meta_info": meta})
    made.reference = {"prompt": traffic_asker.said(broken)}
    made._judge(Arm("x", "X", "dflash"), "flow", [("prompt", broken)], 1.0)
    row = made.rows["x flow"]
    assert row["differ"] == ["prompt"] and not row["as_expected"]
    assert (row["tally"]["logprobs_compared"], row["tally"]["logprobs_equal"]) == (1, 0)
