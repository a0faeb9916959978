# SPDX-License-Identifier: Apache-2.0
"""The installed host against its pins: every difference is a reason."""

from __future__ import annotations

import pytest

from sglang_exact import compat, hooks, host


@pytest.mark.host
def test_the_pinned_host_has_no_reasons() -> None:
    names = hooks.pinned_names()
    assert len(names) > 40
    assert compat.reasons(names) == []


def test_every_target_is_pinned() -> None:
    """A hook that is added needs its pin: scripts/pin_host --write."""
    for version in compat.pinned_versions():
        pins = compat.load(version)
        assert pins is not None
        assert set(hooks.pinned_names()) == set(pins.targets)


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "version", lambda name: "0.5.24")
    monkeypatch.setattr(host, "root", lambda: "here")
    (reason,) = compat.reasons(hooks.pinned_names())
    assert reason.found == "SGLang 0.5.24"
    assert "0.5.23" in reason.expected


def test_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "version", lambda name: None)
    (reason,) = compat.reasons(hooks.pinned_names())
    assert reason.found == "no SGLang installed"


def test_differences_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed body, another signature, a missing target and one without a pin."""
    pins = compat.Pins(
        "1.0",
        {
            name: host.Fingerprint(("self", "x"), "a" * 64)
            for name in ("same", "body", "signature", "gone")
        },
        {},
    )
    found = {
        "same": host.Fingerprint(("self", "x"), "a" * 64),
        "body": host.Fingerprint(("self", "x"), "b" * 64),
        "signature": host.Fingerprint(("self", "x", "y"), "c" * 64),
    }

    def fingerprint(name: str) -> host.Fingerprint:
        if name not in found:
            raise host.TargetMissing(f"{name}: not there")
        return found[name]

    monkeypatch.setattr(host, "fingerprint", fingerprint)
    names = ["same", "body", "signature", "gone", "unpinned"]
    reasons = compat.target_reasons(pins, names)
    assert [r.found for r in reasons] == [
        "body has source bbbbbbbbbbbb",
        "signature takes self, x, y",
        "gone: not there",
        "unpinned is not pinned",
    ]
    assert compat.target_reasons(pins, ["same"]) == []
