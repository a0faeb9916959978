# SPDX-License-Identifier: Apache-2.0
"""Every message of the package, read from its source without running it.

Found are `Reason(...)`, the texts of exceptions that are raised, lists of reasons that
functions collect, lines of the doctor, and what a few functions say to a person.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# Table of messages -> the sources whose messages it holds; the longest prefix counts.
SECTIONS = {
    "messages-host": (
        "sglang_exact/compat",
        "sglang_exact/host",
    ),
    "messages-loading": (
        "sglang_exact/launch_server",
        "sglang_exact/plugin",
        "sglang_exact/gate",
        "sglang_exact/settings",
        "sglang_exact/hooks/__init__",
        "sglang_exact/hooks/base",
        "sglang_exact/hooks/autotune",
    ),
    "messages-setup": (
        "sglang_exact/scope",
        "sglang_exact/attestation",
        "sglang_exact/hooks/launch",
        "sglang_exact/hooks/rank",
        "sglang_exact/hooks/reservation",
    ),
    "messages-doctor": ("sglang_exact/cli/doctor", "sglang_exact/cli/machine"),
    "messages-selftest": ("sglang_exact/selftest",),
    "messages-requests": ("sglang_exact/hooks/requests",),
    "messages-running": (
        "sglang_exact/hooks/live_changes",
        "sglang_exact/hooks/retraction",
        "sglang_exact/hooks/prefill_grid",
    ),
    "messages-step": ("sglang_exact/hooks",),
    "messages-kernels": ("kernels/", "sglang_exact/hooks/small_m_gemm"),
    "messages-headers": ("sglang_exact/patching",),
    "messages-verify": ("sglang_exact/verify", "sglang_exact/cli/verify"),
    "messages-bench": ("sglang_exact/bench", "sglang_exact/cli/bench"),
    "messages-rehearsal": ("sglang_exact/rehearsal",),
    "messages-other": ("sglang_exact/",),
}
# Calls that hand a message to a person, beside Reason(...) and raise.
SPEAKERS = ("_cannot", "cannot", "fail", "error", "FINISH_ABORT")
ENOUGH_LETTERS = 10


class Message(NamedTuple):
    """What a person may read: `<name>` stands for what is filled in."""

    source: str
    found: str
    expected: str
    fix: str


def place(node: ast.expr) -> str:
    """Name of a placeholder, from the expression that fills it."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_").lower() or "..."
        case ast.Subscript(value=value) | ast.Starred(value=value):
            return place(value)
        case ast.BoolOp(values=[first, *_]):
            return place(first)
        case ast.Call(args=[first, *_]):
            return place(first)
        case ast.Call(func=ast.Attribute(attr=name)) | ast.Call(func=ast.Name(id=name)):
            return name.strip("_").lower()
    return "..."


class Reader(ast.NodeVisitor):
    """Collects the messages of one module."""

    def __init__(self, source: str, tree: ast.Module) -> None:
        self.source = source
        self.scopes: list[ast.AST] = [tree]
        self.messages: list[Message] = []
        self.visit(tree)

    def text(self, node: ast.expr | None, depth: int = 0) -> str:
        """The text of an expression, placeholders for what is not literal."""
        match node:
            case ast.Constant(value=str() as value):
                return value
            case ast.JoinedStr(values=values):
                return "".join(self.text(value, depth) for value in values)
            case ast.FormattedValue(value=value):
                return self.text(value, depth)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.text(left, depth) + self.text(right, depth)
            case ast.IfExp(body=body, orelse=other):
                texts = {self.text(body, depth), self.text(other, depth)} - {""}
                return texts.pop() if len(texts) == 1 else "<...>"
            case ast.Name(id=name) if depth < 2:
                value = self.assigned(name, node.lineno)
                if value is not None:
                    return self.text(value, depth + 1)
        return f"<{place(node)}>" if node is not None else ""

    def assigned(self, name: str, line: int) -> ast.expr | None:
        """What a name was last given before a line, in the nearest scope."""
        for scope in reversed(self.scopes):
            # Of a module only its own statements, not those of its functions.
            nodes = scope.body if isinstance(scope, ast.Module) else ast.walk(scope)
            found = [
                node.value
                for node in nodes
                if isinstance(node, ast.Assign)
                and node.lineno < line
                and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
            ]
            if found:
                texts = (ast.JoinedStr, ast.Constant, ast.BinOp, ast.IfExp)
                return found[-1] if isinstance(found[-1], texts) else None
        return None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.scopes.append(node)
        if "reasons" in node.name:
            for text in _collected(node):
                self.add(self.text(text))
        self.generic_visit(node)
        self.scopes.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.scopes.append(node)
        self.generic_visit(node)
        self.scopes.pop()

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if isinstance(node.func, ast.Attribute):
            name = node.func.attr
        if name == "Reason" and len(node.args) == 3:
            self.messages.append(
                Message(self.source, *(self.text(x) for x in node.args))
            )
        elif name == "Check" and len(node.args) > 3:
            self.check(*node.args[1:4])
        elif name in SPEAKERS and node.args:
            self.add(self.text(node.args[0]))
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        if isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                if isinstance(argument, (ast.JoinedStr, ast.Constant, ast.BinOp)):
                    self.add(self.text(argument))
        self.generic_visit(node)

    def check(self, name: ast.expr, found: ast.expr, fix: ast.expr) -> None:
        """A line of `sglang-exact doctor` that comes with a fix."""
        text = f"{self.text(name)}: {self.text(found)}"
        self.messages.append(Message(self.source, text, "", self.text(fix)))

    def add(self, text: str) -> None:
        """A message in one string: split it where it says what was expected."""
        text = " ".join(text.split())
        if len(re.sub(r"<[^>]*>|[^A-Za-z]", "", text)) < ENOUGH_LETTERS:
            return
        head, _, fix = re.sub(r"[;.] [Ff]ix: ", "\0", text, count=1).partition("\0")
        found, _, expected = re.sub(r"[;,] expected ", "\0", head, count=1).partition(
            "\0"
        )
        self.messages.append(Message(self.source, found, expected, fix.rstrip(".")))


def _collected(node: ast.FunctionDef) -> Iterator[ast.expr]:
    """Strings that a function collects: appended, or in a list it returns."""
    for inner in ast.walk(node):
        match inner:
            case ast.Call(func=ast.Attribute(attr="append"), args=[argument]):
                values = [argument]
            case ast.Return(value=ast.List(elts=values)):
                pass
            case _:
                continue
        yield from (v for v in values if isinstance(v, (ast.JoinedStr, ast.Constant)))


def read(source: str, text: str) -> list[Message]:
    """Every message in the text of one module, in order, each once."""
    return list(dict.fromkeys(Reader(source, ast.parse(text)).messages))


def messages() -> list[Message]:
    """Every message of the package and its kernels."""
    found = []
    for folder in ("sglang_exact", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT).with_suffix(""))
            found += read(name, path.read_text(encoding="utf-8"))
    return found


def section(source: str) -> str:
    """The table that holds a module's messages."""
    fits = [
        (len(prefix), name)
        for name, prefixes in SECTIONS.items()
        for prefix in prefixes
        if source.startswith(prefix)
    ]
    return max(fits)[1]


def anchor(message: Message) -> str:
    """Name under which a message can be linked to."""
    text = f"{message.found} {message.expected}" if "<" in message.found else ""
    words = re.findall(r"[a-z0-9]+", (text or message.found).lower().replace("_", " "))
    return "m-" + "-".join(words[:9])
