# SPDX-License-Identifier: Apache-2.0
"""No code comes from data: nothing is unpickled, evaluated or given to a shell.

A scan of every Python file we ship or run. What is allowed is listed with its reason,
and an entry that no longer applies fails too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("sglang_exact", "kernels", "scripts", "docker")

MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "joblib"}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "asyncio.create_subprocess_shell",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "yaml.load",
    "yaml.full_load",
    "yaml.unsafe_load",
    "torch.load",
    "tempfile.mktemp",
    "ssl._create_unverified_context",
    "http.server.HTTPServer",
    "aiohttp.web.Application",
    "web.Application",
    "web.run_app",
    "asyncio.start_server",
    "uvicorn.run",
}
# Methods, whatever they are called on.
METHODS = {
    "from_str": "the host unpickles in CustomLogitProcessor.from_str",
    "listen": "a port of our own",
    "bind": "a port of our own",
    "create_server": "a port of our own",
    "add_api_route": "an endpoint of our own",
    "add_route": "an endpoint of our own",
    "mount": "an endpoint of our own",
}
KEYWORDS = {
    ("shell", True),
    ("verify", False),
    ("ssl", False),
    ("check_hostname", False),
    ("allow_pickle", True),
    ("autoescape", False),
}
ROUTE_DECORATORS = {"get", "post", "put", "delete", "patch", "api_route", "route"}

ALLOWED = {
    ("sglang_exact/hooks/requests.py", "import pickle"): (
        "names pickle.UnpicklingError; loads nothing"
    ),
    ("sglang_exact/hooks/requests.py", ".from_str()"): (
        "the host's own loading, brought forward; the host refuses the field before "
        "that unless it was started with --enable-custom-logit-processor"
    ),
    ("sglang_exact/rehearsal/import_hook.py", "compile()"): (
        "source of the installed host, in a rehearsal"
    ),
    ("sglang_exact/client/process.py", ".bind()"): "asks for a free port",
    ("sglang_exact/verify/runner.py", "asyncio.create_subprocess_shell()"): (
        "--restart-command of the person who runs it"
    ),
}


def dotted(node: ast.AST) -> str:
    """a.b.c of a name or attribute; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def findings(source: str) -> Iterator[str]:
    """What a file does that it should not, each as it is named in ALLOWED."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                names[item.asname or item.name.split(".")[0]] = item.name
                if item.name.split(".")[0] in MODULES:
                    yield f"import {item.name}"
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for item in node.names:
                names[item.asname or item.name] = f"{node.module}.{item.name}"
            if node.module.split(".")[0] in MODULES:
                yield f"import {node.module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _call(node, names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for item in node.decorator_list:
                target = item.func if isinstance(item, ast.Call) else item
                if isinstance(target, ast.Attribute) and (
                    target.attr in ROUTE_DECORATORS
                ):
                    yield f"@{dotted(target)}"


def _call(node: ast.Call, names: dict[str, str]) -> Iterator[str]:
    called = dotted(node.func)
    first, _, rest = called.partition(".")
    full = names.get(first, first) + (f".{rest}" if rest else "")
    if full in CALLS or called in CALLS:
        yield f"{full}()"
    elif isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        yield f".{node.func.attr}()"
    for item in node.keywords:
        value = item.value.value if isinstance(item.value, ast.Constant) else None
        if any(item.arg == name and value is bad for name, bad in KEYWORDS):
            yield f"{item.arg}={value}"
    if full.endswith("jinja2.Environment") and not any(
        item.arg == "autoescape" for item in node.keywords
    ):
        yield "jinja2.Environment() without autoescape"


def sources() -> list[Path]:
    """Every Python file we ship or run, programs without an extension included."""
    found = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")]
    for path in (ROOT / "scripts").iterdir():
        if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env python"):
            found.append(path)
    return [p for p in found if "__pycache__" not in p.parts]


def test_no_code_from_data() -> None:
    found = set()
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        found |= {(name, what) for what in findings(path.read_text(encoding="utf-8"))}
    assert len(sources()) > 100
    assert found - set(ALLOWED) == set()
    present = {name for name, _ in ALLOWED if (ROOT / name).is_file()}
    stale = {item for item in ALLOWED if item[0] in present} - found
    assert stale == set()


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "import pickle"),
        ("from dill import loads", "import dill"),
        ("def f():\n    import marshal", "import marshal"),
        ("eval(x)", "eval()"),
        ("exec(x)", "exec()"),
        ("from os import system as s\ns(x)", "os.system()"),
        ("import os as o\no.popen(x)", "os.popen()"),
        ("import subprocess\nsubprocess.run(x, shell=True)", "shell=True"),
        ("import yaml\nyaml.load(x)", "yaml.load()"),
        ("from torch import load\nload(x)", "torch.load()"),
        ("import numpy\nnumpy.load(x, allow_pickle=True)", "allow_pickle=True"),
        ("requests.get(x, verify=False)", "verify=False"),
        ("import jinja2\njinja2.Environment()", "jinja2.Environment() without autoe"),
        ("Environment(autoescape=False)", "autoescape=False"),
        ("CustomLogitProcessor.from_str(x)", ".from_str()"),
        ("s.listen()", ".listen()"),
        ("@app.get('/x')\ndef f(): pass", "@app.get"),
        ("app.add_api_route('/x', f)", ".add_api_route()"),
    ],
)
def test_the_scan_can_find(source: str, what: str) -> None:
    assert any(found.startswith(what) for found in findings(source))


def test_the_scan_leaves_the_rest_alone() -> None:
    fine = (
        "import re, yaml, subprocess\nre.compile(x)\nyaml.safe_load(x)\n"
        "subprocess.run([x])\nrun(x, shell=False)\ntriton.compile(x)\n"
        "from importlib import metadata\n@property\ndef f(self): pass\n"
    )
    assert list(findings(fine)) == []
