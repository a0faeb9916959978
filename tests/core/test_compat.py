# SPDX-License-Identifier: Apache-2.0
"""The installed host against its pins: every difference is a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_exact import hooks, launch_server
from sglang_exact.cli import doctor
from sglang_exact.client import machine
from sglang_exact.host import VERSION, compat
from sglang_exact.host import source as host
from sglang_exact.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.host
def test_the_pinned_host_has_no_reasons() -> None:
    names = hooks.pinned_names()
    assert len(names) > 40
    assert compat.reasons(names) == []
    # Both ways to know it: by the bytes of its files, and by parsing each target.
    pins = compat.load(VERSION)
    assert pins is not None
    assert compat.certain(pins, names) == pins.targets
    assert compat.target_reasons(pins, names) == []


@pytest.mark.host
def test_what_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets of a file with one other byte, those without a pin, and no others."""
    pins = compat.load(VERSION)
    assert pins is not None
    names = hooks.pinned_names()
    file, _ = host.module_file(names[0])
    there = [name for name in names if host.module_file(name)[0] == file]
    read = Path.read_bytes
    edited = lambda path: read(path) + b"\n" * (path == file)  # noqa: E731
    monkeypatch.setattr(Path, "read_bytes", edited)
    assert compat.certain(pins, names).keys() == pins.targets.keys() - there
    last = names[-1]
    pinned = {name: pin for name, pin in pins.targets.items() if name != last}
    found = compat.certain(pins._replace(targets=pinned), [*names, "sglang.srt.no.f"])
    assert found.keys() == pinned.keys() - there


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
    assert reason.found == "SGLang 0.5.24, which has no pins"
    assert VERSION in reason.expected


def test_a_release_that_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.22 is refused in so many words, whatever pins there might be."""
    monkeypatch.setattr(host, "version", lambda name: "0.5.22")
    monkeypatch.setattr(host, "root", lambda: "here")
    (reason,) = compat.reasons(hooks.pinned_names())
    assert reason.found.startswith("SGLang 0.5.22, which is not supported: it lacks")
    assert "docs/upgrading.md" in reason.found
    assert reason.expected == f"a pinned release: {VERSION}"
    assert f"sglang=={VERSION}" in reason.fix
    (check,) = doctor.host_checks()
    assert check.status == doctor.FAIL
    assert "SGLang 0.5.22, which is not supported" in check.found
    launcher = launch_server.prepare({}, launch_server.split_flags([])[0])
    assert reason in launcher


@pytest.mark.parametrize("name", host.STACK)
def test_another_stack_is_refused_where_it_would_serve(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A rehearsal promises no bits; the waiver attests "unverified"."""
    pins = compat.load(VERSION)
    assert pins is not None
    versions: dict[str, str | None] = dict(pins.stack)
    monkeypatch.setattr(compat, "reasons", lambda names: [])
    monkeypatch.setattr(host, "version", lambda name: VERSION)
    monkeypatch.setattr(host, "stack_versions", lambda: versions)
    on = Settings(enable=True)
    assert compat.setup_reasons([], on) == []
    # The same build, from PyTorch's own index.
    versions[name] = f"{pins.stack[name]}+cu130"
    assert compat.setup_reasons([], on) == []
    for other in ("0.0.1", f"{pins.stack[name]}+local", None):
        versions[name] = other
        (reason,) = compat.setup_reasons([], on)
        assert reason.found == f"{name} {other or 'none'}"
        assert f"{name}=={pins.stack[name]}" in reason.fix
        assert "--exact-allow-unpinned-host" in reason.fix
        assert compat.setup_reasons([], on._replace(rehearsal=True)) == []
        assert compat.setup_reasons([], on._replace(allow_unpinned_host=True)) == []
        served = doctor.stack_checks({})
        waived = doctor.stack_checks({"SGLANG_EXACT_ALLOW_UNPINNED_HOST": "1"})
        assert doctor.FAIL not in [c.status for c in waived]
        assert any(c.found.startswith(f"found {name} ") for c in waived)
        assert len(served) == len(waived)


@pytest.mark.parametrize("cuda", ["13.0", None])
def test_doctor_fails_where_the_launcher_would(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None
) -> None:
    """A build of torch without CUDA can only rehearse."""
    pins = compat.load(VERSION)
    assert pins is not None
    monkeypatch.setattr(host, "version", lambda name: VERSION)
    versions = {**pins.stack, "triton": "3.7.0"}
    monkeypatch.setattr(host, "stack_versions", lambda: versions)
    monkeypatch.setattr(machine, "torch_cuda", lambda: cuda)
    (_, stack) = doctor.stack_checks({})
    assert stack.status == (doctor.FAIL if cuda else doctor.WARN)
    assert stack.found.startswith("found triton 3.7.0; expected triton 3.8.0")


def test_pins_without_a_device_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pins are no support: a release counts once a run on a GPU has proven it."""
    load = compat.load
    pins = load(VERSION)
    assert pins is not None and pins.device_run
    monkeypatch.setattr(host, "version", lambda name: VERSION)
    assert compat.version_reasons(VERSION) == []
    monkeypatch.setattr(compat, "load", lambda version: pins._replace(device_run=""))
    (reason,) = compat.version_reasons(VERSION)
    assert reason.found == f"SGLang {VERSION}, which has pins and no run on a GPU"


def test_the_device_run_is_there() -> None:
    """Results in the repository prove each pinned release, on that release."""
    for version in compat.pinned_versions():
        pins = compat.load(version)
        if pins is None or not pins.device_run:
            continue
        records = [
            json.loads(path.read_text())
            for path in (ROOT / pins.device_run).glob("*.json")
        ]
        assert any(
            found.get("versions", {}).get("sglang") == version and found.get("rows")
            for found in records
        )


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
