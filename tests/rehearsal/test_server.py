# SPDX-License-Identifier: Apache-2.0
"""The server harness without a server: command lines, answers, failures."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sglang_exact.client import blocking as client
from sglang_exact.client.bits import float32_bits
from sglang_exact.rehearsal import launch_server, server


def test_float32_bits_keep_every_bit() -> None:
    values = np.random.RandomState(0).standard_normal(1000).astype(np.float32)
    bits = [float32_bits(float(v)) for v in values]
    assert bits == values.view(np.uint32).tolist()
    assert float32_bits(0.0) != float32_bits(-0.0)


def _answer(**meta: object) -> dict[str, object]:
    base = {"completion_tokens": 6, "finish_reason": {"type": "length"}}
    return {"output_ids": [1, 2], "meta_info": {**base, **meta}}


def test_completion_of_a_speculative_answer() -> None:
    logprobs = [[-0.5, 1, None], [-1.0, 2, None]]
    completion = client.completion_of(
        _answer(spec_verify_ct=2, output_token_logprobs=logprobs)
    )
    assert completion.ids == (1, 2)
    assert completion.logprobs == (float32_bits(-0.5), float32_bits(-1.0))
    assert completion.acceptance_length == 3.0


@pytest.mark.parametrize("value", [None, float("nan"), float("-inf")])
def test_a_logprob_that_is_not_finite_is_no_answer(value: float | None) -> None:
    """Two of them would be equal without proving anything."""
    logprobs = [[-0.5, 1, None], [value, 2, None]]
    with pytest.raises(RuntimeError, match="not finite at token 1"):
        client.completion_of(_answer(output_token_logprobs=logprobs))


def test_completion_of_a_plain_answer() -> None:
    completion = client.completion_of(_answer())
    assert completion.logprobs == ()
    assert completion.spec_verify_ct == 0
    assert completion.acceptance_length is None


def test_modes_and_flags() -> None:
    exact = server.Server("m", mode="exact", flags=["--tp-size", "1"]).command()
    assert "sglang_exact.launch_server" in exact
    assert exact[-2:] == ["--tp-size", "1"]
    stock = server.Server("m", mode="stock").command()
    assert "sglang.launch_server" in stock
    assert "--enable-deterministic-inference" in stock
    plugin = server.Server("m", mode="plugin", env={"HF_HUB_OFFLINE": None})
    assert "--enable-deterministic-inference" not in plugin.command()
    assert plugin.environment()["SGLANG_EXACT_ENABLE"] == "1"
    assert "HF_HUB_OFFLINE" not in plugin.environment()
    cuda = server.Server("m", mode="stock", device="cuda")
    assert "--device" not in cuda.command()


@pytest.mark.parametrize("bad", [{"mode": "fast"}, {"device": "tpu"}])
def test_unknown_choices_are_refused(bad: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="expected"):
        server.Server("m", **bad)


def test_unknown_draft_is_refused() -> None:
    with pytest.raises(ValueError, match="found draft kind 'medusa'"):
        server.draft_flags("medusa", None)


def test_a_server_that_ends_shows_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = server.Server(tmp_path, mode="stock", log=tmp_path / "log")
    ends = [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"]
    monkeypatch.setattr(subject, "command", lambda: ends)
    with pytest.raises(RuntimeError, match=r"status 3(.|\n)*the reason"):
        subject.start()
    with pytest.raises(RuntimeError, match="found no running server"):
        _ = subject.client


def test_a_server_that_never_gets_ready_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = server.Server(tmp_path, mode="stock", start_timeout_s=1.0)
    monkeypatch.setattr(
        subject,
        "command",
        lambda: [sys.executable, "-c", "import time; time.sleep(60)"],
    )
    with pytest.raises(RuntimeError, match="not ready after 1 s"):
        subject.start()
    subject.stop()


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_killed_starter_leaves_no_server_behind(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    grandchild = "import time; time.sleep(120)"
    child = (
        "import os, subprocess, sys, time;"
        f"p = subprocess.Popen([sys.executable, '-c', {grandchild!r}]);"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{p.pid}} ');"
        "time.sleep(120)"
    )
    starter = (
        "import sys\n"
        "from sglang_exact.rehearsal import server\n"
        "s = server.Server('m', mode='stock', start_timeout_s=100)\n"
        f"s.command = lambda: [sys.executable, '-c', {child!r}]\n"
        "s.start()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", starter])
    deadline = time.monotonic() + 30
    while not (pids.exists() and pids.read_text().endswith(" ")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = [int(pid) for pid in pids.read_text().split()]
    assert all(_is_alive(pid) for pid in started)
    process.kill()
    process.wait()
    while any(_is_alive(pid) for pid in started):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_launcher_fills_in_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(launch_server, "default_folder", lambda: tmp_path)
    line = launch_server.command(["--stock", "--draft", "dflash", "--port", "1234"])
    assert "sglang.launch_server" in line
    assert line[-2:] == ["--port", "1234"]
    assert (tmp_path / "target" / "model.safetensors").exists()
    assert str(tmp_path / "dflash") in line
    given = launch_server.command(["--model-path", "mine"])
    assert given[given.index("--model-path") + 1] == "mine"
