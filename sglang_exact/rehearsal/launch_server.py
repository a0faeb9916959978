# SPDX-License-Identifier: Apache-2.0
"""`python -m sglang_exact.rehearsal.launch_server [--stock] <any SGLang flag>`.

A person's way to the CPU engine: makes the tiny model if `--model-path` is absent and
fills in the flags a machine without a GPU needs. With `--draft KIND` it makes a tiny
draft as well and adds the flags of its algorithm. Flags given win over flags filled in.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sglang_exact.rehearsal import models
from sglang_exact.rehearsal.drafters import DRAFT_KINDS, DRAFTERS, draft_flags
from sglang_exact.rehearsal.environment import environment
from sglang_exact.rehearsal.server import CPU_FLAGS, DETERMINISTIC_FLAGS, cache_flags


def default_folder() -> Path:
    """Folder of the tiny models: per user, outside the checkout."""
    return Path(tempfile.gettempdir()) / f"sglang-exact-rehearsal-{os.getuid()}"


def command(argv: Sequence[str]) -> list[str]:
    """The command line that replaces this process; makes models as a side effect."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_exact.rehearsal.launch_server",
        description="SGLang on the CPU, Triton kernels interpreted.",
        epilog="Every other flag goes to SGLang.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--stock", action="store_true", help="the host's deterministic mode, no overlay"
    )
    parser.add_argument(
        "--draft",
        choices=list(DRAFTERS),
        help="speculate with a tiny draft of this kind",
    )
    parser.add_argument("--model-path", help="a tiny random model is made if absent")
    ours, rest = parser.parse_known_args(list(argv))
    folder = default_folder()
    model = ours.model_path or str(models.make_target(folder / "target"))
    module = "sglang.launch_server" if ours.stock else "sglang_exact.launch_server"
    line = [sys.executable, "-m", module, "--model-path", model, *CPU_FLAGS]
    # CPU_FLAGS keeps the log of a test short; a person wants to see the start.
    line += ["--log-level", "info"]
    if ours.stock:
        line += DETERMINISTIC_FLAGS
    else:
        line += cache_flags(rest)
    if ours.draft:
        draft = None
        if ours.draft in DRAFT_KINDS:
            draft = models.make_draft(folder / ours.draft, ours.draft)
        line += draft_flags(ours.draft, draft)
    return line + rest


def main() -> None:
    """Become the server process."""
    try:
        line = command(sys.argv[1:])
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"found no {error.name}; expected the environment of a rehearsal; fix: "
            "scripts/rehearsal_env, then .venv-rehearsal/bin/python"
        ) from error
    os.execve(line[0], line, environment())


if __name__ == "__main__":
    main()
