# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact env`: what a bug report needs, and nothing secret.

Only variables whose prefix is listed are shown, and of those none whose name looks
like a credential.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

SHOWN_PREFIXES = (
    "SGLANG_",
    "SGL_",
    "TRITON_",
    "FLA_",
    "FLASHINFER_",
    "DG_",
    "CUDA_",
    "NCCL_",
    "OMP_",
    "TORCH_",
    "PYTORCH_",
)
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED|AUTH", re.IGNORECASE)
PACKAGES = ("sglang-exact", "sglang", "numpy", "flash-attn-4", "kernels", "xgrammar")


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that bear on serving, without credentials."""
    return {
        name: environ[name]
        for name in sorted(environ)
        if name.startswith(SHOWN_PREFIXES) and not SECRET.search(name)
    }


def collect(environ: Mapping[str, str]) -> dict[str, Any]:
    """The report as JSON types."""
    from sglang_exact import __version__, attestation, compat, hooks, host
    from sglang_exact.cli import machine

    versions = {name: host.version(name) for name in PACKAGES}
    return {
        "sglang_exact": __version__,
        "digest": attestation.digest(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {**versions, **host.stack_versions()},
        "host_mismatches": [str(r) for r in compat.reasons(hooks.pinned_names())],
        "torch_cuda": machine.torch_cuda(),
        "gpus": [gpu._asdict() for gpu in machine.gpus()],
        "nvcc": machine.nvcc(),
        "variables": variables(environ),
    }


def _lines(value: Any, indent: str = "") -> list[str]:
    lines = []
    for name, item in value.items():
        if isinstance(item, dict) and item:
            lines += [f"{indent}{name}:", *_lines(item, indent + "  ")]
        elif isinstance(item, list) and item:
            lines += [f"{indent}{name}:", *(f"{indent}  - {x}" for x in item)]
        else:
            shown = "none" if item in (None, {}, []) else item
            lines.append(f"{indent}{name}: {shown}")
    return lines


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = (
        False
    ),
) -> None:
    """Print what a bug report needs: versions, GPU, variables; no secrets."""
    import orjson

    found = collect(os.environ)
    if as_json:
        typer.echo(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
    else:
        typer.echo("\n".join(_lines(found)))
