# SPDX-License-Identifier: Apache-2.0
"""Status 1 is a divergence and nothing else, wherever the run is stopped or fails."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Lies
from hostile_server import HostileServer
from test_verify_cli import KEY, SMALL, call
from typer.testing import CliRunner
from verify_runs import against

from sglang_exact.cli import application
from sglang_exact.client.http import redact_url
from sglang_exact.verify import output as verify_out
from sglang_exact.verify import report as reporting
from sglang_exact.verify.command import command_line


def shell(
    path: Path,
    after: str,
    *,
    lies: set[str] | None = None,
    env: dict[str, str] | None = None,
    **server: Any,
) -> tuple[int, str, str]:
    """`verify` in a shell, with what follows the command there."""

    async def go() -> tuple[int, str, str]:
        tested = FakeServer(lies=Lies(lies or set()), **server)
        async with FakeServer(speculative=False) as plain, tested:
            words = [
                *(sys.executable, "-c", "from sglang_exact.cli import main; main()"),
                *("verify", "--base-url", tested.url, "--reference", plain.url),
                *SMALL,
            ]
            process = await asyncio.create_subprocess_exec(
                *("bash", "-o", "pipefail", "-c", f"{shlex.join(words)} {after}"),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=path,
                env={**os.environ, **(env or {})},
            )
            out, err = await asyncio.wait_for(process.communicate(), 60)
            return process.returncode or 0, out.decode(), err.decode()

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("after", "status"),
    [
        ("> /dev/full", 2),
        ("--output-format json > /dev/full", 2),
        ("--html /dev/full", 2),
        # The reader of the result ends before it is written.
        ("| true", 2),
        # Progress alone stops nothing.
        ("2> /dev/full", 0),
        ("2>&-", 0),
        ("2> >(true)", 0),
    ],
)
def test_output_that_nobody_takes(tmp_path: Path, after: str, status: int) -> None:
    code, out, err = shell(tmp_path, after)
    assert code == status, (out, err)
    assert "Traceback" not in out + err
    assert status == 0 or "the report cannot be written" in err
    assert status == 2 or out.startswith("verified: 2/2")


@pytest.mark.parametrize("after", ["> /dev/full", "2> /dev/full"])
def test_divergence_stays_one(tmp_path: Path, after: str) -> None:
    code, out, err = shell(tmp_path, after, lies={"wrong-token"})
    assert code == 1, (out, err)
    assert "Traceback" not in out + err


def test_terminal_without_the_characters(tmp_path: Path) -> None:
    """Server text is shown as far as the encoding goes."""
    env = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    code, out, err = shell(tmp_path, "", env=env, info={"dtype": "b\u00e9\u4e2d"})
    assert code == 0, (out, err)
    assert "b\\xe9\\u4e2d" in out


def report(path: Path, *args: str) -> Any:
    return CliRunner().invoke(
        application(["report", "verify"]), ["report", str(path), *args]
    )


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (KeyboardInterrupt(), 130),
        (RuntimeError("odd"), 2),
        (ZeroDivisionError(), 2),
        (OSError(28, "No space left on device"), 2),
        (BrokenPipeError(), 2),
    ],
)
def test_stopped_while_the_result_is_shown(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    status: int,
) -> None:
    asyncio.run(against(FakeServer(), tmp_path))
    file = tmp_path / "run.jsonl"
    assert report(file).exit_code == 0

    def fails(*_: Any, **__: Any) -> None:
        raise error

    for name in ("print_result", "write_files"):
        with monkeypatch.context() as patched:
            patched.setattr(reporting, name, fails)
            found = report(file, "--html", str(tmp_path / "x.html"))
        assert found.exit_code == status, (name, found.output)
        assert isinstance(found.exception, SystemExit)


def _asked(server: Any, count: int) -> Callable[[], bool]:
    return lambda: server.requests >= count


@pytest.mark.parametrize("stage", ["connect", "reference", "restart"])
def test_interrupt_at_every_stage(tmp_path: Path, stage: str) -> None:
    """Status 130, no traceback, and nothing that looks like a verdict."""

    async def hangs(_: str, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)

    async def go() -> tuple[int, str, str]:
        plain = FakeServer(speculative=False)
        flag = tmp_path / "flag"
        async with plain, FakeServer() as tested, HostileServer(hangs) as silent:
            url, ready = tested.url, _asked(plain, 3)
            if stage == "connect":
                url = silent.url
                ready = lambda: bool(silent.heads)  # noqa: E731
            elif stage == "reference":
                plain.step_s = 0.2
            else:
                ready = flag.exists
            return await call(
                *("verify", "--base-url", url, "--reference", plain.url),
                *("--arms", "restart", "--num-prompts", "8"),
                *("--max-new-tokens", "10"),
                *("--restart-command", f"touch {flag}; exec sleep 8 >&- 2>&-"),
                stop_when=ready,
                cwd=tmp_path,
            )

    code, out, err = asyncio.run(go())
    assert code == 130, (out, err)
    assert "Traceback" not in out + err
    assert "verified:" not in out
    if stage != "connect":
        assert list(tmp_path.glob("*.jsonl"))


def test_interrupt_of_a_recording(tmp_path: Path) -> None:
    async def go() -> tuple[int, str, str]:
        async with FakeServer(speculative=False, step_s=0.2) as plain:
            return await call(
                *("record", "--base-url", plain.url, *SMALL),
                *("--output-file", "plain.jsonl"),
                stop_when=_asked(plain, 2),
                cwd=tmp_path,
            )

    code, out, err = asyncio.run(go())
    assert (code, out) == (130, "")
    assert "Traceback" not in err


def test_restart_command_that_does_not_end(tmp_path: Path) -> None:
    """A server in the foreground: it is waited for no longer than was said."""
    after = "--arms restart --restart-timeout 0.5 --restart-command 'sleep 4 >&- 2>&-'"
    code, out, err = shell(tmp_path, after + " --json r.json")
    assert code == 2, (out, err)
    said = (tmp_path / "r.json").read_text()
    assert "the restart command did not end within 0.5 s" in said


@pytest.mark.parametrize("option", ["--request-timeout", "--reconnect-timeout"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_times_that_never_end(option: str, value: str) -> None:
    """0 would switch the limit off, and a hung server would hang the run."""
    args = ["verify", "--base-url", "http://127.0.0.1:9", option, value]
    found = CliRunner().invoke(application(["report", "verify"]), args)
    assert found.exit_code == 2
    assert "expected seconds above 0" in found.output
    plain = CliRunner().invoke(application(["report", "verify"]), [*args[:-1], "0.5"])
    assert "seconds above 0" not in plain.output


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--restart-command", f"serve --api-key {KEY}"], "serve --api-key ***"),
        (["--restart-command", f"X={KEY} serve"], "X=*** serve"),
        (["--restart-command", "s --admin-api-key=abcdef"], "s --admin-api-key=***"),
        (["--restart-command", "SGLANG_API_KEY=abcdef s"], "SGLANG_API_KEY=*** s"),
        (["--server=width=http://u:pass@h:1"], "--server=width=http://h:1"),
        (["--server", "width=http://u:pass@h:1/"], "width=http://h:1"),
        (["--base-url", "http://h:1/?api_key=abcdef"], "http://h:1"),
        (["--base-url", "http://u:pass@h:99999"], "***"),
    ],
)
def test_command_line_holds_no_secret(argv: list[str], shown: str) -> None:
    text = command_line(["x", "verify", *argv, "--api-key", KEY])
    assert shown in shlex.split(text)
    assert not any(word in text for word in (KEY, "abcdef", "pass"))


def test_key_of_the_environment_is_hidden_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(verify_out.KEY_VARIABLE, KEY)
    assert KEY not in command_line(["x", "verify", "--restart-command", f"s {KEY}"])
    # A key of a letter or two would blot out half of every word.
    monkeypatch.setenv(verify_out.KEY_VARIABLE, "e")
    assert command_line(["x", "verify", "--seed", "1"]) == "x verify --seed 1"


def test_address_that_is_none_is_redacted_whole() -> None:
    assert redact_url("http://u:p@h:99999") == "***"
    assert redact_url("http://[::1") == "***"
