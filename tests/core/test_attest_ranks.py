# SPDX-License-Identifier: Apache-2.0
"""The launcher's part of attestation: what the ranks' pipes bring is compared."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_exact import attestation, gate
from sglang_exact.hooks import launch
from sglang_exact.hooks.registered import Decision
from sglang_exact.reasons import Refused
from sglang_exact.settings import Settings


def info(rank: int, **changes: object) -> dict[str, Any]:
    """What a rank reports when it is ready."""
    record = {"rank": rank, "tp_size": 2, "version": "1", "digest": "d", **changes}
    return {"status": "ready", attestation.KEY: record}


def attest(*infos: dict[str, Any]) -> list[dict[str, Any]]:
    return launch.attest_ranks(lambda readers, procs: list(infos), [], [])


@pytest.fixture(autouse=True)
def hooks_in_force(
    monkeypatch: pytest.MonkeyPatch, decide: Callable[[Settings], Decision]
) -> None:
    decide(Settings(enable=True))
    monkeypatch.setattr(launch, "_effect_reasons", lambda: [])


def test_two_equal_ranks_are_counted() -> None:
    found = attest(info(0), info(1))
    assert [x[attestation.KEY]["ranks"] for x in found] == [2, 2]
    assert [set(x[attestation.KEY]["http"]) for x in found] == [{"roles", "hooks"}] * 2


def test_an_engine_that_starts_its_ranks_itself() -> None:
    """It never waits where ranks attest, and its ranks may not load plugins."""
    for infos, good in (([info(0)], True), ([{"status": "ready"}], False)):
        result = SimpleNamespace(scheduler_infos=infos)
        if good:
            launch.attest_engine(None, result, 0.0)
        else:
            with pytest.raises(Refused, match="no attestation from rank"):
                launch.attest_engine(None, result, 0.0)


@pytest.mark.parametrize("name", ["version", "digest", "hooks", "host_fingerprint"])
def test_a_rank_that_differs_stops_the_start(name: str) -> None:
    with pytest.raises(Refused) as refusal:
        attest(info(0), info(1, **{name: "other"}))
    (reason,) = refusal.value.reasons
    assert f"rank 1 attests something else than rank 0: {name} 'other'" in reason.found


def test_a_rank_that_does_not_attest_stops_the_start() -> None:
    with pytest.raises(Refused) as refusal:
        attest(info(0), {"status": "ready"})
    assert "no attestation from rank(s) [1]" in refusal.value.reasons[0].found


def test_a_rank_that_left_is_named() -> None:
    """The host only says that a scheduler died."""

    def died(readers: Any, procs: Any) -> list[dict[str, Any]]:
        raise RuntimeError("Rank 1 scheduler died")

    procs = [SimpleNamespace(exitcode=code) for code in (None, gate.EXIT_STATUS)]
    with pytest.raises(Refused, match=r"rank\(s\) \[1\] refused to start"):
        launch.attest_ranks(died, [], procs)
    procs[1].exitcode = -9
    with pytest.raises(RuntimeError, match="scheduler died"):
        launch.attest_ranks(died, [], procs)
