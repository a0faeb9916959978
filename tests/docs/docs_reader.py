# SPDX-License-Identifier: Apache-2.0
"""Read README and docs/: shell commands, links, anchors."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SHELL = ("sh", "bash", "shell", "console")
OPERATORS = set("();<>|&")
# A line of an indented block, or of a fence without a language, is a command when it
# begins with one of these; a line of a shell fence always is.
PROGRAM = re.compile(
    r"(\$ |[A-Z_]+=\S+ )?(scripts/|docker/|\.venv|python|sglang(-exact)? |pip |pip3 |"
    r"uv |curl |docker |git |export |source |pre-commit|nvidia-smi|cd |\./)"
)
NEEDS = re.compile(r"<!--\s*needs:\s*([a-z0-9, -]+?)\s*-->\s*$")
_LINK = re.compile(
    r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^()\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)"
)


class Block(NamedTuple):
    """A code block: where, its language ("" if none is given), what it needs."""

    path: Path
    line: int
    language: str
    needs: frozenset[str]
    lines: tuple[str, ...]


class Command(NamedTuple):
    """One simple command: no operators, no assignments, no redirections."""

    where: str
    needs: frozenset[str]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.where}: {' '.join(self.words)}"


def documents() -> list[Path]:
    """README and everything under docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path: Path, text: str | None = None) -> Iterator[Block]:
    """The code blocks of a document, fenced and indented."""
    lines = (path.read_text(encoding="utf-8") if text is None else text).splitlines()
    number, in_list = 0, False
    while number < len(lines):
        line = lines[number]
        fence = re.match(r"( *)(```+|~~~+)\s*(\w*)", line)
        before = lines[number - 1].strip() if number else ""
        if fence:
            end = number + 1
            while end < len(lines) and not lines[end].strip().startswith(fence[2]):
                end += 1
            body = [x.removeprefix(fence[1]) for x in lines[number + 1 : end]]
            yield Block(path, number + 1, fence[3], _needs(before), tuple(body))
            number = end + 1
            continue
        if re.match(r"\s*([-*+]|\d+\.)\s", line):
            in_list = True
        elif line.strip() and not line.startswith(" "):
            in_list = False
        if line.startswith("    ") and not before.strip("|") and not in_list:
            end = number
            while end < len(lines) and (
                lines[end].startswith("    ") or not lines[end].strip()
            ):
                end += 1
            body = [x[4:] for x in lines[number:end]]
            above = [x.strip() for x in lines[:number] if x.strip()]
            needs = _needs(above[-1] if above else "")
            yield Block(path, number + 1, "", needs, tuple(body))
            number = end
            continue
        number += 1


def _needs(line: str) -> frozenset[str]:
    found = NEEDS.search(line)
    words = found[1].split(",") if found else []
    return frozenset(word.strip() for word in words)


def _logical(lines: tuple[str, ...]) -> Iterator[str]:
    """Lines with continuations joined and comments taken off."""
    joined = ""
    for line in lines:
        line = re.sub(r"(^|\s)#(?!\{).*$", "", line).rstrip()
        if line.endswith("\\"):
            joined += line[:-1] + " "
            continue
        if (joined + line).strip():
            yield " ".join((joined + line).split())
        joined = ""


def commands(block: Block) -> list[Command]:
    """The simple commands of a block; none where it is not a shell's."""
    shell = block.language in SHELL
    if block.language and not shell:
        return []
    found = []
    for line in _logical(block.lines):
        if not shell and not PROGRAM.match(line):
            continue
        where = f"{block.path.name}:{block.line}"
        for words in _simple(line.removeprefix("$ ")):
            found.append(Command(where, block.needs, words))
    return found


def _simple(line: str) -> Iterator[tuple[str, ...]]:
    """The simple commands of one line."""
    # <something to fill in> is one word, not a redirection.
    line = re.sub(r"<([^<>|]+)>", lambda m: m[1].upper().replace(" ", "-"), line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    skip = False
    for word in [*lexer, ";"]:
        if set(word) <= OPERATORS | {";"}:
            skip = set(word) <= set("<>&") and word not in ("&", "&&")
            if not skip:
                if words:
                    yield tuple(words)
                words = []
        elif skip:
            skip = False
        elif words or not re.match(r"[A-Za-z_]\w*=", word):
            words.append(word)


def refusals(path: Path) -> Iterator[tuple[tuple[str, ...], str]]:
    """Quoted refusals: the flags of `<!-- refused: FLAGS -->`, the text below it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for block in blocks(path):
        above = [x.strip() for x in lines[: block.line - 1] if x.strip()]
        marked = re.fullmatch(r"<!-- refused: (.+) -->", above[-1] if above else "")
        if marked:
            yield tuple(marked[1].split()), " ".join(" ".join(block.lines).split())


def slug(heading: str) -> str:
    """The anchor that a heading gets on the usual hosts of repositories."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[^\w\- ]", "", text.strip().lower())
    return text.replace(" ", "-")


def prose(text: str) -> str:
    """A document without its code blocks."""
    return re.sub(r"^ *(```+|~~~+).*?^ *\1", "", text, flags=re.S | re.M)


def anchors(path: Path) -> set[str]:
    """Every anchor of a document: headings and ids."""
    text = path.read_text(encoding="utf-8")
    found: set[str] = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    seen: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose(text), re.M):
        name = slug(heading)
        found.add(f"{name}-{seen[name]}" if name in seen else name)
        seen[name] = seen.get(name, 0) + 1
    return found


def links(path: Path) -> list[str]:
    """Targets of the links and images of a document."""
    text = re.sub(r"`[^`\n]*`", "", prose(path.read_text(encoding="utf-8")))
    return _LINK.findall(text)


def dead_links(path: Path) -> list[str]:
    """Relative links of a document that lead nowhere."""
    dead = []
    for link in links(path):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target)
        ):
            dead.append(link)
    return dead
