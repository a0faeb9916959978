# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine, without importing torch or touching a GPU."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

QUERY = "name,driver_version,compute_cap,memory.total"
TIMEOUT_S = 20.0


class Gpu(NamedTuple):
    """One line of nvidia-smi."""

    name: str
    driver: str
    capability: tuple[int, int]
    memory: str


def _output(command: list[str]) -> str | None:
    """Standard output of a command, or None when it is missing or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def parse_gpus(text: str) -> list[Gpu]:
    """Read nvidia-smi's CSV output for QUERY; lines it cannot read are left out."""
    found = []
    for row in parse_rows(text, QUERY.split(",")):
        name, driver, capability, memory = row.values()
        major, dot, minor = capability.partition(".")
        if dot and major.isdecimal() and minor.isdecimal():
            found.append(Gpu(name, driver, (int(major), int(minor)), memory))
    return found


def query(fields: Sequence[str], index: int | None = None) -> list[dict[str, str]]:
    """The named fields of every GPU, as the driver's tool (NVML) gives them.

    `index` is of the one GPU that is asked about. Empty without a driver; lines that
    are no row are left out.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    text = _output([*command, *([] if index is None else [f"--id={index}"])])
    return parse_rows(text or "", fields)


def parse_rows(text: str, fields: Sequence[str]) -> list[dict[str, str]]:
    """Lines of the driver tool's CSV for `fields`; others are left out."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [
        dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)
    ]


def gpus() -> list[Gpu]:
    """Every GPU that nvidia-smi lists; empty without a driver."""
    text = _output(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"])
    return parse_gpus(text or "")


def nvcc() -> str | None:
    """Version line and path of the CUDA compiler, or None."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else None
    path = path or shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    text = _output([path, "--version"]) if path else None
    if text is None:
        return None
    lines = [line for line in text.splitlines() if "release" in line]
    return f"{lines[-1].strip()} ({path})" if lines else str(path)


def torch_cuda() -> str | None:
    """CUDA version that torch was built for, read from its version file."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    if not file.is_file():
        return None
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        name, value = "", None
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, value = node.target.id, node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
        if name == "cuda" and isinstance(value, ast.Constant):
            return str(value.value) if value.value is not None else None
    return None
