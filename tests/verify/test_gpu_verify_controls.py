# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_verify: the controls of its servers, and the server that shall not start.

No server is started.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from sglang_exact import settings  # noqa: E402
from sglang_exact.hooks import attention_verify, decode_attention  # noqa: E402
from sglang_exact.hooks.base import Unsupported  # noqa: E402
from tools.proof import options, verifier  # noqa: E402
from tools.proof import verifier_arms as verify_arms  # noqa: E402


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return verifier


def made(script: ModuleType, folder: Path) -> Any:
    """A rehearsal's run."""
    where = ["--state", str(folder / "state"), "--out", str(folder / "out")]
    run = script.Run(options.verifier([*where, "--rehearsal"]))
    run.prepare()
    return run


def test_controls_of_a_server(script: ModuleType, tmp_path: Path) -> None:
    """A control's variable reaches the server, and means something to the overlay."""
    run, arms = made(script, tmp_path), verify_arms.BY_NAME
    found = {name: run.server(arm).env for name, arm in arms.items()}
    off, problems = settings.read(found["deep-gemm-default"])
    assert off.deep_gemm_default and problems == []
    off, problems = settings.read(found["decode-attention-hook-off"])
    assert off.disabled_hooks == ("decode_attention",) and problems == []
    for name in ("plain", "dflash", "stock"):
        whole, _ = settings.read(found[name])
        assert not whole.deep_gemm_default and not whole.disabled_hooks


def test_the_refusal_is_what_the_hook_says(monkeypatch: pytest.MonkeyPatch) -> None:
    arm = verify_arms.BY_NAME["decode-attention-hook-off"]
    layer = SimpleNamespace(
        xai_temperature_len=0, sliding_window_size=None, k_scale=None, v_scale=None
    )
    backend = SimpleNamespace(page_size=1, topk=1)
    with pytest.raises(Unsupported) as refused:
        attention_verify._check_layer(backend, layer, True, 0.0, None, None)
    assert arm.refusal in str(refused.value)
    # Control: another reason of the same check, with the hook in force.
    monkeypatch.setattr(decode_attention, "is_own", lambda _: True)
    backend.page_size = 16
    with pytest.raises(Unsupported) as refused:
        attention_verify._check_layer(backend, layer, True, 0.0, None, None)
    assert arm.refusal not in str(refused.value)


def test_a_control_attests_nothing_for_the_matrix(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, told = made(script, tmp_path), {"sglang_exact": {"numerics": "bitwise"}}
    server = SimpleNamespace(started_in_s=1.0, url="", info=lambda: told)
    monkeypatch.setattr(run, "server", lambda _: contextlib.nullcontext(server))
    for name in ("deep-gemm-default", "gdn-hook-off", "stock"):
        run.one(verify_arms.BY_NAME[name], ())
        assert run.info == {}, name
    run.one(verify_arms.BY_NAME["dflash"], ())
    assert run.info == told["sglang_exact"]


@pytest.mark.parametrize(
    ("asks", "started"), [("", True), ("start", True), ("speculation", False)]
)
def test_a_refusal_is_asked_for_by_name(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asks: str,
    started: bool,
) -> None:
    """`--asks speculation` is no question to a server that shall not start."""
    words = ["--state", str(tmp_path / "s"), "--out", str(tmp_path / "o")]
    words += ["--rehearsal", "--arms", "decode-attention-hook-off", "--asks", asks]
    begun: list[str] = []
    monkeypatch.setattr(script.signal, "signal", lambda *_: None)
    monkeypatch.setattr(script.Run, "one", lambda _, arm, asks: begun.append(arm.name))
    assert script.main(options.verifier(words)) == 1, "no row: not good"
    assert begun == ["decode-attention-hook-off"] * started
