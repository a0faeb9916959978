# SPDX-License-Identifier: Apache-2.0
"""The served wing: every module that a server runs; what the attested digest hashes.

The one list of it. Tests hold the imports of each wing, and of a started server, to it.
Tools that ask a server or prove it may change without changing the digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

KERNELS = "sglang_exact_kernels"
# Modules and packages of sglang_exact; a package stands for everything in it.
NAMES = (
    "attestation",
    "caches",
    "gate",
    "hooks",
    "host",
    "launch_server",
    "plugin",
    "plugins",
    "reasons",
    "roles",
    "schemes",
    "scope",
    "scope_arguments",
    "scope_families",
    "scope_model",
    "selftest",
    "served",
    "settings",
    "variables",
)
# Files beside the modules: the version, the tables of environment variables, and the
# edits of other distributions' headers.
FILES = ("__init__.py", "variables.json", "_patches")
SUFFIXES = (".py", ".json", ".patch")


def files(package: Path, kernels: Path) -> Iterator[tuple[str, Path]]:
    """Name and path of every file that a server runs or reads, sorted by name.

    Args:
        package: the folder of sglang_exact.
        kernels: the folder of sglang_exact_kernels.

    Raises:
        FileNotFoundError: a module of NAMES is not there.
    """
    places = [(KERNELS, kernels, kernels)]
    for name in NAMES:
        module, room = package / f"{name}.py", package / name
        if not module.is_file() and not room.is_dir():
            raise FileNotFoundError(
                f"found no {module}, expected every module of the served wing; "
                "fix: reinstall sglang_exact"
            )
        places += [(package.name, package, module), (package.name, package, room)]
    places += [(package.name, package, package / name) for name in FILES]
    found = {
        f"{name}/{path.relative_to(root)}": path
        for name, root, place in places
        for path in (place.rglob("*") if place.is_dir() else [place])
        if path.suffix in SUFFIXES and path.is_file()
    }
    yield from sorted(found.items())


def digest(package: Path, kernels: Path) -> str:
    """sha256 over names and bytes of `files`, as hex digits."""
    total = hashlib.sha256()
    for name, path in files(package, kernels):
        total.update(f"{name}\0".encode())
        total.update(path.read_bytes())
    return total.hexdigest()
