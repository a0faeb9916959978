# SPDX-License-Identifier: Apache-2.0
"""ASCII, the project's own words, and no path of one machine."""

from __future__ import annotations

import re
from pathlib import Path

import docs_reader
import pytest

# What is not said -> the word of docs/README.md that says it.
OTHERS = {
    r"monkey-?patch": "hook",
    r"vanilla": "stock",
    r"(bit-|byte-)(exact|identical)": "bit for bit, bitwise",
    r"checksum of (the|a) (target|function)": "fingerprint, pin",
    r"/work/|pyenv": "no path of one machine",
}


def wrong_words(text: str) -> list[str]:
    return [word for word in OTHERS if re.search(word, text, re.I)]


@pytest.mark.parametrize("path", docs_reader.documents(), ids=lambda p: p.name)
def test_words(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    assert wrong_words(text) == []


def test_wrong_words_are_seen() -> None:
    assert wrong_words("a monkeypatch of Vanilla SGLang") == [
        "monkey-?patch",
        "vanilla",
    ]


def test_the_index_explains_the_words() -> None:
    index = (docs_reader.ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for word in ("host", "target", "hook", "patch", "pins", "attestation", "reasons"):
        assert f"*{word}*" in index
