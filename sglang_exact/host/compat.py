# SPDX-License-Identifier: Apache-2.0
"""Does the installed host match the pins of this release?

Signature and source of every hook target, and of the kernels whose bits the
overlay relies on, are compared with `pins/sglang-<version>.json`, and every file that
a rank can load with `pins/files-<version>.json`. Numerics can change under an
unchanged signature, hence the source hashes. Pins of a host that was never run on a
GPU are refused too: see docs/upgrading.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from sglang_exact.host import VERSION
from sglang_exact.host import files as host_files
from sglang_exact.host import source as host
from sglang_exact.reasons import Reason
from sglang_exact.settings import Settings

FIX = f"pip install 'sglang=={VERSION}' (the pinned release)"
REINSTALL = (
    f"pip install --force-reinstall --no-deps 'sglang=={VERSION}', or serve without "
    "the promise under --exact-allow-unpinned-host"
)
NAMED = 8


class Pins(NamedTuple):
    """Fingerprints of one host release.

    `inventory` lists what it can be asked for (`tools.pins.changes.INVENTORY`).
    `device_run` is the folder of results that prove the release on a GPU, relative
    to the repository; empty until there are any.
    """

    version: str
    targets: dict[str, host.Fingerprint]
    stack: dict[str, str]
    device_run: str = ""
    inventory: Mapping[str, list[str]] = MappingProxyType({})


def pinned_versions() -> list[str]:
    """Host releases that have a pins file."""
    names = [p.name for p in resources.files("sglang_exact.host.pins").iterdir()]
    return sorted(
        n.removeprefix("sglang-").removesuffix(".json")
        for n in names
        if n.startswith("sglang-") and n.endswith(".json")
    )


def load(version: str) -> Pins | None:
    """The pins of a host release, or None when there are none."""
    file = resources.files("sglang_exact.host.pins") / f"sglang-{version}.json"
    if not file.is_file():
        return None
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    targets = {
        name: host.Fingerprint(tuple(item["params"]), item["sha256"])
        for name, item in data["targets"].items()
    }
    return Pins(
        data["version"],
        targets,
        data["stack"],
        data.get("device_run", ""),
        data.get("inventory", {}),
    )


def not_supported() -> dict[str, str]:
    """Releases that were tried and are not supported: version -> why."""
    file = resources.files("sglang_exact.host.pins") / "not_supported.json"
    found: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return found


def version_reasons(version: str) -> list[Reason]:
    """Reasons to refuse a host release for its version alone."""
    proven = [name for name in pinned_versions() if _device_run(name)]
    expected = f"a pinned release: {', '.join(proven)}"
    why = not_supported().get(version)
    if why is not None:
        return [
            Reason(f"SGLang {version}, which is not supported: {why}", expected, FIX)
        ]
    if version not in pinned_versions():
        return [Reason(f"SGLang {version}, which has no pins", expected, FIX)]
    if version not in proven:
        found = f"SGLang {version}, which has pins and no run on a GPU"
        return [Reason(found, expected, FIX)]
    return []


def _device_run(version: str) -> str:
    pins = load(version)
    return pins.device_run if pins else ""


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
                    REINSTALL,
                )
            )
    return reasons


def certain(pins: Pins, names: Iterable[str]) -> dict[str, host.Fingerprint]:
    """Pins of the targets whose file is, byte for byte, as it was pinned.

    These need no parsing, which takes seconds for all files: pins of functions and of
    files are written together, from one source.
    """
    package, files = host.root(), host_files.pinned(pins.version)

    @cache
    def as_pinned(file: Path) -> bool:
        known = files.get(os.path.relpath(file, package), "")
        return known.startswith(host_files.raw_hash(file.read_bytes()))

    found = {}
    for name in names:
        with suppress(host.TargetMissing):
            if name in pins.targets and as_pinned(host.module_file(name)[0]):
                found[name] = pins.targets[name]
    return found


def reasons(names: list[str]) -> list[Reason]:
    """Every way in which the installed host differs from its pins."""
    version = host.version("sglang")
    if version is None or host.root() is None:
        return [
            Reason("no SGLang installed", f"one of {', '.join(pinned_versions())}", FIX)
        ]
    pins = load(version)
    found = version_reasons(version)
    if pins is None:
        return found
    sure = certain(pins, names)
    doubtful = [name for name in names if name not in sure]
    return found + target_reasons(pins, doubtful) + file_reasons(version)


def _named(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def file_reasons(version: str) -> list[Reason]:
    """Reasons in whole files of the host: edited or gone since they were pinned."""
    package, pins = host.root(), host_files.pinned(version)
    if package is None:
        return []
    if not pins:
        return [
            Reason(
                f"no pins of the files of SGLang {version}", "a pin for each", REINSTALL
            )
        ]
    found = host_files.changes(pins, package)
    return [
        Reason(
            f"files of the host in {package} that are {what}: {_named(names)}",
            f"each as in SGLang {version}",
            REINSTALL,
        )
        for what, names in (("edited", found.changed), ("gone", found.gone))
        if names
    ]


def loaded_reasons() -> list[Reason]:
    """Reasons in the host modules of this process: each from its pinned file."""
    found = host_files.loaded_here()
    if not found:
        return []
    return [
        Reason(
            "host modules that came from elsewhere: "
            + _named([f"{name} ({place})" for name, place in found.items()]),
            f"each module from its pinned file in {host.root()}",
            "take what shadows them off PYTHONPATH, or serve without the promise "
            "under --exact-allow-unpinned-host",
        )
    ]


def stack_reasons() -> list[Reason]:
    """Packages whose version differs from the one the evidence was made with.

    Their code makes the bits, and the start-up self-test sees only some of it.
    """
    pins = load(host.version("sglang") or "")
    if pins is None:
        return []
    found = {
        # PyTorch's own index names the build that PyPI has under the bare version.
        name: (version or "none").removesuffix("+cu130")
        for name, version in host.stack_versions().items()
    }
    return [
        Reason(
            f"{name} {found.get(name, 'none')}",
            f"{name} {expected}, with which the bits were compared",
            f"pip install --force-reinstall {name}=={expected}, or start with "
            "--exact-allow-unpinned-host (numerics: unverified)",
        )
        for name, expected in pins.stack.items()
        if found.get(name) != expected
    ]


def setup_reasons(names: list[str], config: Settings) -> list[Reason]:
    """Reasons in the installed host and stack that `config` does not waive.

    A rehearsal computes on the CPU and promises no bits, with any stack.
    """
    if config.allow_unpinned_host:
        return []
    return reasons(names) + ([] if config.rehearsal else stack_reasons())
