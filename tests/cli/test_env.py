# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact env` holds what a bug report needs, and no secret."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_exact import __version__
from sglang_exact.cli import env
from sglang_exact.client import machine
from sglang_exact.host import headers
from sglang_exact.host import source as host


def collected(**environ: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(env.collect(environ)))

    return found


def test_what_a_bug_report_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = machine.Gpu("NVIDIA H200", "580.1", (9, 0), "143771 MiB")
    monkeypatch.setattr(machine, "gpus", lambda: [gpu])
    monkeypatch.setattr(machine, "nvcc", lambda: "release 13.0")
    found = collected(SGLANG_PLUGINS="sglang_exact")
    assert found["sglang_exact"] == __version__
    assert len(found["digest"]) == 64
    assert Path(found["installation"]["folder"]).is_dir()
    assert set(found["packages"]) == {*env.PACKAGES, *host.STACK}
    assert found["plugins"].get("sglang_exact") == "sglang_exact.plugin:register"
    assert found["gpus"][0]["driver"] == "580.1"
    assert found["variables"] == {"SGLANG_PLUGINS": "sglang_exact"}
    assert found["settings_refused"] == []


def test_settings_that_are_refused_are_named() -> None:
    (reason,) = collected(SGLANG_EXACT_ENABEL="1")["settings_refused"]
    assert "SGLANG_EXACT_ENABEL" in reason


def test_variables_that_move_bits_are_shown_whatever_their_prefix() -> None:
    assert env.variables({"PTXAS_OPTIONS": "-O0", "HOME": "/x"}) == {
        "PTXAS_OPTIONS": "-O0"
    }


@pytest.mark.parametrize(
    "name",
    ["SGLANG_API_KEY", "HF_TOKEN", "SGLANG_PASSWORD", "NCCL_AUTH", "SGL_MY_SECRET_X"],
)
def test_credentials_are_left_out(name: str) -> None:
    assert env.variables({name: "value"}) == {}


def test_addresses_lose_user_and_password() -> None:
    shown = env.variables({"SGLANG_STORE": "s3://me:pw@host/x,http://you@other/y@z"})
    assert shown == {"SGLANG_STORE": "s3://host/x,http://other/y@z"}


def test_where_it_was_imported_from(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", nothing)
    assert env.installation()["installed"] is None


def test_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "find_install", lambda: None)
    assert env.headers() is None
    install = headers.Install("9.9", Path("/nowhere"))
    monkeypatch.setattr(headers, "find_install", lambda: install)
    shown = env.headers()
    assert shown is not None
    assert shown.startswith("9.9: found sgl-deep-gemm 9.9; expected one of 0.2.0")


def test_text_has_every_line_of_the_record() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sglang_exact", "env"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    keys = {line.split(":")[0] for line in done.stdout.splitlines()}
    assert set(collected()) <= keys
