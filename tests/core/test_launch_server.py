# SPDX-License-Identifier: Apache-2.0
"""The launcher's own checks: flags, entry point, the host's list of plugins."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from sglang_exact import launch_server
from sglang_exact.reasons import Refused


def test_flags_are_split() -> None:
    host_flags = ["--model-path", "m", "--tp", "1", "--exactly-ours-not"]
    ours, rest = launch_server.split_flags(["--exact", *host_flags, "--exact-check"])
    assert ours.exact_check
    assert not ours.exact_allow_unpinned_host
    assert rest == host_flags


def test_unknown_flags_are_refused_all_at_once() -> None:
    with pytest.raises(Refused) as refused:
        launch_server.split_flags(["--exact-chek", "--exact-small-m"])
    assert len(refused.value.reasons) == 2


def test_abbreviations_are_not_taken() -> None:
    with pytest.raises(Refused):
        launch_server.split_flags(["--exact-ch"])


def patch_entry(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    points = []
    if value is not None:
        points = [metadata.EntryPoint(launch_server.NAME, value, launch_server.GROUP)]

    def entry_points(**select: Any) -> Any:
        return metadata.EntryPoints(points).select(**select)

    monkeypatch.setattr(metadata, "entry_points", entry_points)


def test_entry_point_present(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_entry(monkeypatch, launch_server.VALUE)
    assert launch_server.entry_point_reasons({}) == []


@pytest.mark.parametrize("value", [None, "another.package:register"])
def test_entry_point_missing_or_other(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    patch_entry(monkeypatch, value)
    (reason,) = launch_server.entry_point_reasons({})
    assert (value or "missing") in reason.found


@pytest.mark.parametrize(
    ("allowed", "good"),
    [("", True), (" , ", True), ("sglang_exact", True), ("a, sglang_exact", True),
     ("a", False), ("sglang-exact", False)],
)  # fmt: skip
def test_list_of_plugins(
    monkeypatch: pytest.MonkeyPatch, allowed: str, good: bool
) -> None:
    patch_entry(monkeypatch, launch_server.VALUE)
    reasons = launch_server.entry_point_reasons({"SGLANG_PLUGINS": allowed})
    assert (reasons == []) is good
