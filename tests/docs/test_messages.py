# SPDX-License-Identifier: Apache-2.0
"""Every message of the source, the scripts and the image has a row in the guide."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator

import docs_reader
import pytest

from tools.docs import messages as docs_messages
from tools.docs import tables as docs_tables

SCRIPT = docs_reader.ROOT / "scripts" / "docs_tables"
GUIDE = docs_reader.ROOT / "docs" / "troubleshooting.md"


SOURCE = '''
FIX = "turn it on"

class A:
    def step(self, x):
        """Docstrings are no messages: found nothing, expected nothing."""
        text = f"the switch {x.name}, which is off"
        if x:
            return [Reason(text, "on", FIX)]
        raise ValueError(f"found {len(x)} parts; expected at least 2; fix: add parts")

def layout_reasons(t):
    reasons = []
    reasons.append(f"strides: found {t.stride()}, expected a unit stride")
    reasons.append(t)
    return reasons

async def asked(t):
    problems = [f"unknown field {name}" for name in t]
    notes.append("the cache was not emptied")
    words = [f"nothing wrong with {name}" for name in t]

def other(t):
    t.append("a text that nobody collects as a reason")
    _cannot("the report cannot be written: " + str(t))
    text = f"the moon is {t.colour}, not cheese"
    parser.add_argument("--x", help="what to do; fix: nothing")
    found = ["a word"]
    found.append("a soft cap, expected none")
    print("the disk is full: " + str(t), file=sys.stderr)
    typer.echo("not recorded: " + str(t), err=True)
    typer.echo("all is well and nothing is wrong")
    note = {"x": f"server {t}: found no model, expected one"}
    if t:
        raise ValueError(text)
    raise SystemExit(status)
'''
SHELL = """#!/bin/sh
fail() { echo "FAILED: $*" >&2; exit 1; }
[ -f "$1" ] ||
  fail "found no ${file:-x}, expected" \\
    "one. Fix: make it."
echo "all is well and nothing is wrong"
python3 - <<'PY' || fail "see above, it did not work"
sys.exit("found an old torch, expected a new one. Fix: upgrade it")
PY
echo "user: found uid '$uid'; expected a number" >&2
"""


def plain(text: str) -> str:
    """Words of a message; what a placeholder is called does not count."""
    text = text.replace("\\|", "|").replace("&lt;", "<").replace("`", "'")
    return " ".join(re.sub(r"<[^<>]*>", "<>", text).split())


def test_messages_are_found() -> None:
    found = [tuple(message[1:]) for message in docs_messages.read("x", SOURCE)]
    assert found == [
        ("the switch <name>, which is off", "on", "turn it on"),
        ("found <x> parts", "at least 2", "add parts"),
        ("strides: found <stride>", "a unit stride", ""),
        ("unknown field <name>", "", ""),
        ("the cache was not emptied", "", ""),
        ("a soft cap", "none", ""),
        ("the report cannot be written: <t>", "", ""),
        ("the disk is full: <t>", "", ""),
        ("not recorded: <t>", "", ""),
        ("server <t>: found no model", "one", ""),
        ("the moon is <colour>, not cheese", "", ""),
    ]


def test_messages_of_shell_scripts_are_found() -> None:
    found = [tuple(message[1:]) for message in docs_messages.shell("x", SHELL)]
    assert found == [
        ("found no <file>", "one", "make it"),
        ("see above, it did not work", "", ""),
        ("user: found uid '<uid>'", "a number", ""),
    ]
    ((_, program),) = docs_messages.PROGRAM.findall(SHELL)
    (inner,) = docs_messages.read("x", program)
    assert inner[1:] == ("found an old torch", "a new one", "upgrade it")


def spoken(text: str) -> Iterator[str]:
    """Parts of literals that say what is expected or how to fix it.

    Read from the tokens, so what docs_messages overlooks in the tree shows here.
    """
    depth, before = 0, tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        alone = not depth and before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.NL)
        # Help of an option is no message, and a pattern no text.
        other = re.search(r'help=|re\.\w+\(|r"', token.line)
        if token.type == tokenize.STRING and not (alone or other):
            yield from _parts(token.string)
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(
            token.string, 0
        )
        if token.type != tokenize.COMMENT:
            before = token.type


def _parts(literal: str) -> Iterator[str]:
    body = re.sub(r"^[rbuf]*[\x22\x27]+|[\x22\x27]+$", "", literal)
    if not re.search(r"[;,.] expected |[;.] [Ff]ix: ", body):
        return
    for part in re.split(
        r"\{[^{}]*\}|(?:^|[;,.] )expected |[;.] [Ff]ix: |\\n|['`]", body
    ):
        words = part.strip(" ;,.:()-")
        if len(words.split()) > 1:
            yield " ".join(words.split())


def test_no_literal_is_overlooked() -> None:
    guide = plain(GUIDE.read_text(encoding="utf-8"))
    parts = {
        (name, part)
        for name, text in docs_messages.sources()
        if text.startswith(("#!/usr/bin/env python", "# SPDX")) and "FROM $" not in text
        for part in spoken(text)
    }
    assert len(parts) > 300
    assert sorted(p for p in parts if p[1] not in guide) == []


def test_an_overlooked_literal_is_seen() -> None:
    text = 'hide(f"the moon: found {x} craters here, expected no crater at all")\n'
    assert list(spoken(text)) == ["the moon: found", "craters here", "no crater at all"]
    assert list(spoken('"""Found here, expected there."""\n')) == []


def test_every_message_has_a_row() -> None:
    guide = plain(GUIDE.read_text(encoding="utf-8"))
    messages = docs_messages.messages()
    assert len(messages) > 500
    sources = {m.source.partition("/")[0] for m in messages}
    assert sources == set(docs_messages.FOLDERS)
    missing = [m for m in messages if f"'{plain(m.found)}'" not in guide]
    assert missing == [], "run scripts/docs_tables"
    assert plain("the moon is <colour>") not in guide


def test_tables_follow_from_the_source() -> None:
    """Also those of flags, variables, requests and hooks."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, (
        f"{done.stdout}{done.stderr}found tables that differ from the source; fix: run "
        "scripts/docs_tables and commit docs/"
    )


def test_a_stale_table_is_seen() -> None:
    text = "<!-- table: requests -->\nold\n<!-- table: end -->\n"
    made = {"requests": lambda: "new"}
    new = docs_tables.filled(text, made, "x.md")
    assert new == text.replace("old", "new")
    assert docs_tables.filled(new, made, "x.md") == new
    with pytest.raises(ValueError, match="found table requests in x.md"):
        docs_tables.filled(text, {}, "x.md")


def test_every_row_can_be_linked_to() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    ids = re.findall(r'<a id="(m-[^"]*)">', text)
    assert len(ids) == len(set(ids)) == len(docs_messages.messages())
