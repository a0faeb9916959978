# SPDX-License-Identifier: Apache-2.0
"""Facts about the installed host, read from its files without importing it.

Importing host modules can touch CUDA and takes seconds; `doctor` and the pin
check only need source text.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

# Distributions whose version changes bits; recorded in pins and attestation.
STACK = (
    "torch",
    "triton",
    "sglang-kernel",
    "sgl-deep-gemm",
    "flashinfer-python",
    "transformers",
)


class TargetMissing(LookupError):
    """A dotted path that the installed host does not have."""


class Fingerprint(NamedTuple):
    """Parameter names and source hash of a host function, method or class."""

    params: tuple[str, ...]
    sha256: str


def version(distribution: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def stack_versions() -> dict[str, str | None]:
    """Versions of the packages whose code produces the bits."""
    return {name: version(name) for name in STACK}


@lru_cache(maxsize=1)
def root() -> Path | None:
    """Folder of the host package, found without importing it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def module_file(target: str, base: Path | None = None) -> tuple[Path, list[str]]:
    """Split a dotted path into its source file and the names inside it.

    `base` is the host package's folder, the installed one if None. Raises
    TargetMissing when no file on disk matches.
    """
    if base is None:
        base = root()
    parts = target.split(".")
    if base is None or parts[0] != "sglang":
        raise TargetMissing(f"{target}: the host package is not installed")
    folder, rest = base, parts[1:]
    while rest:
        if (folder / rest[0]).is_dir():
            folder, rest = folder / rest[0], rest[1:]
            continue
        file = folder / f"{rest[0]}.py"
        if file.is_file():
            return file, rest[1:]
        break
    init = folder / "__init__.py"
    if rest and init.is_file():
        return init, rest
    raise TargetMissing(f"{target}: no such module in the installed host")


@lru_cache(maxsize=64)
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def _definition(body: list[ast.stmt], name: str) -> ast.AST | None:
    """Last definition of `name` in a body, also below top-level if/try blocks.

    A plain assignment counts only where nothing is defined under that name.
    """
    found: ast.AST | None = None
    assigned: ast.AST | None = None
    for node in body:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        if isinstance(node, kinds) and node.name == name:
            found = node
        elif isinstance(node, ast.Assign):
            if any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                assigned = node
        elif isinstance(node, (ast.If, ast.Try)):
            found = _definition([*node.body, *node.orelse], name) or found
    return found or assigned


def definition(target: str, base: Path | None = None) -> ast.AST:
    """The AST node that defines a dotted path; raises TargetMissing."""
    file, names = module_file(target, base)
    node: ast.AST = _tree(file)
    for name in names:
        found = _definition(getattr(node, "body", []), name)
        if found is None:
            raise TargetMissing(f"{target}: {name!r} is not defined in {file.name}")
        node = found
    return node


def canonical(node: object) -> object:
    """A nested tuple that is equal for equal code on Python 3.11 and later.

    Docstrings, positions and fields that newer parsers add as empty are left out.
    """
    if isinstance(node, ast.AST):
        fields: list[tuple[str, object]] = []
        for name, value in ast.iter_fields(node):
            if name in ("ctx", "type_comment", "kind", "type_ignores"):
                continue
            if name == "body" and isinstance(value, list) and value:
                first = value[0]
                if isinstance(first, ast.Expr) and isinstance(
                    getattr(first.value, "value", None), str
                ):
                    value = value[1:]
            if value is None or value == []:
                if isinstance(node, ast.Constant):
                    fields.append((name, "None"))
                continue
            fields.append((name, canonical(value)))
        return (type(node).__name__, tuple(sorted(fields, key=lambda f: f[0])))
    if isinstance(node, list):
        return tuple(canonical(item) for item in node)
    return repr(node)


def source_lines(target: str, base: Path | None = None) -> list[str]:
    """The lines of text that define a target, decorators included.

    Raises TargetMissing as `fingerprint` does.
    """
    node = definition(target, base)
    file, _ = module_file(target, base)
    lines = file.read_text(encoding="utf-8").splitlines()
    first = getattr(node, "lineno", 1)
    for decorator in getattr(node, "decorator_list", []):
        first = min(first, decorator.lineno)
    last = getattr(node, "end_lineno", None) or len(lines)
    return lines[first - 1 : last]


def fingerprint(target: str, base: Path | None = None) -> Fingerprint:
    """Parameters and canonical source hash of a host target.

    `base` is the host package's folder, the installed one if None. Raises
    TargetMissing when that host lacks the target.
    """
    node = definition(target, base)
    params: tuple[str, ...] = ()
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        a = node.args
        names = [p.arg for p in (*a.posonlyargs, *a.args)]
        if a.vararg:
            names.append("*" + a.vararg.arg)
        names += [p.arg for p in a.kwonlyargs]
        if a.kwarg:
            names.append("**" + a.kwarg.arg)
        params = tuple(names)
    text = repr(canonical(node))
    return Fingerprint(params, hashlib.sha256(text.encode()).hexdigest())
