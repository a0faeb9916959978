# SPDX-License-Identifier: Apache-2.0
"""Whole suites against the real engine, everything scaled down to the CPU.

A record of a plain server, the plan of the oracle made from it, and a speculative
server: what is verified is, and what was cut too short to count says so.
"""

from __future__ import annotations

import functools
import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]

# Two prompts, six tokens: enough for a step that accepts and one that rejects.
SCALE = (
    *("--num-prompts", "2", "--max-new-tokens", "6"),
    *("--max-prompt-tokens", "90", "--repeats", "32", "--long-repeats", "2"),
)
RECORDED = ("--num-prompts", "2", "--max-new-tokens", "6", "--max-prompt-tokens", "90")


def command(cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run `sglang-exact` as a user does."""
    main = "from sglang_exact.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", main, *args],
        capture_output=True,
        text=True,
        timeout=3000,
        cwd=cwd,
        check=False,
    )
    assert "Traceback" not in done.stderr + done.stdout
    return done


def plan(folder: Path, record: str, rate: float) -> str:
    """The oracle's plan, made from a record by the package's own program."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sglang_exact.verify.continuations"),
            *(record, "--rate", str(rate)),
        ],
        capture_output=True,
        check=True,
        cwd=folder,
    )
    fresh = folder / "oracle.tmp"
    fresh.write_bytes(done.stdout)
    fresh.replace(folder / "oracle.json")
    return str(folder / "oracle.json")


