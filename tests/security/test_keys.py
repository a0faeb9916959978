# SPDX-License-Identifier: Apache-2.0
"""API keys are used, and appear in no output and in no file.

Every command that can be given a key runs with it in a flag, in the environment and in
the address, against servers that take it, refuse it, and send it back.
"""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from aiohttp import web
from bench_server import BenchServer

KEY = "tOp/s3cret+k3y"
ASKED = ("--arms", "speculation", "--num-prompts", "1", "--max-new-tokens", "8")
FILES = ("--json", "r.json", "--html", "r.html", "--submit-row", "row.json")
FORMS = tuple(
    {
        KEY,
        quote(KEY, safe=""),
        base64.b64encode(KEY.encode()).decode(),
        base64.b64encode(f"user:{KEY}".encode()).decode(),
    }
)


class Echo(BenchServer):
    """A server that puts what it was sent, headers first, into every answer."""

    async def start(self) -> None:
        async def answer(request: web.Request) -> web.Response:
            sent = "\n".join(f"{k}: {v}" for k, v in request.headers.items())
            return web.json_response(
                {"error": {"message": f"{KEY}\n{sent}"}, "model_path": sent},
                status=self.status,
            )

        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    status = 500


async def call(cwd: Path, *words: str, **variables: str) -> tuple[int, str]:
    """Run `sglang-exact` in a process; status, and everything it printed."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from sglang_exact.cli import main; main()", *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**environ, **variables},
        cwd=cwd,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode or 0, out.decode()


def leaks(folder: Path, printed: str) -> list[str]:
    """Where the key, as it is or encoded, can be read."""
    texts = {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    texts["output"] = printed.encode()
    return [
        name
        for name, text in texts.items()
        if any(form.encode() in text for form in FORMS)
    ]


def given(how: str, url: str) -> tuple[str, tuple[str, ...], dict[str, str]]:
    """The address, more words and variables that carry the key this way."""
    if how == "flag":
        return url, ("--api-key", KEY), {}
    if how == "equals":
        return url, (f"--api-key={KEY}",), {}
    if how == "environment":
        return url, (), {"SGLANG_API_KEY": KEY}
    secret = quote(KEY, safe="")
    return url.replace("://", f"://user:{secret}@"), (), {}


WAYS = ("flag", "equals", "environment", "address")
SENT_BACK = ("flag", "address")


@pytest.mark.parametrize("how", WAYS)
def test_verify_and_record(tmp_path: Path, how: str) -> None:
    """Against servers that want the key, and say it in /server_info."""
    wanted = None if how == "address" else KEY

    async def go() -> tuple[int, str]:
        async with (
            BenchServer(speculative=False, api_key=wanted) as plain,
            BenchServer(api_key=wanted, info={"note": KEY}) as tested,
        ):
            base, more, variables = given(how, plain.url)
            status, printed = await call(
                tmp_path,
                *("record", "--base-url", base, "--output-file", "plain.jsonl"),
                *(*ASKED, *more),
                **variables,
            )
            assert status == 0, printed
            base, more, variables = given(how, tested.url)
            status, text = await call(
                tmp_path,
                *("verify", "--base-url", base, "--reference", "plain.jsonl"),
                *("--output-file", "run.jsonl", *ASKED, *FILES, *more),
                **variables,
            )
            assert status == 0, text
            status, shown = await call(tmp_path, "report", "run.jsonl")
            return status, printed + text + shown

    status, printed = asyncio.run(go())
    assert status == 0
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"plain.jsonl", "run.jsonl", "r.json", "r.html", "row.json"}
    assert leaks(tmp_path, printed) == []


@pytest.mark.parametrize("how", SENT_BACK)
@pytest.mark.parametrize("status", [200, 401, 500])
def test_a_server_that_sends_it_back(tmp_path: Path, how: str, status: int) -> None:
    async def go() -> str:
        echo = Echo()
        echo.status = status
        async with echo:
            base, more, variables = given(how, echo.url)
            _, printed = await call(
                tmp_path,
                *("verify", "--base-url", base, "--reference", base, *ASKED, *FILES),
                *("--reconnect-timeout", "0.2", "--output-file", "run.jsonl", *more),
                **variables,
            )
            return printed

    printed = asyncio.run(go())
    assert printed.strip()
    assert leaks(tmp_path, printed) == []


@pytest.mark.parametrize("how", SENT_BACK)
def test_no_server_and_a_wrong_one(tmp_path: Path, how: str) -> None:
    printed = ""
    for url in ("http://127.0.0.1:9", "ftp://127.0.0.1:9", "http://[::1"):
        base, more, variables = given(how, url)
        status, text = asyncio.run(
            call(tmp_path, "verify", "--base-url", base, *ASKED, *more, **variables)
        )
        assert status == 2
        printed += text
    assert leaks(tmp_path, printed) == []


@pytest.mark.parametrize("how", ["flag", "address"])
def test_bench(tmp_path: Path, how: str) -> None:
    wanted = None if how == "address" else KEY
    (tmp_path / "own.jsonl").write_text('{"input_ids": [5, 6, 7, 8]}\n' * 3)

    async def go() -> tuple[int, str]:
        async with BenchServer(api_key=wanted, info={"note": KEY}) as tested:
            base, more, variables = given(how, tested.url)
            status, printed = await call(
                tmp_path,
                *("bench", "accept", "--server", f"spec={base}", *more),
                *("--dataset", "own", "--dataset-path", "own=own.jsonl"),
                *("--max-new-tokens", "8", "--num-prompts", "2"),
                *("--output-file", "run.json", "--markdown", "run.md"),
                **variables,
            )
            reports = ("--html", "report.html", "--markdown", "report.md")
            _, shown = await call(tmp_path, "bench", "report", "run.json", *reports)
            return status, printed + shown

    status, printed = asyncio.run(go())
    assert status == 0, printed
    assert {path.name for path in tmp_path.iterdir()} >= {"run.json", "report.html"}
    assert leaks(tmp_path, printed) == []


@pytest.mark.parametrize("command", [("env",), ("env", "--json"), ("doctor",)])
def test_env_and_doctor(tmp_path: Path, command: tuple[str, ...]) -> None:
    variables = {
        "SGLANG_API_KEY": KEY,
        "HF_TOKEN": KEY,
        "SGLANG_EXACT_API_KEY": KEY,
        "SGLANG_MOONCAKE_PASSWORD": KEY,
        "SGLANG_STORE_URL": f"http://user:{quote(KEY, safe='')}@host/x",
    }
    status, printed = asyncio.run(call(tmp_path, *command, **variables))
    assert status in (0, 1)
    assert "SGLANG_EXACT_API_KEY" in printed
    assert leaks(tmp_path, printed) == []


@pytest.mark.host
def test_launcher_refuses_without_repeating_the_key(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sglang_exact.launch_server", "--api-key", KEY]
        + ["--model-path", str(tmp_path), "--exact-chek"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert leaks(tmp_path, done.stdout) == []


@pytest.mark.parametrize(
    "spoil",
    [
        str,
        lambda key: quote(key, safe=""),
        lambda key: base64.b64encode(key.encode()).decode(),
    ],
)
def test_the_search_can_find(tmp_path: Path, spoil: Callable[[str], str]) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_text(f"x{spoil(KEY)}y")
    assert leaks(tmp_path, "") == [str(tmp_path / "deep" / "file")]
    assert leaks(tmp_path / "deep" / "none", f"key {KEY}") == ["output"]
