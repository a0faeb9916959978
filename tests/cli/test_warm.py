# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact warm`: starts a server, waits until it is ready, says what is new."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_exact import caches, cli
from sglang_exact.cli import warm
from sglang_exact.client.process import free_port

SERVER = """
import http.server, sys
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
print("[2026-01-01 00:00:00] Capture draft verify CUDA graph begin. bs=1", flush=True)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


def _started(program: str, log: Path, timeout: float = 60.0) -> tuple[int, list[str]]:
    said: list[str] = []
    command = [sys.executable, "-c", program]
    status = asyncio.run(warm.started(command, free_port(), log, timeout, said.append))
    return status, said


def test_it_ends_once_the_server_is_ready(tmp_path: Path) -> None:
    status, said = _started(SERVER, tmp_path / "log")
    assert status == 0
    assert said


@pytest.mark.parametrize(
    ("program", "status"),
    [("raise SystemExit(3)", 3), ("raise SystemExit(0)", 1)],
)
def test_a_server_that_ends_is_no_warm_one(
    program: str, status: int, tmp_path: Path
) -> None:
    assert _started(program, tmp_path / "log")[0] == status


def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    assert _started("import time; time.sleep(99)", tmp_path / "log", 1.0)[0] == 1


def test_the_last_line_that_names_a_stage_counts() -> None:
    log = [
        "[2026-01-01 00:00:00 TP0] Load weight begin. avail mem=1 GB",
        "[2026-01-01 00:00:00] Capture draft verify CUDA graph begin. backend=full",
        "something else",
    ]
    assert warm.stage(log) == "Capture draft verify CUDA graph"
    assert warm.stage(log[:1]) == "Load weight"
    assert warm.stage([]) == "start"


def test_folders_are_those_that_the_variables_name(tmp_path: Path) -> None:
    found = caches.folders(
        {
            "SGLANG_CACHE_DIR": str(tmp_path / "host"),
            "TRITON_CACHE_DIR": str(tmp_path / "t"),
            "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "i"),
        }
    )
    assert found == {
        "Triton": tmp_path / "t",
        "DeepGEMM": tmp_path / "host" / "deep_gemm",
        "FlashInfer": tmp_path / ".cache" / "flashinfer",
        "torch.compile": tmp_path / "i",
    }


def test_a_start_with_empty_caches_says_so_once(tmp_path: Path) -> None:
    environ = {
        "SGLANG_CACHE_DIR": str(tmp_path / "host"),
        "TRITON_CACHE_DIR": str(tmp_path / "t"),
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
    }
    assert "Triton" in caches.notice(environ)
    for folder in caches.folders(environ).values():
        if tmp_path in folder.parents:
            folder.mkdir(parents=True)
            (folder / "kernel").write_bytes(b"x")
    assert caches.notice(environ) == ""


def test_a_refused_server_leaves_with_the_launchers_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(
        cli.application(["warm"]), ["--", "--exact-unknown", "--model-path", "x"]
    )
    assert found.exit_code == 3
    assert "unknown flag --exact-unknown" in found.output


def test_another_port_is_refused() -> None:
    found = CliRunner().invoke(cli.application(["warm"]), ["--", "--port", "30000"])
    assert found.exit_code == 2
    assert "--port" in found.output
