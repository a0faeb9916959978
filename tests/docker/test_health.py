# SPDX-License-Identifier: Apache-2.0
"""The health check: green for 200 and for nothing else, whatever the proxies."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docker" / "health.py"


@contextmanager
def answering(status: int) -> Iterator[int]:
    """A server that answers /health with this status; its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(port: int) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={
            **os.environ,
            "HEALTH_PORT": str(port),
            "http_proxy": "http://127.0.0.1:9",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(("answer", "status"), [(200, 0), (503, 1), (401, 1), (204, 1)])
def test_status(answer: int, status: int) -> None:
    with answering(answer) as port:
        found, text = ask(port)
    assert found == status
    assert "Traceback" not in text


def test_nobody_listens() -> None:
    with answering(200) as port:
        pass
    found, text = ask(port)
    assert found == 1
    assert f"http://127.0.0.1:{port}/health" in text
    assert "Traceback" not in text
