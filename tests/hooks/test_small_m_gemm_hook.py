# SPDX-License-Identifier: Apache-2.0
"""Small-M hook: who gets a tile, what the self-test reports, what it refuses."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sglang_exact.hooks import small_m_gemm as hook  # noqa: E402
from sglang_exact.hooks.base import UnknownArgument, of  # noqa: E402
from sglang_exact.selftest import deep_gemm, small_m  # noqa: E402

N, K = 64, 128


def rows(a: Any, w: Any) -> Any:
    return (a.float() @ w.float().t()).bfloat16()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces both kernels by torch and notes who was asked."""
    from sglang_exact_kernels import small_m_gemm

    asked: list[str] = []

    def tile(a: Any, w: Any) -> Any:
        asked.append("tile")
        return rows(a, w)

    def reference(a: Any, w: Any) -> Any:
        asked.append("deep_gemm")
        return rows(a, w)

    monkeypatch.setattr(small_m_gemm, "small_m_gemm", tile)
    monkeypatch.setattr(deep_gemm, "rows", reference)
    monkeypatch.setattr(hook, "_enabled", hook.Enabled())
    return asked


def call(m: int, asked: list[str], **change: Any) -> Any:
    def original(a: Any, b: Any, out_dtype: Any, bias: Any = None) -> Any:
        asked.append("original")
        out = rows(a, b.t()).to(out_dtype)
        return out if bias is None else out + bias

    w = torch.randn(N, K).bfloat16()
    arguments = {
        "a": torch.randn(m, K).bfloat16(),
        "b": w.t(),
        "out_dtype": torch.bfloat16,
        "bias": None,
    }
    return hook.replacement(original, **{**arguments, **change})


def test_nothing_takes_a_tile_before_enable(calls: list[str]) -> None:
    call(1, calls)
    assert calls == ["original"]


@pytest.mark.parametrize(
    ("m", "who"), [(1, "tile"), (16, "tile"), (17, "original"), (0, "original")]
)
def test_limit_decides(calls: list[str], m: int, who: str) -> None:
    hook.enable([(N, K)], 16)
    assert call(m, calls).shape == (m, N)
    assert calls == [who]


@pytest.mark.parametrize(
    "change",
    [
        {"out_dtype": torch.float32},
        {"b": torch.randn(K, N).bfloat16()},
        {"a": torch.randn(2, K + 4).bfloat16()[:, 4:]},
    ],
)
def test_layouts_that_tiles_do_not_take_go_to_the_host(
    calls: list[str], change: dict[str, Any]
) -> None:
    hook.enable([(N, K)], 16)
    call(2, calls, **change)
    assert calls == ["original"]


def test_a_shape_that_was_not_compared_goes_to_the_host(calls: list[str]) -> None:
    hook.enable([(N, K + 16), (K, N)], 16)
    call(2, calls)
    assert calls == ["original"]


def test_bias_is_added_after_rounding_as_in_the_host(calls: list[str]) -> None:
    hook.enable([(N, K)], 16)
    torch.manual_seed(0)
    bias = torch.randn(N).bfloat16()
    torch.manual_seed(1)
    ours = call(3, calls, bias=bias)
    torch.manual_seed(1)
    hook.enable([], 0)
    theirs = call(3, calls, bias=bias)
    assert calls == ["tile", "original"]
    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def test_unknown_arguments_raise(calls: list[str]) -> None:
    with pytest.raises(UnknownArgument, match="alpha"):
        call(1, calls, alpha=2.0)


def test_a_draft_adds_its_shapes_to_the_targets(calls: list[str]) -> None:
    hook.enable([(N, K)], 16)
    hook.enable([(2 * N, K)], 16)
    assert hook._enabled.shapes == {(N, K), (2 * N, K)}
    hook.enable([(N, K)], 0)
    assert hook._enabled == hook.Enabled()


@pytest.mark.parametrize("limit", [-1, 65])
def test_enable_refuses_a_limit(calls: list[str], limit: int) -> None:
    with pytest.raises(ValueError, match="expected 0 to 64"):
        hook.enable([(N, K)], limit)
    assert hook._enabled == hook.Enabled()


def test_self_test_passes_and_covers_every_m(calls: list[str]) -> None:
    weights = {shape: torch.randn(shape).bfloat16() for shape in [(N, K), (32, 64)]}
    assert small_m.run(weights, torch.device("cpu"), limit=16) == []
    assert calls.count("tile") == 2 * len(small_m.TILE_M)
    assert calls.count("deep_gemm") == 2 * len(small_m.DEEP_GEMM_M)
    calls.clear()
    small_m.run(weights, torch.device("cpu"), limit=4)
    assert calls.count("tile") == 2 * 4


def test_self_test_uses_the_weight_in_use(calls: list[str]) -> None:
    bad = torch.full((N, K), float("nan")).bfloat16()
    found = small_m.run({(N, K): bad}, torch.device("cpu"), limit=16)
    assert found == []  # equal NaNs have equal bits


@pytest.mark.parametrize("who", ["tile", "deep_gemm"])
def test_negative_control_one_flipped_bit_is_a_reason(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    from sglang_exact_kernels import small_m_gemm

    def flipped(a: Any, w: Any) -> Any:
        out = rows(a, w)
        if a.shape[0] in (3, 17):
            out.view(torch.int16)[1, 5] ^= 1
        return out

    if who == "tile":
        monkeypatch.setattr(small_m_gemm, "small_m_gemm", flipped)
    else:
        monkeypatch.setattr(deep_gemm, "rows", flipped)
    weights = {(N, K): torch.randn(N, K).bfloat16()}
    (reason,) = small_m.run(weights, torch.device("cpu"), limit=16)
    assert "1 of" in reason.found
    assert ("tile, M = 3" if who == "tile" else "DeepGEMM, M = 17") in reason.found
    assert "SMALL_M_TRITON=0" in reason.fix


@pytest.mark.host
def test_parameters_are_the_hosts() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    module, _, name = of(hook)[0].target.rpartition(".")
    path = Path(spec.origin).parent.joinpath(*module.split(".")[1:])
    tree = ast.parse(path.with_suffix(".py").read_text())
    theirs = {x.name: x for x in tree.body if isinstance(x, ast.FunctionDef)}[name]
    ours = list(inspect.signature(hook.replacement).parameters)
    assert ours == ["original_fn", *(x.arg for x in theirs.args.args), "unknown"]
