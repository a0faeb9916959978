# SPDX-License-Identifier: Apache-2.0
"""Every message of the package, its scripts and its image, read from their source.

Nothing is run. Found are `Reason(...)`, the texts of exceptions that are raised, lists
of reasons that functions collect, lines of the doctor, what is written to stderr, and
every other text that says what was found, what was expected or how to fix it.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tools import ROOT

# Table of messages -> the sources whose messages it holds; the longest prefix counts.
SECTIONS = {
    "messages-host": (
        "sglang_exact/host",
        "scripts/tools/pins",
    ),
    "messages-loading": (
        "sglang_exact/launch_server",
        "sglang_exact/plugin",
        "sglang_exact/gate",
        "sglang_exact/settings",
        "sglang_exact/hooks/__init__",
        "sglang_exact/hooks/base",
        "sglang_exact/hooks/in_force",
        "sglang_exact/hooks/autotune",
    ),
    "messages-setup": (
        "sglang_exact/scope",
        "sglang_exact/attestation",
        "sglang_exact/roles",
        "sglang_exact/hooks/launch",
        "sglang_exact/hooks/rank",
        "sglang_exact/hooks/reservation",
    ),
    "messages-doctor": ("sglang_exact/cli/doctor", "sglang_exact/client/machine"),
    "messages-selftest": ("sglang_exact/selftest",),
    "messages-requests": ("sglang_exact/hooks/requests",),
    "messages-running": (
        "sglang_exact/hooks/live_changes",
        "sglang_exact/hooks/retraction",
        "sglang_exact/hooks/prefill_grid",
    ),
    "messages-step": ("sglang_exact/hooks",),
    "messages-kernels": ("kernels/", "sglang_exact/hooks/small_m_gemm"),
    "messages-headers": ("sglang_exact/host/headers",),
    "messages-verify": (
        "sglang_exact/verify",
        "sglang_exact/client",
        "sglang_exact/view",
    ),
    "messages-arms": ("sglang_exact/verify/claims", "sglang_exact/verify/counters"),
    "messages-bench": ("sglang_exact/bench", "sglang_exact/cli/bench"),
    "messages-rehearsal": ("sglang_exact/rehearsal", "scripts/tools/proof"),
    "messages-docker": ("docker/",),
    "messages-offline": ("scripts/offline", "scripts/tools/offline"),
    "messages-scripts": ("scripts/",),
    "messages-other": ("sglang_exact/",),
}
FOLDERS = ("sglang_exact", "kernels", "scripts", "docker")
# Calls that hand a message to a person, beside Reason(...) and raise.
SPEAKERS = ("_cannot", "cannot", "fail", "error", "exit", "note", "FINISH_ABORT")
# What lists of reasons are called, and what a reason is called that stands alone.
LISTS = ("reasons", "problems", "found", "wrong", "notes")
NAMES = ("message", "down", "unstable")
# Where a function returns reasons as texts, whatever it is called.
RETURNED = (
    "sglang_exact/verify/",
    "sglang_exact/client/",
    "sglang_exact/bench/memory/command",
    "sglang_exact/bench/cost_model/inputs",
    "sglang_exact/bench/leaderboard/launch",
)
DOCTOR = "sglang_exact/cli/doctor"
ENOUGH_LETTERS = 10
ENOUGH_WORDS = 4
Function = ast.FunctionDef | ast.AsyncFunctionDef
TEXTS = (ast.JoinedStr, ast.Constant, ast.BinOp)
# What a message says about itself.
CONTRACT = re.compile(
    r"^(- )?found |: found (no|an?) |(?<!as) expected\b|^expected\b|\b[Ff]ix: "
    r"|\bcannot be |\bfailed\b.*:"
)


# Python that a shell script hands to an interpreter, and what a shell fills in.
PROGRAM = re.compile(r"<<'PY'([^\n]*\n)(.*?)^PY$", re.S | re.M)
FILLED = re.compile(r"\$\([^)]*\)|\$\{([A-Za-z_]+)[^}]*\}|\$([A-Za-z_]+|[0-9*@#])")


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
                given = self.assigned(name, node.lineno)
                if given is not None:
                    return self.text(given, depth + 1)
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
                texts = (*TEXTS, ast.IfExp)
                return found[-1] if isinstance(found[-1], texts) else None
        return None

    def visit_FunctionDef(self, node: Function) -> None:
        self.scopes.append(node)
        for text in _collected(node, "reasons" in node.name):
            self.add(self.text(text))
        if self.source.startswith(RETURNED):
            for text in _returned(node):
                self.phrase(text)
        self.generic_visit(node)
        self.scopes.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(_called(target, NAMES) for target in node.targets):
            self.phrase(node.value)
        self.generic_visit(node)

    def phrase(self, node: ast.expr) -> None:
        """A text that is a message if it is more than a word or two."""
        text = self.text(node)
        if isinstance(node, TEXTS) and len(text.split()) >= ENOUGH_WORDS:
            self.add(text)

    def visit_Expr(self, node: ast.Expr) -> None:
        # A string that stands alone is a docstring.
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "help":
            self.generic_visit(node)

    def visit_text(self, node: ast.expr) -> None:
        """A text that nothing else claims: a message if it speaks like one."""
        text = " ".join(self.text(node).split())
        if CONTRACT.search(text):
            self.add(text)

    visit_Constant = visit_JoinedStr = visit_text

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.Add):
            self.visit_text(node)
        else:
            self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if isinstance(node.func, ast.Attribute):
            name = node.func.attr
        if name == "Reason" and len(node.args) == 3:
            self.messages.append(
                Message(self.source, *(self.text(x) for x in node.args))
            )
            return
        if name == "Check" and self.source.startswith(DOCTOR) and len(node.args) > 3:
            self.check(*node.args[1:4])
            return
        if isinstance(node.func, ast.Attribute) and _is(node.func.value, "re"):
            return
        if name in SPEAKERS and node.args:
            self.add(self.text(node.args[0]))
        elif _on_stderr(node) and node.args:
            self.add(self.text(node.args[0]), len("found"))
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        if isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                if isinstance(argument, TEXTS):
                    self.add(self.text(argument))
                elif isinstance(argument, ast.Name):
                    value = self.assigned(argument.id, argument.lineno)
                    if value is not None:
                        self.add(self.text(value))
        self.generic_visit(node)

    def check(self, name: ast.expr, found: ast.expr, fix: ast.expr) -> None:
        """A line of `sglang-exact doctor` that comes with a fix."""
        text = f"{self.text(name)}: {self.text(found)}"
        self.messages.append(Message(self.source, text, "", self.text(fix)))

    def add(self, text: str, letters: int = ENOUGH_LETTERS) -> None:
        """A message in one string: split it where it says what was expected."""
        text = " ".join(text.split()).removeprefix("- ")
        if len(re.sub(r"<[^>]*>|[^A-Za-z]", "", text)) < letters:
            return
        head, _, fix = re.sub(r"[;.] [Ff]ix: ", "\0", text, count=1).partition("\0")
        found, _, expected = re.sub(r"[;,] expected ", "\0", head, count=1).partition(
            "\0"
        )
        self.messages.append(Message(self.source, found, expected, fix.rstrip(".")))


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _on_stderr(node: ast.Call) -> bool:
    """Whether a call writes to stderr, as print, typer.echo or the stream does."""
    function = ast.unparse(node.func)
    return function == "sys.stderr.write" or any(
        (k.arg == "err" and ast.unparse(k.value) == "True")
        or (k.arg == "file" and ast.unparse(k.value) == "sys.stderr")
        for k in node.keywords
    )


def _called(node: ast.expr, names: Iterable[str]) -> bool:
    """Whether a variable or an attribute has one of these names."""
    return (isinstance(node, ast.Name) and node.id in names) or (
        isinstance(node, ast.Attribute) and node.attr in names
    )


def _collected(node: Function, every: bool) -> Iterator[ast.expr]:
    """Strings that a function collects as reasons: appended, or in lists.

    every: all it appends or returns in a list; otherwise by the name of the list.
    """
    for inner in ast.walk(node):
        match inner:
            case ast.Call(
                func=ast.Attribute(attr="append", value=held), args=[argument]
            ) if every or _called(held, LISTS):
                values = [argument]
            case ast.AugAssign(target=held, value=ast.List(elts=values)) if _called(
                held, LISTS
            ):
                pass
            case (
                ast.AugAssign(target=held, value=ast.ListComp(elt=argument))
                | ast.Assign(targets=[held], value=ast.ListComp(elt=argument))
            ) if _called(held, LISTS):
                values = [argument]
            case ast.Return(value=ast.List(elts=values)) if every:
                pass
            case _:
                continue
        yield from (v for v in values if isinstance(v, TEXTS))


def _returned(node: Function) -> Iterator[ast.expr]:
    """Texts that a function returns: alone, in a list, in a tuple, or in a choice."""
    stack = [n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value]
    while stack:
        match stack.pop(0):
            case ast.List(elts=values) | ast.Tuple(elts=values):
                stack += values
            case ast.IfExp(body=body, orelse=other):
                stack += [body, other]
            case text:
                yield text


def read(source: str, text: str) -> list[Message]:
    """Every message in the text of one module, in order, each once."""
    return list(dict.fromkeys(Reader(source, ast.parse(text)).messages))


def _shown(found: re.Match[str]) -> str:
    """The placeholder for what a shell fills in."""
    name = (found[1] or found[2] or "").lower()
    return f"<{name}>" if name.isalpha() else "<...>"


def shell(source: str, text: str) -> list[Message]:
    """What a shell script says on stderr, and through its function `fail`."""
    reader = Reader(source, ast.Module(body=[], type_ignores=[]))
    text = PROGRAM.sub(r"\1", text)
    for line in text.replace("\\\n", " ").splitlines():
        said = re.search(r"\b(?:fail|echo) +(\".*|'.*)", line)
        if said is None or not (">&2" in line or "fail " in line):
            continue
        words = shlex.split(said[1].partition(">&2")[0].rstrip("; }"))
        reader.add(FILLED.sub(_shown, " ".join(words)))
    return list(dict.fromkeys(reader.messages))


def sources() -> Iterator[tuple[str, str]]:
    """Name and text of every program and module; scripts carry no suffix."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in (".py", ".sh", "") or not path.is_file():
                continue
            yield (
                str(path.relative_to(ROOT).with_suffix("")),
                path.read_text(encoding="utf-8"),
            )


def messages() -> list[Message]:
    """Every message of the package, its kernels, scripts and image."""
    found = []
    for name, text in sources():
        first = text.partition("\n")[0]
        if first.startswith("#!") and "python" not in first:
            found += shell(name, text)
            for _, inner in PROGRAM.findall(text):
                found += read(name, inner)
        elif name.startswith("docker/Dockerfile"):
            continue
        else:
            found += read(name, text)
    return list(dict.fromkeys(found))


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
