# SPDX-License-Identifier: Apache-2.0
"""The page: one file, nothing from outside, everything from a server escaped."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fake_server import FakeServer, Lies
from rich.console import Console
from verify_runs import against, settings

from sglang_exact.verify import report, summary
from sglang_exact.view import charts

EVIL = "<script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&"
GREEN_OR_RED = ("verified", "diverged", "not-offered")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "headless_shell")


class Page(HTMLParser):
    """Collects tags, ids and text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids |= {value for name, value in attrs if name == "id" and value}


def parsed(page: str) -> Page:
    found = Page()
    found.feed(page)
    return found


@pytest.fixture(scope="module")
def diverged(tmp_path_factory: pytest.TempPathFactory) -> summary.Run:
    """A run with an evil server name and differences in some of its answers."""
    lies = Lies({"logprob-bit"}, when=lambda _, server: server.requests % 3 == 0)
    tested = FakeServer(
        lies=lies,
        step_s=0.003,
        info={"served_model_name": EVIL, "quantization": EVIL},
        exact={
            "version": EVIL,
            "numerics": EVIL,
            "hooks": [EVIL],
            "not_pinned": [EVIL],
            "test_settings": {"oracle": EVIL},
        },
    )
    path = tmp_path_factory.mktemp("run")
    names = "speculation,without-logprobs,streaming,in-flight-8,repeats,rejected"
    return asyncio.run(against(tested, path, settings(names, tokens=48)))


def test_page_is_escaped_and_self_contained(diverged: summary.Run) -> None:
    page = report.html(diverged)
    found = parsed(page)
    assert "script" not in found.tags
    assert not {"img", "link", "iframe", "object"} & set(found.tags)
    names = {name for name, _ in found.attributes}
    assert not names & {"src", "href", "onerror", "onload"}
    assert "url(" not in page and "@import" not in page
    assert "&lt;script&gt;" in page
    assert "Acceptance was set by an oracle" in page
    assert "packages other than the pinned ones" in page
    assert {"arms", "positions", "curves", "acceptance", "servers"} <= found.ids


def test_another_stack_is_said(diverged: summary.Run) -> None:
    """Beside the headline, also without a page."""
    console = Console(record=True, width=200)
    report.print_result(diverged, console)
    assert "runs on packages other than the pinned ones: [" in console.export_text()
    (info,) = (s for s in diverged.servers if s.exact)
    saved = info.exact.pop("not_pinned")
    try:
        assert "other than the pinned ones" not in report.html(diverged)
    finally:
        info.exact["not_pinned"] = saved


def test_page_without_answers(tmp_path: Path) -> None:
    tested = FakeServer(lies=Lies({"garbage"}))
    run = asyncio.run(against(tested, tmp_path))
    page = report.html(run)
    assert "NOT VERIFIED" in page
    assert "No answer was compared" in page or "positions" in page


@pytest.mark.parametrize(
    ("lies", "verdict"),
    [
        (Lies({"garbage"}), "not-verified"),
        (Lies({"logprob-bit"}), "divergence"),
        (Lies(), "verified"),
    ],
)
def test_a_verdict_is_one_class(lies: Lies, verdict: str, tmp_path: Path) -> None:
    """Only the page of a verified run is green: a class has no space in it."""
    run = asyncio.run(against(FakeServer(lies=lies), tmp_path))
    classes = [v for n, v in parsed(report.html(run)).attributes if n == "class" and v]
    (headline,) = [c for c in classes if c.startswith("headline ")]
    assert headline.split() == ["headline", verdict]
    states = {r.state.replace(" ", "-") for r in run.results}
    assert {c.split()[1] for c in classes if c.startswith("state ")} == states
    for state in states:
        assert f".{state}" in report.html(run) or state not in GREEN_OR_RED


def test_verified_page_says_zero_everywhere(tmp_path: Path) -> None:
    run = asyncio.run(against(FakeServer(), tmp_path))
    assert "0 at every token of all 3 answers" in report.html(run)


def test_acceptance_is_macro_and_micro(tmp_path: Path) -> None:
    run = asyncio.run(against(FakeServer(), tmp_path))
    outcomes = run.results[0].outcomes
    found = summary.acceptance(outcomes)
    assert found is not None
    steps = [o.counters.verify or 0 for o in outcomes]
    assert found["micro"] == 36 / sum(steps)
    assert found["macro"] == sum(12 / s for s in steps) / 3


def test_ticks_are_round() -> None:
    assert charts.ticks(0) == [0.0]
    assert charts.ticks(48) == [0, 10, 20, 30, 40]
    assert charts.ticks(4096)[-1] <= 4096


@pytest.mark.slow
def test_page_in_a_browser(diverged: summary.Run, tmp_path: Path) -> None:
    """Nothing of the server runs, the plots have a size, nothing overflows."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"needs a headless browser: one of {', '.join(BROWSERS)}")
    page = report.html(diverged)
    # The page forbids scripts; the measuring one is let in here and only here.
    probe = (
        "<script nonce='t'>document.title = JSON.stringify(["
        "document.querySelectorAll('script').length,"
        "[...document.querySelectorAll('svg')].map(s => s.clientHeight > 40),"
        "document.documentElement.scrollWidth <= innerWidth])</script></body>"
    )
    page = page.replace(
        "default-src 'none';", "default-src 'none'; script-src 'nonce-t';"
    )
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", probe), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--window-size=1200,900", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, path.as_uri()], capture_output=True, text=True, timeout=120
    )
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr[-2000:]
    assert title[1] == "[1,[true,true,true],true]"
