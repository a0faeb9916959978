# SPDX-License-Identifier: Apache-2.0
"""Environment of a process that shall run the host on the CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

REHEARSAL_VARIABLE = "SGLANG_EXACT_TEST_REHEARSAL"
"""Set to 1: `site/sitecustomize.py` mends the host in this process."""

SITE_DIRECTORY = Path(__file__).resolve().parent / "site"
"""Holds nothing but the `sitecustomize.py` that Python imports at start."""

PACKAGE_ROOTS = (
    Path(__file__).resolve().parents[2],
    Path(__file__).resolve().parents[2] / "kernels",
)
"""Where `sglang_exact` and `sglang_exact_kernels` lie in a checkout."""

_FIXED = {
    REHEARSAL_VARIABLE: "1",
    "TRITON_INTERPRET": "1",
    # 1 would import the CPU build of sgl_kernel, which no registry carries.
    "SGLANG_USE_CPU_ENGINE": "0",
    "HF_HUB_OFFLINE": "1",
    # One thread: steady speed, and no reduction is cut at a thread boundary.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # A GPU of the machine, if there is one, is none of a rehearsal's business.
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
    # A place per rank; without it the host wants a NUMA node for each. What it
    # binds are the threads of the compiled CPU kernels, which are not there.
    "SGLANG_CPU_OMP_THREADS_BIND": "0|0",
}


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment for a subprocess that shall run the host on the CPU.

    Args:
        base: variables to start from; `os.environ` if None. Never changed.

    Returns:
        A copy of `base` with the interpreter on, the accelerators hidden and this
        package's `site` directory first on `PYTHONPATH`, followed by the roots of
        the package (so that a checkout works without installing it) and by what
        `PYTHONPATH` held before.
    """
    env = dict(os.environ if base is None else base)
    env.update(_FIXED)
    ours = [str(SITE_DIRECTORY), *(str(p) for p in PACKAGE_ROOTS if _holds_us(p))]
    theirs = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    env["PYTHONPATH"] = os.pathsep.join(ours + [p for p in theirs if p not in ours])
    return env


def _holds_us(root: Path) -> bool:
    # An installed wheel lies in site-packages, which needs no help and must not
    # move ahead of the entries that PYTHONPATH is meant to shadow it with.
    if root.name in ("site-packages", "dist-packages"):
        return False
    return (root / "sglang_exact").is_dir() or (root / "sglang_exact_kernels").is_dir()
