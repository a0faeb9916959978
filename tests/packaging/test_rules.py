# SPDX-License-Identifier: Apache-2.0
"""The repository's rules for its own source, as .pre-commit-config.yaml states them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("sglang_exact", "kernels", "scripts", "tests", "docker")
# What each rule must find; a rule that finds nothing anywhere would look green.
FORBIDDEN = {
    "no-autotune": "@triton.autotune(configs=[])",
    "no-atomics": "    tl.atomic_add(pointer, value)",
    "no-blind-except": "    except Exception as error:",
}


def local_hooks() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (local,) = [r["hooks"] for r in config["repos"] if r["repo"] == "local"]
    return {hook["id"]: hook for hook in local}


def sources() -> list[Path]:
    """Every Python file of ours, programs without an extension included."""
    found = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")]
    for path in (ROOT / "scripts").iterdir():
        if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env python"):
            found.append(path)
    return [p for p in found if "__pycache__" not in p.parts]


@pytest.mark.parametrize("name", sorted(FORBIDDEN))
def test_forbidden_text(name: str) -> None:
    hook = local_hooks()[name]
    pattern = re.compile(hook["entry"])
    assert pattern.search(FORBIDDEN[name])
    skipped = re.compile(hook.get("exclude", "^$"))
    found, looked_at = [], 0
    for path in sources():
        relative = str(path.relative_to(ROOT))
        if not re.search(hook["files"], relative) or skipped.search(relative):
            continue
        looked_at += 1
        lines = path.read_text(encoding="utf-8").splitlines()
        found += [
            f"{relative}:{i}: {line.strip()}"
            for i, line in enumerate(lines, 1)
            if pattern.search(line)
        ]
    assert looked_at > 5
    assert found == []


def test_kernels_is_no_package() -> None:
    hook = local_hooks()["kernels-is-no-package"]
    assert re.search(hook["files"], "kernels/__init__.py")
    assert not re.search(hook["files"], "kernels/sglang_exact_kernels/__init__.py")
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_every_source_names_its_licence_and_is_ascii() -> None:
    wrong = []
    for path in sources():
        text = path.read_bytes()
        head = text.decode("utf-8").splitlines()[:2]
        if "# SPDX-License-Identifier: Apache-2.0" not in head or not text.isascii():
            wrong.append(str(path.relative_to(ROOT)))
    assert wrong == []


# Files that are programs or settings but not Python.
OTHERS = (
    ".ci/*",
    ".hadolint.yaml",
    ".pre-commit-config.yaml",
    "MANIFEST.in",
    "docker/*.yaml",
    "docker/.env.example",
    "docker/Dockerfile*",
    "docker/steps/*.sh",
    "requirements/*.txt",
    "scripts/*",
    "sglang_exact/**/*.j2",
)


def other_sources() -> list[Path]:
    """Scripts, images and settings that can carry a comment."""
    found = {p for pattern in OTHERS for p in ROOT.glob(pattern) if p.is_file()}
    return sorted(found)


def test_every_script_and_setting_names_its_licence() -> None:
    found = other_sources()
    assert len(found) > 20
    wrong = []
    for path in found:
        text = path.read_bytes()
        head = "\n".join(text.decode("utf-8").splitlines()[:3])
        if "# SPDX-License-Identifier: Apache-2.0" not in head or not text.isascii():
            wrong.append(str(path.relative_to(ROOT)))
    assert wrong == []


def untyped(source: str) -> list[str]:
    """Functions without annotations, but for Triton kernels, which have no types."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef):
            continue
        if any(".jit" in ast.unparse(one) for one in node.decorator_list):
            continue
        spec = node.args
        asked = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
        asked += [one for one in (spec.vararg, spec.kwarg) if one]
        bare = [one.arg for one in asked if one.annotation is None]
        if node.returns is None or set(bare) - {"self", "cls"}:
            found.append(node.name)
    return found


def test_what_is_no_triton_kernel_is_typed() -> None:
    """mypy lets a kernel's functions go untyped; only those that Triton compiles."""
    folder = ROOT / "kernels" / "sglang_exact_kernels"
    paths = sorted(folder.rglob("*.py"))
    found = {p.name: untyped(p.read_text(encoding="utf-8")) for p in paths}
    assert len(found) > 10
    assert {name: names for name, names in found.items() if names} == {}


def test_an_untyped_function_is_seen() -> None:
    source = "def f(x): pass\n\n\n@triton.jit\ndef g(x): pass\n"
    assert untyped(source) == ["f"]
    assert untyped("def f(x: int) -> int: return x\n") == []
    assert untyped("def f(x: int): return x\n") == ["f"]


def test_every_program_can_be_run() -> None:
    """What begins with #! is executable, and the other way round."""
    for path in (ROOT / "scripts").iterdir():
        if path.is_file() and path.suffix == "":
            assert path.read_bytes().startswith(b"#!"), path
            assert path.stat().st_mode & 0o111, path
