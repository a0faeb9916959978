# SPDX-License-Identifier: Apache-2.0
"""No dead link, no dead anchor, every document found from the index."""

from __future__ import annotations

from pathlib import Path

import docs_reader
import pytest

PAGES = [*docs_reader.documents(), docs_reader.ROOT / "patches" / "README.md"]


@pytest.mark.parametrize("path", PAGES, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_links_lead_somewhere(path: Path) -> None:
    assert docs_reader.dead_links(path) == []


def test_dead_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        '# One `x`, two\n\n<a id="here"></a>[a](#here) [b](#one-x-two) [c](page.md)\n'
        "[d](#gone) [e](absent.md) [f](page.md#one) ![g](no.svg) `[h](code)`\n"
        "[i](https://example.org/x) [j [k]](page.md#here)\n"
    )
    assert docs_reader.dead_links(page) == [
        "#gone",
        "absent.md",
        "page.md#one",
        "no.svg",
    ]


def test_the_index_names_every_document() -> None:
    index = docs_reader.ROOT / "docs" / "README.md"
    named = {link.partition("#")[0] for link in docs_reader.links(index)}
    there = {p.name for p in index.parent.glob("*.md")} - {index.name}
    assert there - named == set()


def test_documents_are_reached_by_links() -> None:
    """From README and the index, each document is a few links away."""
    root = docs_reader.ROOT
    reached = {root / "README.md", root / "docs" / "README.md"}
    for _ in range(3):
        for page in list(reached):
            for link in docs_reader.links(page):
                target = (page.parent / link.partition("#")[0]).resolve()
                if target.suffix == ".md" and target.exists():
                    reached.add(target)
    assert set(docs_reader.documents()) - reached == set()
