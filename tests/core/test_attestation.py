# SPDX-License-Identifier: Apache-2.0
"""Every rank says the same, or the server is not ready."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_exact import attestation, hooks
from sglang_exact.host import VERSION, compat
from sglang_exact.host import source as host
from sglang_exact.reasons import Reason
from sglang_exact.settings import Settings


def recorded(settings: Settings) -> dict[str, Any]:
    """What a rank on a GPU attests under these settings."""
    decided = hooks.decide(settings, (hooks.SCHEDULER,))
    return attestation.record(decided, {"device": "cuda:0"}, {"ran": False})


def rank(number: int, **changes: object) -> dict[str, Any]:
    return {"rank": number, "digest": "d", "hooks": ["a"], "gpu": "H", **changes}


def test_equal_ranks() -> None:
    assert attestation.rank_reasons([rank(0), rank(1)]) == []


@pytest.mark.parametrize("records", [[], [None], [rank(0), None]])
def test_missing_rank(records: list[dict[str, Any] | None]) -> None:
    (reason,) = attestation.rank_reasons(records)
    assert "no attestation from rank(s)" in reason.found


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"version": "0.0.9"}, "version"),
        ({"digest": "e"}, "digest"),
        ({"hooks": []}, "hooks"),
        ({"gpu": "B"}, "gpu"),
        ({"host_fingerprint": "e"}, "host_fingerprint"),
        ({"small_m": 0}, "small_m"),
        ({"self_test": {"ran": True, "seconds": 2.0, "mismatches": 1}}, "self_test"),
    ],
)
def test_rank_that_differs(change: dict[str, object], name: str) -> None:
    """One rank is enough, and the message says in what."""
    (reason,) = attestation.rank_reasons([rank(0), rank(1), rank(2, **change)])
    assert f"rank 2 attests something else than rank 0: {name} " in reason.found


def test_duration_of_the_self_test_is_a_ranks_own() -> None:
    """Two ranks never take the same time."""

    def tested(number: int, seconds: float) -> dict[str, Any]:
        return rank(number, self_test={"ran": True, "seconds": seconds})

    assert attestation.rank_reasons([tested(0, 1.5), tested(1, 2.5)]) == []


def test_host_fingerprint_follows_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another source under the same name, or a name that is gone, changes it."""
    source = {"a": "1", "b": "2"}

    def fingerprint(name: str) -> host.Fingerprint:
        if name not in source:
            raise host.TargetMissing(name)
        return host.Fingerprint((), source[name])

    monkeypatch.setattr(host, "fingerprint", fingerprint)
    before = attestation.host_fingerprint(["a", "b"])
    assert before == attestation.host_fingerprint(["b", "a"])
    source["b"] = "3"
    changed = attestation.host_fingerprint(["a", "b"])
    del source["b"]
    gone = attestation.host_fingerprint(["a", "b"])
    assert len({before, changed, gone}) == 3


