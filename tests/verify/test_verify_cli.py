# SPDX-License-Identifier: Apache-2.0
"""The command line: exit status, secrets, interruption, no tracebacks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Lies

from sglang_exact.verify.command import command_line

KEY = "tOp-s3cret-key"
SMALL = ("--arms", "speculation", "--num-prompts", "2", "--max-new-tokens", "10")


async def call(
    *args: str,
    stop_when: Any = None,
    stop_with: int = signal.SIGINT,
    env: dict[str, str] | None = None,
    cwd: Path,
) -> tuple[int, str, str]:
    """Run `sglang-exact` as a process; `stop_when` () -> bool sends it a signal."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from sglang_exact.cli import main; main()",
        *args,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(env or {})},
        cwd=cwd,
    )
    if stop_when is not None:
        while not stop_when():
            await asyncio.sleep(0.01)
        process.send_signal(stop_with)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, out.decode(), err.decode()


def run(path: Path, *args: str, lies: set[str] | None = None, **more: Any) -> Any:
    """`verify` against an honest reference and a server with these lies."""

    async def go() -> tuple[int, str, str]:
        key = more.pop("key", None)
        async with (
            FakeServer(speculative=False, api_key=key) as plain,
            FakeServer(lies=Lies(lies or set()), api_key=key) as tested,
        ):
            servers = ("--base-url", tested.url, "--reference", plain.url)
            return await call("verify", *servers, *SMALL, *args, cwd=path, **more)

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("lies", "status", "first"),
    [
        (set(), 0, "verified: 2/2 answers bitwise equal, 20 tokens"),
        ({"wrong-token"}, 1, "DIVERGENCE in speculation: 0/2"),
        ({"no-counters"}, 2, "NOT VERIFIED, speculation: 2/2"),
        ({"garbage"}, 2, "NOT VERIFIED, speculation: 0/0"),
    ],
)
def test_exit_status(tmp_path: Path, lies: set[str], status: int, first: str) -> None:
    code, out, err = run(tmp_path, lies=lies)
    assert code == status, err
    assert out.startswith(first)
    assert "Traceback" not in out + err
    if status == 1:
        assert "suspicion" in out and "0x" in out


def test_files_and_json(tmp_path: Path) -> None:
    code, out, _ = run(
        tmp_path,
        *("--output-format", "json", "--json", "a/r.json", "--html", "a/r.html"),
        *("--submit-row", "a/row.jsonl", "--output-file", "a/run.jsonl"),
    )
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "a/r.json").read_text())
    row = json.loads((tmp_path / "a/row.jsonl").read_text())
    assert (row["verdict"], row["compared"], row["equal"]) == ("verified", 2, 2)
    assert (row["arms"]["speculation"]["state"], row["complete"]) == ("verified", True)
    shown = asyncio.run(
        call("report", "a/run.jsonl", "--html", "again.html", cwd=tmp_path)
    )
    assert shown[0] == 0 and shown[1].startswith("verified: ")
    page = (tmp_path / "again.html").read_text()
    assert page == (tmp_path / "a/r.html").read_text()


@pytest.mark.parametrize("by_env", [False, True])
def test_api_key_is_used_and_never_shown(tmp_path: Path, by_env: bool) -> None:
    options = () if by_env else ("--api-key", KEY)
    code, out, err = run(
        tmp_path,
        *options,
        *("--json", "r.json", "--html", "r.html", "--submit-row", "row.json"),
        key=KEY,
        env={"SGLANG_API_KEY": KEY} if by_env else {},
    )
    assert code == 0, err
    files = [p.read_text() for p in tmp_path.iterdir() if p.is_file()]
    assert len(files) == 4
    assert all(KEY not in text for text in (out, err, *files))


def test_wrong_api_key(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "--api-key", "other", key=KEY)
    assert (code, out) == (2, "")
    assert "401: Unauthorized" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("stop_with", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_keeps_a_partial_result(tmp_path: Path, stop_with: int) -> None:
    async def go() -> tuple[int, str, str]:
        async with (
            FakeServer(speculative=False) as plain,
            FakeServer(step_s=0.2) as tested,
        ):
            return await call(
                *("verify", "--base-url", tested.url, "--reference", plain.url),
                # Many slow answers are still to come when the signal is sent.
                *("--arms", "speculation", "--num-prompts", "24"),
                *("--max-new-tokens", "10"),
                stop_when=lambda: tested.requests >= 3,
                stop_with=stop_with,
                cwd=tmp_path,
            )

    code, out, err = asyncio.run(go())
    assert code == 130, err
    assert out.startswith("INTERRUPTED, partial result: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--base-url", "http://127.0.0.1:9"), "127.0.0.1:9: ClientConnect"),
        (("--base-url", "nowhere"), "expected http://HOST:PORT"),
        (("--base-url", "http://[::1"), "Invalid IPv6"),
        (("--base-url", "http://h:1", "--resume"), "expected --output-file"),
        (("--base-url", "http://h:1", "--server", "big=http://h:1"), "ROLE one of"),
    ],
)
def test_what_cannot_run_says_why(
    tmp_path: Path, args: tuple[str, ...], said: str
) -> None:
    code, out, err = asyncio.run(call("verify", *args, cwd=tmp_path))
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_command_line_hides_secrets() -> None:
    shown = command_line(
        ["/usr/bin/x", "--api-key", "a", "--reference-api-key=b", "--seed", "1"]
        + ["--base-url=http://u:p@h:1", "--reference", "http://u:p@h:2"]
    )
    assert shown == (
        "x --api-key '***' '--reference-api-key=***' --seed 1 "
        "--base-url=http://h:1 --reference http://h:2"
    )


def test_needs_neither_torch_nor_sglang() -> None:
    code = (
        "import sys; from sglang_exact.verify import command; "
        "from sglang_exact.verify import session, report; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'sglang', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
