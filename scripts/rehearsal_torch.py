# SPDX-License-Identifier: Apache-2.0
"""Install torch for the host on the CPU into the environment that runs this.

Public package indexes differ: PyPI has a CUDA build for x86-64 under the same version
as the CPU build of other platforms, of several gigabytes. So pip is asked what it would
install before anything is downloaded, and the first build that fits is taken:

1. the CPU build, where pip's own index has it;
2. PyTorch's index of CPU wheels (REHEARSAL_TORCH_INDEX names another one, which is
   then the only one that is asked);
3. the CUDA build with its libraries, if REHEARSAL_TORCH_CUDA=1 agrees to it. It runs on
   the CPU all the same.

Standard library alone: nothing is installed yet. Leaves with status 1 and one message.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import NamedTuple

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_VARIABLE = "REHEARSAL_TORCH_INDEX"
CUDA_VARIABLE = "REHEARSAL_TORCH_CUDA"
CUDA_LIBRARIES = ("nvidia", "cuda")
"""What the distributions that a CUDA build requires begin with."""


class Offer(NamedTuple):
    """What pip would install: `version` of torch, or None with pip's last words."""

    version: str | None
    cuda: bool = False
    error: str = ""


def pip(arguments: list[str], quiet: bool = False) -> subprocess.CompletedProcess[str]:
    """Run pip of this interpreter; its output is kept where `quiet`."""
    line = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(line, text=True, capture_output=quiet)


def index_flags(index: str | None) -> list[str]:
    """Flags that make pip ask this index; none for its own."""
    # One retry: an index that cannot be reached shall say so in seconds.
    return ["--index-url", index, "--retries", "1", "--timeout", "15"] if index else []


def offer(requirement: str, index: str | None = None) -> Offer:
    """What an index offers for a requirement; nothing is installed."""
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.json")
        flags = ["--dry-run", "--no-deps", "--ignore-installed", "--report", report]
        ran = pip(
            ["install", "-q", *flags, *index_flags(index), requirement], quiet=True
        )
        if ran.returncode:
            words = ran.stderr.strip().splitlines() or ["pip failed without a word"]
            return Offer(None, error=words[-1])
        with open(report, encoding="utf-8") as file:
            metadata = json.load(file)["install"][0]["metadata"]
    needs = [need.lower() for need in metadata.get("requires_dist", [])]
    cuda = any(need.startswith(CUDA_LIBRARIES) for need in needs)
    return Offer(metadata["version"], cuda)


def choose(requirement: str, environ: Mapping[str, str]) -> list[str]:
    """Flags for pip that install the build to take.

    Raises SystemExit with a message when there is none.
    """
    given = environ.get(INDEX_VARIABLE, "").strip()
    if not given:
        own = offer(requirement)
        if own.version and not own.cuda:
            return ["--no-deps"]
    index = given or CPU_INDEX
    wheels = offer(requirement, index)
    if wheels.version and not wheels.cuda:
        return ["--no-deps", *index_flags(index)]
    why = wheels.error or f"a CUDA build of {requirement}"
    if given:
        raise SystemExit(
            f"found no CPU build of {requirement} in {INDEX_VARIABLE}={given} ({why}); "
            f"expected one; fix: name an index that has it, or unset {INDEX_VARIABLE}"
        )
    if own.version and environ.get(CUDA_VARIABLE, "").strip() == "1":
        return []
    found = own.error if own.version is None else "only a CUDA build"
    raise SystemExit(
        f"pip's index has no CPU build of {requirement} ({found}), and {index} cannot "
        f"be used ({why}); expected one of the two; fix: set {INDEX_VARIABLE} to an "
        f"index or a mirror of CPU builds, or {CUDA_VARIABLE}=1 to take the CUDA build "
        "(several gigabytes)"
    )


def main(requirement: str, environ: Mapping[str, str]) -> int:
    """Install unless torch is there already; returns pip's exit status."""
    if importlib.util.find_spec("torch") is not None:
        return 0
    flags = choose(requirement, environ)
    return pip(["install", "-qq", *flags, requirement]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], os.environ))