@pytest.mark.host
def test_host_fingerprint_of_files_as_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken from the pins, it is the one that parsing the files gives."""
    names = hooks.pinned_names()[::20]
    short = attestation.host_fingerprint(names)
    monkeypatch.setattr(compat, "certain", lambda pins, names: {})
    assert attestation.host_fingerprint(names) == short


def test_numerics() -> None:
    """`bitwise` needs the pins, every hook and a GPU."""
    on = Settings(enable=True)
    assert attestation.numerics(on, "cuda:0", True) == attestation.BITWISE
    assert attestation.numerics(on, "cpu", True) == attestation.UNVERIFIED
    off = on._replace(disabled_hooks=("gdn_verify",))
    assert attestation.numerics(off, "cuda:0", True) == attestation.UNVERIFIED
    default = on._replace(deep_gemm_default=True)
    assert attestation.numerics(default, "cuda:0", True) == attestation.UNVERIFIED
    rehearsed = on._replace(rehearsal=True)
    assert attestation.numerics(rehearsed, "cuda:0", True) == attestation.UNVERIFIED
    waived = on._replace(allow_unpinned_host=True)
    assert attestation.numerics(waived, "cuda:0", False) == attestation.UNVERIFIED


@pytest.mark.parametrize("changed", [False, True])
def test_a_changed_host_is_never_bitwise(
    monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    """The pinned version with one changed function, let in by the waiver."""
    reasons = [Reason("another source", "its pin", "reinstall")] if changed else []
    monkeypatch.setattr(compat, "reasons", lambda names: reasons)
    monkeypatch.setattr(compat, "stack_reasons", list)
    on = Settings(enable=True, allow_unpinned_host=True)
    found = recorded(on)
    assert found["host_pinned"] is not changed
    assert (found["numerics"] == attestation.BITWISE) is not changed


@pytest.mark.parametrize("changed", [False, True])
def test_another_stack_is_never_bitwise(
    monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    """The pinned host on another torch, let in by the waiver: attested and logged."""
    versions = dict(host.stack_versions())
    pins = compat.load(VERSION)
    assert pins is not None
    versions |= pins.stack
    if changed:
        versions["torch"] = "2.13.0"
    monkeypatch.setattr(compat, "reasons", lambda names: [])
    monkeypatch.setattr(host, "version", lambda name: VERSION)
    monkeypatch.setattr(host, "stack_versions", lambda: versions)
    on = Settings(enable=True, allow_unpinned_host=True)
    found = recorded(on)
    assert found["not_pinned"] == ["torch 2.13.0"] * changed
    assert (found["numerics"] == attestation.BITWISE) is not changed
    assert ("NOT pinned: torch 2.13.0" in attestation.log_line(found)) is changed


def test_log_line_shows_test_settings() -> None:
    found = {
        "version": "1", "numerics": "unverified", "hooks": ["a", "b"],
        "host_version": VERSION, "host_pinned": True, "digest": "0123456789abcdef",
        "not_pinned": [], "test_settings": {"oracle": True}, "plugins": [],
    }  # fmt: skip
    assert "0123456789ab, PLUGINS ['other'], TEST" in attestation.log_line(
        {**found, "plugins": ["other"]}
    )
    line = attestation.log_line(found)
    assert line == (
        f"sglang_exact 1: unverified, 2 hooks, host {VERSION} (pinned), digest "
        "0123456789ab, TEST SETTINGS {'oracle': True}"
    )


HOLDS = {"capture_num_tokens": [4, 8], "use_captured_attn_metadata": True}
BREAKS = {"capture_num_tokens": [4, 8], "use_captured_attn_metadata": False}


@pytest.mark.parametrize(
    ("runner", "rows"), [(HOLDS, [4, 8]), (BREAKS, [4, 8]), ({}, []), (None, [])]
)
def test_prefill_graphs_are_attested_as_captured(
    monkeypatch: pytest.MonkeyPatch, runner: dict[str, Any] | None, rows: list[int]
) -> None:
    """An eager runner, or none, stands in their place where there are no graphs."""
    parallel = SimpleNamespace(tp_rank=0, tp_size=1)
    context = SimpleNamespace(get_parallel=lambda: parallel)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    model = SimpleNamespace(
        device="cpu",
        dtype="torch.bfloat16",
        model_config=SimpleNamespace(context_len=64, hf_config=SimpleNamespace()),
        prefill_cuda_graph_runner=None if runner is None else SimpleNamespace(**runner),
    )
    worker = SimpleNamespace(model_runner=model)
    facts = attestation.runtime_facts(SimpleNamespace(tp_worker=worker))
    assert facts["prefill_graphs"] == rows
    assert facts["prefill_graphs_hold_gdn"] is (runner is HOLDS)
    others = [rank(0, prefill_graphs=[4]), rank(1, prefill_graphs=[4, 8])]
    assert len(attestation.rank_reasons(others)) == 1
