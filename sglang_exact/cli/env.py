# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact env`: what a bug report needs, and nothing secret.

Only variables whose prefix is listed, or that the overlay itself looks at, are shown,
and of those none whose name looks like a credential; user and password are cut out of
addresses.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
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
USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")
PACKAGES = ("sglang-exact", "sglang", "numpy", "flash-attn-4", "kernels", "xgrammar")


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that bear on serving, without credentials."""
    from sglang_exact.variables import judged

    return {
        name: USER_INFO.sub("", environ[name])
        for name in sorted(environ)
        if (name.startswith(SHOWN_PREFIXES) or judged(name)[0] is not None)
        and not SECRET.search(name)
    }


def installation() -> dict[str, Any]:
    """Where this package was imported from, and how it was installed."""
    import sglang_exact

    folder = Path(sglang_exact.__file__).parent
    try:
        found = metadata.distribution("sglang-exact")
    except metadata.PackageNotFoundError:
        return {"folder": str(folder), "installed": None}
    installed = Path(str(found.locate_file("sglang_exact")))
    same = installed.is_dir() and installed.samefile(folder)
    how = "a wheel" if same else "editable, or another copy than the one that runs"
    return {"folder": str(folder), "installed": f"{found.version}, {how}"}


def headers() -> str | None:
    """Version and state of DeepGEMM's sm120 header; None without DeepGEMM."""
    from sglang_exact.host import headers

    install = headers.find_install()
    if install is None:
        return None
    wrong = headers.reasons(install, headers.load_manifest())
    state = "; ".join(str(reason) for reason in wrong) or headers.FENCED
    return f"{install.version}: {state}"


def collect(environ: Mapping[str, str]) -> dict[str, Any]:
    """The report as JSON types."""
    from sglang_exact import __version__, attestation, hooks, settings
    from sglang_exact.client import machine
    from sglang_exact.host import compat
    from sglang_exact.host import source as host
    from sglang_exact.plugins import GROUP

    versions = {name: host.version(name) for name in PACKAGES}
    config, unknown = settings.read(environ)
    unknown += hooks.name_reasons(config)
    return {
        "sglang_exact": __version__,
        "digest": attestation.digest(),
        "installation": installation(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "container": Path("/.dockerenv").exists()
        or Path("/run/.containerenv").exists(),
        "packages": {**versions, **host.stack_versions()},
        "plugins": {ep.name: ep.value for ep in metadata.entry_points(group=GROUP)},
        "host_mismatches": [str(r) for r in compat.reasons(hooks.pinned_names())],
        "settings_refused": [USER_INFO.sub("", str(reason)) for reason in unknown],
        "deep_gemm_headers": headers(),
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
