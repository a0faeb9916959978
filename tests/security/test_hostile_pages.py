# SPDX-License-Identifier: Apache-2.0
"""Pages and tables made of what servers send: text, whatever it says.

A server whose every string is markup, in its description, its errors and its answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from bench_server import BenchServer
from fake_server import Lies

EVIL = "</script></style></title><script>alert(1)</script><img src=x onerror=a()>\"'&"
MARKDOWN = "[x](javascript:alert(1)) ![x](http://evil/x.png) `|` \x1b[31m\u202e"
FIELDS = (
    "version",
    "model_path",
    "served_model_name",
    "tokenizer_path",
    "revision",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "device",
    "attention_backend",
    "launch_command",
    "speculative_draft_model_path",
)
FORBIDDEN_TAGS = {"script", "img", "iframe", "object", "embed", "link", "base", "form"}
SAFE_ATTRIBUTES = {"href", "src", "action", "formaction", "srcdoc", "data"}


class Page(HTMLParser):
    """What a browser would see: tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in FORBIDDEN_TAGS:
            self.found.append(f"<{tag}>")
        for name, value in attrs:
            if name.startswith("on"):
                self.found.append(name)
            if name in SAFE_ATTRIBUTES and not (value or "").startswith("#"):
                self.found.append(f"{name}={value}")


def problems(page: str) -> list[str]:
    """Anything of a page that runs, loads or leads somewhere."""
    found = Page()
    found.feed(page)
    found.close()
    if "Content-Security-Policy" not in page or "default-src 'none'" not in page:
        found.found.append("no policy")
    return found.found


def hostile(**more: Any) -> BenchServer:
    text = EVIL + MARKDOWN
    return BenchServer(
        info=dict.fromkeys(FIELDS, text) | {EVIL: EVIL},
        exact={
            "version": text,
            "numerics": text,
            "hooks": [text],
            "host_version": text,
            "features_refused": [text],
            "test_settings": {text: text},
        },
        **more,
    )


async def call(cwd: Path, *words: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from sglang_exact.cli import main; main()", *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")},
        cwd=cwd,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode or 0, out.decode()


def control(text: str) -> list[str]:
    """Control characters and overrides of the writing direction."""
    allowed = "\n\r\t"
    bidi = range(0x202A, 0x202F), range(0x2066, 0x206A)
    return [
        hex(ord(ch))
        for ch in text
        if (ord(ch) < 32 and ch not in allowed) or any(ord(ch) in part for part in bidi)
    ]


@pytest.mark.parametrize("kinds", [(), ("wrong-token",), ("error-500",), ("garbage",)])
def test_verify(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    async def go() -> str:
        async with (
            hostile(speculative=False) as plain,
            hostile(lies=Lies(set(kinds))) as tested,
        ):
            _, text = await call(
                tmp_path,
                *("verify", "--base-url", tested.url, "--reference", plain.url),
                *("--arms", "speculation,streaming", "--num-prompts", "2"),
                *("--max-new-tokens", "10", "--html", "r.html", "--json", "r.json"),
            )
            return text

    text = asyncio.run(go())
    assert "Traceback" not in text
    assert control(text) == []
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert problems(page) == []
    assert "&lt;/script&gt;&lt;/style&gt;" in page
    assert control(page) == []
    json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kinds", [(), ("wrong-token",)])
def test_bench(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    (tmp_path / "own.jsonl").write_text('{"input_ids": [5, 6, 7, 8]}\n' * 4)

    async def go() -> str:
        async with (
            hostile(speculative=False) as plain,
            hostile(lies=Lies(set(kinds))) as tested,
        ):
            status, text = await call(
                tmp_path,
                *("bench", "accept", "--server", f"plain={plain.url}"),
                *("--server", f"spec={tested.url}", "--label", EVIL, "--note", EVIL),
                *("--dataset", "own", "--dataset-path", "own=own.jsonl"),
                *("--max-new-tokens", "8", "--num-prompts", "2"),
                *("--output-file", "run.json", "--markdown", "run.md"),
            )
            assert (tmp_path / "run.json").is_file(), text
            reports = ("--html", "report.html", "--markdown", "report.md")
            _, shown = await call(tmp_path, "bench", "report", "run.json", *reports)
            return text + shown

    text = asyncio.run(go())
    assert "Traceback" not in text
    assert control(text) == []
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert problems(page) == []
    assert "&lt;/script&gt;&lt;/style&gt;" in page
    table = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "<script" not in table
    assert re.search(r"(?<!\\)\]\(", table) is None


@pytest.mark.parametrize(
    "page",
    [
        f"<p>{EVIL}</p>",
        "<a href='javascript:x'>",
        "<svg onload=x>",
        "<form action='http://x'>",
    ],
)
def test_the_search_can_find(page: str) -> None:
    policy = "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'\">"
    assert problems(policy + page) != []
    assert problems(policy + "<p>&lt;script&gt;</p><a href='#x'>x</a>") == []
    assert problems("<p>x</p>") == ["no policy"]
