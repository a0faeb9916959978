# SPDX-License-Identifier: Apache-2.0
"""Prepare one process for running the host on the CPU, before the host is imported."""

from __future__ import annotations

import importlib.util
import os

_REQUIRED = {"TRITON_INTERPRET": "1", "SGLANG_USE_CPU_ENGINE": "0"}


def install() -> None:
    """Install stand-ins, the mended interpreter and the host's mends. Idempotent.

    Cheap for processes that never import Triton or the host: both are mended when
    they are imported, not here.

    Raises:
        RuntimeError: the environment is not the one of `environment.environment`,
            a stood-in package is installed, or the host is imported already.
    """
    global _installed
    if _installed:
        return
    wrong = [
        f"{name}: found {os.environ.get(name)!r}, expected {value!r}"
        for name, value in _REQUIRED.items()
        if os.environ.get(name) != value
    ]
    if wrong:
        raise RuntimeError(
            f"not a rehearsal environment: {'; '.join(wrong)}. Fix: start the process "
            "with sglang_exact.rehearsal.environment.environment()."
        )
    _installed = True
    if importlib.util.find_spec("sglang") is None:
        return
    from sglang_exact.rehearsal import host_mends, import_hook, spares, stubs

    stubs.install()
    import_hook.install(host_mends.mends())
    spares.install()


_installed = False
