# SPDX-License-Identifier: Apache-2.0
"""Does the installed host match the pins of this release?

Signature and source of every hook target, and of the kernels whose bits the
overlay relies on, are compared with `pins/sglang-<version>.json`. Numerics can
change under an unchanged signature, hence the source hash.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, NamedTuple

from sglang_exact import host
from sglang_exact.reasons import Reason

FIX = "pip install 'sglang==0.5.23' (the pinned release)"


class Pins(NamedTuple):
    """Fingerprints of one host release."""

    version: str
    targets: dict[str, host.Fingerprint]
    stack: dict[str, str]


def pinned_versions() -> list[str]:
    """Host releases that have a pins file."""
    names = [p.name for p in resources.files("sglang_exact.pins").iterdir()]
    return sorted(
        n.removeprefix("sglang-").removesuffix(".json")
        for n in names
        if n.startswith("sglang-") and n.endswith(".json")
    )


def load(version: str) -> Pins | None:
    """The pins of a host release, or None when there are none."""
    file = resources.files("sglang_exact.pins") / f"sglang-{version}.json"
    if not file.is_file():
        return None
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    targets = {
        name: host.Fingerprint(tuple(item["params"]), item["sha256"])
        for name, item in data["targets"].items()
    }
    return Pins(data["version"], targets, data["stack"])


def target_reasons(pins: Pins, names: list[str]) -> list[Reason]:
    """Reasons why host targets differ from the pins."""
    reasons = []
    for name in names:
        expected = pins.targets.get(name)
        if expected is None:
            reasons.append(
                Reason(f"{name} is not pinned", "a pin for every target", FIX)
            )
            continue
        try:
            found = host.fingerprint(name)
        except host.TargetMissing as error:
            reasons.append(Reason(str(error), f"{name} of {pins.version}", FIX))
            continue
        if found.params != expected.params:
            reasons.append(
                Reason(
                    f"{name} takes {', '.join(found.params)}",
                    ", ".join(expected.params),
                    FIX,
                )
            )
        elif found.sha256 != expected.sha256:
            reasons.append(
                Reason(
                    f"{name} has source {found.sha256[:12]}",
                    f"source {expected.sha256[:12]} of {pins.version}",
                    FIX,
                )
            )
    return reasons


def reasons(names: list[str]) -> list[Reason]:
    """Every way in which the installed host differs from its pins."""
    version = host.version("sglang")
    if version is None or host.root() is None:
        return [
            Reason("no SGLang installed", f"one of {', '.join(pinned_versions())}", FIX)
        ]
    pins = load(version)
    if pins is None:
        return [
            Reason(
                f"SGLang {version}",
                f"a pinned release: {', '.join(pinned_versions())}",
                FIX,
            )
        ]
    return target_reasons(pins, names)


def stack_notes() -> list[Reason]:
    """Packages whose version differs from the one the evidence was made with.

    These are notes, not refusals: the start-up self-test decides on the device.
    """
    pins = load(host.version("sglang") or "")
    if pins is None:
        return []
    found = host.stack_versions()
    return [
        Reason(f"{name} {found.get(name)}", expected, f"pip install {name}=={expected}")
        for name, expected in pins.stack.items()
        if found.get(name) != expected
    ]
