# SPDX-License-Identifier: Apache-2.0
"""Which environment variables a host reads, found in its source.

Reads files only and imports nothing of the host. What reads a name that is put
together at run time is found by its prefix (`variables.json`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("srt", "kernels", "cli", "*.py")
_READS = re.compile(r"os\.environ|getenv|_env_\w+\(|= Env[A-Z]\w*\(")
_FUNCTION = re.compile(r"(^|_)(getenv|get_env|env_(bool|int|float|str|flag))$|env_var$")
_FIELD = re.compile(r"^Env[A-Z]\w*$")
_MAPPING = ("get", "setdefault", "pop")
_NAME = re.compile(r"^[A-Z][A-Z0-9]*_[A-Z0-9_]+$|^[A-Z][A-Z0-9]{2,}$")
_NATIVE = re.compile(r'getenv\(\s*"(\w+)"')
_NATIVE_SUFFIXES = (".cu", ".cuh", ".h", ".hpp", ".cpp")


def read(package: Path) -> dict[str, set[str]]:
    """Name -> defaults as written, for every variable that files below it read.

    Args:
        package: the folder `sglang`.
    """
    found: dict[str, set[str]] = {}
    for name, default in _reads(package):
        defaults = found.setdefault(name, set())
        if default is not None:
            defaults.add(default)
    return found


def _reads(package: Path) -> Iterator[tuple[str, str | None]]:
    for top in FOLDERS:
        for start in package.glob(top):
            for file in [start] if start.is_file() else sorted(start.rglob("*")):
                if file.suffix == ".py":
                    text = file.read_text(encoding="utf-8")
                    if _READS.search(text):
                        yield from _of_module(ast.parse(text))
                elif file.suffix in _NATIVE_SUFFIXES:
                    text = file.read_text(encoding="utf-8", errors="replace")
                    yield from ((name, None) for name in _NATIVE.findall(text))


def _of_module(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    constants = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        key, default = _one(node)
        if isinstance(key, ast.Name) and key.id in constants:
            name = constants[key.id]
        elif isinstance(key, ast.Constant) and isinstance(key.value, str):
            name = key.value
        else:
            continue
        if _NAME.match(name):
            yield name, ast.unparse(default) if default is not None else None


def _one(node: ast.AST) -> tuple[ast.expr | None, ast.expr | None]:
    """The name that a node reads from the environment, and the default it gives."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return _field(node)
    if isinstance(node, ast.keyword) and node.arg == "deprecated_name":
        return node.value, None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return (node.slice, None) if _is_environ(node.value) else (None, None)
    if isinstance(node, ast.Compare):
        inside = isinstance(node.ops[0], ast.In | ast.NotIn)
        if inside and _is_environ(node.comparators[0]):
            return node.left, None
    if isinstance(node, ast.Call) and node.args:
        function = node.func
        name = str(getattr(function, "attr", getattr(function, "id", "")))
        mapping = (
            isinstance(function, ast.Attribute)
            and name in _MAPPING
            and _is_environ(function.value)
        )
        if mapping or _FUNCTION.search(name):
            return node.args[0], node.args[1] if len(node.args) > 1 else None
    return None, None


def _field(node: ast.Assign | ast.AnnAssign) -> tuple[ast.expr | None, ast.expr | None]:
    """A declaration `NAME = EnvBool(default)` of the host's registry."""
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    call = node.value
    if (
        isinstance(target, ast.Name)
        and isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and _FIELD.match(call.func.id)
    ):
        return ast.Constant(target.id), call.args[0] if call.args else None
    return None, None


def _is_environ(node: ast.expr) -> bool:
    name = getattr(node, "attr", None) or getattr(node, "id", "")
    return name in ("environ", "environ_dict", "_environ")
