# SPDX-License-Identifier: Apache-2.0
"""The overlay adds no endpoint, changes no endpoint's key, and opens no port."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import warm

from sglang_exact.rehearsal.environment import environment

pytestmark = pytest.mark.host

KEY = "only-for-this-test"

# The host's application as its server process builds it, with or without the overlay.
PROBE = """
import json, sys
from sglang.srt import plugins

def run_server():
    plugins.load_plugins()

run_server()
from sglang.srt.entrypoints import http_server
from sglang.srt.utils.auth import AuthLevel

if sys.argv[1:] == ["spoil"]:
    @http_server.app.get("/of_ours")
    def of_ours():
        return {}

def every(routes, prefix=""):
    for route in routes:
        router = getattr(route, "original_router", None) or route
        below = getattr(router, "routes", None)
        if below:
            context = getattr(route, "include_context", None)
            more = getattr(context, "prefix", "") or getattr(route, "path", "")
            yield from every(below, prefix + more)
        else:
            yield prefix + route.path, route

routes = []
for path, route in every(http_server.app.routes):
    endpoint = getattr(route, "endpoint", None)
    routes.append([
        path,
        sorted(getattr(route, "methods", None) or []),
        f"{getattr(endpoint, '__module__', '')}.{getattr(endpoint, '__name__', '')}",
        getattr(endpoint, "_auth_level", AuthLevel.NORMAL).name,
    ])
from sglang_exact.hooks import registered
print(json.dumps({
    "routes": sorted(routes),
    "middleware": [m.cls.__name__ for m in http_server.app.user_middleware],
    "role": registered.roles(),
}))
"""


def application(*words: str, **variables: str) -> dict[str, Any]:
    """Routes and middleware in a process of its own."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    env = {**environment(base), **variables}
    done = warm.run(["-W", "ignore", "-c", PROBE, *words], env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_same_endpoints_with_and_without_the_overlay() -> None:
    without, added = application(), application(SGLANG_EXACT_ENABLE="1")
    assert without["role"] == []
    assert added["role"] != []
    assert len(without["routes"]) > 50
    assert added["routes"] == without["routes"]
    assert added["middleware"] == without["middleware"]
    spoilt = application("spoil")["routes"]
    assert [route[0] for route in spoilt if route not in without["routes"]] == [
        "/of_ours"
    ]


def status(url: str, key: str = "") -> int:
    """Status of a GET."""
    request = urllib.request.Request(url)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def listening(folder: Path) -> list[tuple[str, int]]:
    """Addresses on which processes with this folder in their command line listen."""
    psutil = pytest.importorskip("psutil")
    roots = [
        p
        for p in psutil.process_iter()
        if p.pid != os.getpid() and str(folder) in " ".join(_command(p))
    ]
    family = {p.pid: p for root in roots for p in [root, *root.children(True)]}
    return sorted(
        {
            (c.laddr.ip, c.laddr.port)
            for process in family.values()
            for c in process.net_connections("inet")
            if c.status == psutil.CONN_LISTEN
        }
    )


def _command(process: Any) -> list[str]:
    import psutil

    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


@pytest.mark.e2e
@pytest.mark.slow
def test_ports_and_keys_of_a_server(tiny_models: Path, tmp_path: Path) -> None:
    """The overlay listens where the host alone does; its facts need the key.

    Both have a key. The host leaves /health and /metrics open to everybody.
    """
    from sglang_exact.rehearsal.server import Server

    found = {}
    for mode in ("stock", "exact"):
        model = tmp_path / mode
        model.symlink_to(tiny_models / "target")
        with Server(model, mode=mode, flags=["--api-key", KEY]) as server:
            ports = listening(model)
            found[mode] = [
                (ip, "http" if port == server.port else "other") for ip, port in ports
            ]
            for path in ("/server_info", "/get_server_info", "/v1/models"):
                assert status(server.url + path) == 401, path
            assert status(f"{server.url}/server_info", KEY) == 200
            assert status(f"{server.url}/server_info", f"{KEY}x") == 401
            info = json.loads(
                urllib.request.urlopen(
                    urllib.request.Request(
                        f"{server.url}/server_info",
                        headers={"Authorization": f"Bearer {KEY}"},
                    ),
                    timeout=60,
                ).read()
            )
            assert KEY not in json.dumps(info.get("sglang_exact"))
            assert ("sglang_exact" in info) == (mode == "exact")
            assert KEY not in server.log_path.read_text(errors="replace")
    assert sorted(found["exact"]) == sorted(found["stock"])
    assert ("127.0.0.1", "http") in found["exact"]