class Pair:
    """A folder with records, and servers that are started when first asked for."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder, self.models = folder, models
        self.running: dict[str, Any] = {}

    def server(self, name: str, tokens: int = 0) -> Any:
        from sglang_exact.hooks.testing.oracle import VARIABLE
        from sglang_exact.rehearsal.server import Server, draft_flags

        if name not in self.running:
            flags: list[str] = []
            env = {}
            if tokens:
                flags = draft_flags("dflash", self.models / "dflash", tokens)
                env = {VARIABLE: str(self.folder / "oracle.json")}
            server = Server(
                self.models / "target", flags=flags, env=env, start_timeout_s=240.0
            )
            server.start()
            self.running[name] = server
        return self.running[name]

    def stop(self) -> None:
        for server in self.running.values():
            server.stop()

    def verify(self, url: str, *args: str) -> tuple[int, dict[str, dict[str, Any]]]:
        """Exit status and the arms of a verification."""
        row = self.folder / "row.json"
        row.unlink(missing_ok=True)
        result = command(
            self.folder,
            *("verify", "--base-url", url, "--output-format", "json"),
            *("--submit-row", str(row), *args),
        )
        found = json.loads(result.stdout)
        written = json.loads(row.read_text())
        assert written["complete"] == (result.returncode == 0)
        assert {k: v["state"] for k, v in written["arms"].items()} == {
            arm["arm"]: arm["state"] for arm in found["arms"]
        }
        return result.returncode, {arm["arm"]: arm for arm in found["arms"]}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_models: Path) -> Iterator[Pair]:
    found = Pair(tmp_path_factory.mktemp("suites"), tiny_models)
    try:
        url = found.server("plain").url
        done = command(
            found.folder,
            *("record", "--base-url", url, "--suite", "full"),
            *("--output-file", "plain.jsonl", *RECORDED),
        )
        assert done.returncode == 0, done.stderr
        plan(found.folder, "plain.jsonl", 0.4)
        yield found
    finally:
        found.stop()


def states(arms: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: row["state"] for name, row in arms.items()}


# Cut to 90 tokens, so compared and not counted: 2,048 take the interpreter more than
# ten minutes.
CUT = ("long-2k", "long-8k", "long-32k", "long-128k", "long-repeat")
NOT_STARTED = ("rejected", "widths", "restart")
# Six tokens seldom reach an end or outlast a neighbour, the prefills are cut, and the
# oracle knows the greedy answer to each prompt and no other. No answer stands in a
# prompt of 90 tokens, and two prompts drive nothing out of a cache.
TOO_SMALL = (
    *("stops", "sampled-neighbours", "prefill-neighbours", "seeds"),
    *("multi-turn", "evict"),
)


def test_full_suite(pair: Pair) -> None:
    spec = pair.server("spec", 4)
    status, arms = pair.verify(
        spec.url,
        *("--reference", "plain.jsonl", "--suite", "full", *SCALE),
        *("--output-file", "full.jsonl"),
    )
    assert status == 2
    assert all(row["different"] == 0 for row in arms.values()), arms
    found = states(arms)
    for name in CUT:
        assert found.pop(name) == "not exercised"
        assert "answers report 90 prompt tokens" in arms[name]["reasons"][0]
        assert arms[name]["compared"] > 0
    for name in NOT_STARTED:
        assert found.pop(name) == "not exercised"
        assert "--server" in arms[name]["reasons"][0]
    for name in ("in-flight-16", "in-flight-44"):
        assert found.pop(name) == "not offered"
        assert arms[name]["reasons"] == ["the server runs at most 8 requests at once"]
        assert arms[name]["compared"] >= 32
    assert found.pop("warm") == found.pop("branch") == "verified"
    # The host knows no end of an answer to hold back without a tokenizer.
    assert found.pop("penalties") == "not offered"
    assert "min_new_tokens" in arms["penalties"]["reasons"][0]
    assert found.pop("plain-repeat") == found.pop("plain-in-flight-8") == "not offered"
    assert set(found.values()) <= {"verified", "not exercised"}
    open_arms = {name for name, state in found.items() if state != "verified"}
    assert open_arms <= set(TOO_SMALL), {n: arms[n]["reasons"] for n in open_arms}
    assert arms["repeats"]["compared"] == 32
    assert "below 9.4 %" in arms["repeats"]["failure_bound"]


def test_plain_server_against_its_record(pair: Pair) -> None:
    """No speculation on either side: the control, from a file."""
    names = "plain-repeat,plain-in-flight-8"
    status, arms = pair.verify(
        pair.server("plain").url,
        *("--reference", "plain.jsonl", "--arms", names, *SCALE),
        *("--output-file", "plain-run.jsonl"),
    )
    assert (status, set(states(arms).values())) == (0, {"verified"}), arms
    assert arms["plain-in-flight-8"]["compared"] == 16


class Restarter:
    """Starts a server again on its port when a file says so; a command waits for it."""

    def __init__(self, pair: Pair, name: str) -> None:
        self.server = pair.server(name)
        self.ask, self.done = pair.folder / "restart.ask", pair.folder / "restart.done"
        self.command = shlex.join(
            [
                *(sys.executable, "-c", self._WAIT),
                *(str(self.ask), str(self.done)),
            ]
        )
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    _WAIT = (
        "import pathlib, sys, time\n"
        "ask, done = map(pathlib.Path, sys.argv[1:])\n"
        "ask.touch()\n"
        "while not done.exists(): time.sleep(0.2)\n"
    )

    def _watch(self) -> None:
        from sglang_exact.rehearsal import server as module

        while not self.over.wait(0.2):
            if self.ask.exists():
                port, free = self.server.port, module.free_port
                self.server.stop()
                module.free_port = functools.partial(int, port)
                try:
                    self.server.start()
                finally:
                    module.free_port = free
                self.done.touch()
                return


def test_widths_rejections_and_a_restart(pair: Pair) -> None:
    plan(pair.folder, "plain.jsonl", 0.4)
    spec, narrow = pair.server("spec", 4), pair.server("narrow", 2)
    restarter = Restarter(pair, "spec")
    base = ("--reference", "plain.jsonl", *SCALE)
    try:
        status, arms = pair.verify(
            spec.url,
            *(*base, "--arms", "speculation,widths,restart"),
            *("--server", f"width={narrow.url}"),
            *("--restart-command", restarter.command),
            *("--output-file", "roles.jsonl"),
        )
    finally:
        restarter.over.set()
        restarter.thread.join()
    assert (status, set(states(arms).values())) == (0, {"verified"}), arms
    assert arms["widths"]["acceptance"]["draft_tokens"] == 2
    assert restarter.done.exists()
    plan(pair.folder, "plain.jsonl", 0.0)
    status, arms = pair.verify(
        narrow.url,
        *(*base, "--arms", "rejected", "--server", f"reject-all={narrow.url}"),
        *("--output-file", "rejected.jsonl"),
    )
    assert (status, states(arms)) == (0, {"rejected": "verified"}), arms
