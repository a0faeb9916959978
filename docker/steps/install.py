#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""install.py WHEELS: install this package without touching anything of the base.

The wheel goes in with --no-deps. Of what it needs, packages that are missing are added
under a constraint on every package the base has, so pip cannot move one; a package that
is there in a version this package cannot use is refused instead of upgraded.

Exit codes: 0 installed, 1 refused.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

NAME = "sglang_exact"


def pip(*arguments: str) -> None:
    """Run pip; raises CalledProcessError when it fails."""
    # Debian marks its Python as managed elsewhere; in an image it is ours to fill.
    environ = {**os.environ, "PIP_BREAK_SYSTEM_PACKAGES": "1"}
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run(
        [*command, "install", "--no-cache-dir", "--quiet", *arguments],
        env=environ,
        check=True,
    )


def requirements() -> tuple[list[str], list[str]]:
    """What this package needs and lacks, and what is there in an unusable version."""
    from packaging.requirements import Requirement

    missing, wrong = [], []
    for text in metadata.requires(NAME) or []:
        needed = Requirement(text)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            missing.append(str(needed))
            continue
        if not needed.specifier.contains(found, prereleases=True):
            wrong.append(f"found {needed.name} {found}; expected {needed.specifier}")
    return missing, wrong


def constraints() -> str:
    """One line for each installed distribution, as pip's constraints file wants it."""
    pinned = {
        item.metadata["Name"]: item.version
        for item in metadata.distributions()
        if item.metadata["Name"]
    }
    return "\n".join(f"{name}=={version}" for name, version in sorted(pinned.items()))


def main(argv: Sequence[str]) -> int:
    """Install the one wheel of this package in the folder given."""
    wheels = sorted(Path(argv[0]).glob(f"{NAME}-*.whl")) if argv else []
    if len(wheels) != 1:
        names = ", ".join(path.name for path in wheels) or "none"
        sys.stderr.write(f"install: found wheels {names}; expected one of {NAME}\n")
        return 1
    pip("--no-deps", "--no-index", str(wheels[0]))
    missing, wrong = requirements()
    if wrong:
        text = "\n".join(f"  - {line}" for line in wrong)
        sys.stderr.write(f"install: the base would have to change:\n{text}\n")
        return 1
    if missing:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "constraints.txt"
            file.write_text(constraints())
            pip("--constraint", str(file), *missing)
    sys.stdout.write(f"install: {wheels[0].name}; added {missing or 'nothing else'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
