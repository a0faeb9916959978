# SPDX-License-Identifier: Apache-2.0
"""Where a server's kernels are kept once they are compiled."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Size(NamedTuple):
    """Files in a folder, and their bytes together."""

    files: int
    bytes: int


def folders(environ: Mapping[str, str]) -> dict[str, Path]:
    """Folder of each compiler, as the host and the compilers themselves look for it."""
    home = Path.home()
    host = environ.get("SGLANG_CACHE_DIR") or "~/.cache/sglang"

    def of(variable: str, otherwise: str | Path) -> Path:
        return Path(environ.get(variable) or otherwise).expanduser()

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container may run as a number without a name.
        user = str(os.getuid())
    user = re.sub(r"\W", "_", user)
    inductor = Path(tempfile.gettempdir()) / f"torchinductor_{user}"
    return {
        "Triton": of("TRITON_CACHE_DIR", home / ".triton" / "cache"),
        "DeepGEMM": of("SGLANG_DG_CACHE_DIR", f"{host}/deep_gemm"),
        "FlashInfer": of("FLASHINFER_WORKSPACE_BASE", home) / ".cache" / "flashinfer",
        "torch.compile": of("TORCHINDUCTOR_CACHE_DIR", inductor),
    }


def size(folder: Path) -> Size:
    """What lies in `folder`; nothing if it is not there."""
    files = total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                files, total = files + 1, total + path.stat().st_size
    return Size(files, total)


def notice(environ: Mapping[str, str]) -> str:
    """A line for the log of a server whose caches are empty; empty if none is."""
    empty = [
        f"{name} ({folder})"
        for name, folder in folders(environ).items()
        if name != "torch.compile" and not size(folder).files
    ]
    if not empty:
        return ""
    return (
        f"sglang_exact: nothing compiled yet for {', '.join(empty)}: this start "
        "compiles kernels once, which takes minutes; `sglang-exact warm -- FLAGS` does "
        "it ahead of time"
    )
