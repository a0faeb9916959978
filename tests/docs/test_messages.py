# SPDX-License-Identifier: Apache-2.0
"""Every message of the source has a row in troubleshooting.md."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import subprocess
import sys
from types import ModuleType

import docs_reader
import pytest

SCRIPT = docs_reader.ROOT / "scripts" / "docs_tables"
GUIDE = docs_reader.ROOT / "docs" / "troubleshooting.md"


def load() -> ModuleType:
    """scripts/docs_tables as a module."""
    loader = importlib.machinery.SourceFileLoader("docs_tables", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


docs_tables = load()
docs_messages = sys.modules["docs_messages"]

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

def other(t):
    t.append("a text that nobody collects as a reason")
    _cannot("the report cannot be written: " + str(t))
    raise SystemExit(status)
'''


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
        ("the report cannot be written: <t>", "", ""),
    ]


def test_every_message_has_a_row() -> None:
    guide = plain(GUIDE.read_text(encoding="utf-8"))
    messages = docs_messages.messages()
    assert len(messages) > 200
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
