# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints: which are served, where, and what of a layer is seen."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_exact import attestation, hooks, schemes, scope_model
from sglang_exact.host import compat
from sglang_exact.rehearsal import models
from sglang_exact.settings import Settings

OFFICIAL = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}


def config(**changes: Any) -> dict[str, Any]:
    return {"quantization_config": {**OFFICIAL, **changes}}


@pytest.mark.parametrize(
    "found",
    [
        config(),
        {"text_config": config()},
        {"text_config": {}, **config()},
        SimpleNamespace(text_config=None, **config()),
        SimpleNamespace(
            quantization_config=SimpleNamespace(to_dict=lambda: dict(OFFICIAL))
        ),
    ],
)
def test_block_fp8_is_found(found: Any) -> None:
    assert schemes.of(found) is schemes.BY_NAME["fp8-block"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight_block_size": [32, 32]}, "fp8, activation_scheme dynamic, fmt e4m3, "
         "weight_block_size [32, 32]"),
        ({"weight_block_size": None}, "fp8, activation_scheme dynamic, fmt e4m3, "
         "weight_block_size None"),
        ({"activation_scheme": "static"}, "fp8, activation_scheme static, fmt e4m3, "
         "weight_block_size [128, 128]"),
        ({"fmt": "e5m2"}, "fp8, activation_scheme dynamic, fmt e5m2, "
         "weight_block_size [128, 128]"),
        ({"scale_fmt": "ue8m0"}, "fp8, activation_scheme dynamic, fmt e4m3, "
         "scale_fmt ue8m0, weight_block_size [128, 128]"),
        ({"kv_cache_quant_algo": "FP8"}, "fp8, activation_scheme dynamic, fmt e4m3, "
         "kv_cache_quant_algo FP8, weight_block_size [128, 128]"),
        ({"quant_method": "mxfp8"}, "mxfp8, activation_scheme dynamic, fmt e4m3, "
         "weight_block_size [128, 128]"),
    ],
)  # fmt: skip
def test_every_other_one_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    found = {**served(), **config(**changes)}
    assert schemes.of(found) is None
    (reason,) = scope_model.model_reasons(found, "bfloat16")
    assert reason.found == f"a quantized checkpoint ({said})"
    assert "block FP8 (quant_method fp8" in reason.expected


def served() -> dict[str, Any]:
    return {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}


def test_what_is_made_is_served(tmp_path: Path) -> None:
    for name in schemes.BY_NAME:
        folder = models.make_27b_target(tmp_path / name, 4, scheme=name)
        found = json.loads((folder / "config.json").read_text())
        assert schemes.of(found) is schemes.BY_NAME[name]
        assert scope_model.model_reasons(found, "bfloat16") == []
        kept = found["quantization_config"][schemes.BY_NAME[name].kept]
        assert "model.layers.3.linear_attn.in_proj_a" in kept


INT8 = {"quant_method": "w8a8_int8", "ignore": ["lm_head"]}


@pytest.mark.parametrize(
    ("changes", "served"),
    [
        ({}, True),
        ({"is_dynamic": True}, True),
        ({"is_dynamic": False}, False),
        ({"quant_method": "compressed-tensors"}, False),
        ({"weight_block_size": [128, 128]}, False),
    ],
)
def test_int8_is_found(changes: dict[str, Any], served: bool) -> None:
    found = schemes.find({**INT8, **changes})
    assert found is (schemes.BY_NAME["int8-w8a8"] if served else None)


@pytest.mark.parametrize(
    ("capability", "said"),
    [((9, 0), None), (None, None), ((12, 0), "block FP8 on sm120")],
)
def test_where_its_kernels_were_compared(
    capability: tuple[int, int] | None, said: str | None
) -> None:
    found = scope_model.capability_reasons(config(), capability)
    assert [reason.found for reason in found] == ([said] if said else [])
    assert scope_model.capability_reasons({}, (12, 0)) == []


def deepgemm_w8a8_block_fp8_linear_with_fallback() -> None:
    """Stands in for the host's."""


class Fp8LinearMethod:
    """Stands in for the host's: what is looked at."""

    use_marlin = block_fp8_as_mxfp8 = False
    w8a8_block_fp8_linear = staticmethod(deepgemm_w8a8_block_fp8_linear_with_fallback)


def built(**changes: Any) -> Any:
    torch = pytest.importorskip("torch")

    def module(folder: str, kind: str) -> Any:
        return type(kind, (torch.nn.Module,), {"__module__": folder})()

    def frozen(tensor: Any) -> Any:
        return torch.nn.Parameter(tensor, requires_grad=False)

    top = module("sglang.srt.models.qwen3_5_text", "Qwen3_5ForCausalLM")
    top.layer = layer = module("sglang.srt.layers.linear", "RowParallelLinear")
    layer.quant_method = Fp8LinearMethod()
    shape = changes.pop("shape", (64, 128))
    layer.weight = frozen(torch.zeros(shape).to(torch.float8_e4m3fn))
    kind = changes.pop("scales", torch.float32)
    layer.weight_scale_inv = frozen(torch.zeros(1, 1).to(kind))
    for name, value in changes.items():
        setattr(layer.quant_method, name, value)
    return top


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"use_marlin": True}, "block FP8 layers on Marlin"),
        ({"w8a8_block_fp8_linear": print}, "block FP8 layers on print"),
        ({"block_fp8_as_mxfp8": True}, "block FP8 layers on deepgemm_w8a8"),
        ({"shape": (48, 128)}, "a block FP8 layer of N = 48, K = 128"),
        ({"shape": (64, 96)}, "a block FP8 layer of N = 64, K = 96"),
    ],
)
def test_the_layers_as_built(changes: dict[str, Any], said: str | None) -> None:
    torch = pytest.importorskip("torch")
    scheme = schemes.BY_NAME["fp8-block"]
    found = scope_model.live_reasons(built(**changes), torch.bfloat16, scheme)
    assert len(found) == (said is not None)
    assert all(reason.found.startswith(said or "") for reason in found)
    # Without the scheme, FP8 layers are as strange as ever.
    assert len(scope_model.live_reasons(built(), torch.bfloat16)) == 2


class W8A8Int8LinearMethod:
    """Stands in for the host's."""


def built_int8(
    n: int = 48, k: int = 64, scales: int = 48, kind: str = "float32", row: bool = False
) -> Any:
    torch = pytest.importorskip("torch")
    top = built()
    top.layer.quant_method = W8A8Int8LinearMethod()
    del top.layer.weight_scale_inv
    weight = torch.zeros(n, k, dtype=torch.int8).t()
    held = {
        "weight": weight.contiguous() if row else weight,
        "weight_scale": torch.zeros(scales, 1, dtype=getattr(torch, kind)),
    }
    for name, tensor in held.items():
        setattr(top.layer, name, torch.nn.Parameter(tensor, requires_grad=False))
    return top


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"row": True}, "INT8 layers with other weights (torch.int8)"),
        ({"n": 44, "scales": 44}, "an INT8 layer of N = 44, K = 64"),
        ({"k": 40}, "an INT8 layer of N = 48, K = 40"),
        ({"scales": 1}, "1 INT8 scales of torch.float32 for 48 columns"),
        ({"kind": "bfloat16"}, "48 INT8 scales of torch.bfloat16"),
    ],
)
def test_the_int8_layers_as_built(changes: dict[str, Any], said: str | None) -> None:
    torch = pytest.importorskip("torch")
    scheme, model = schemes.BY_NAME["int8-w8a8"], built_int8(**changes)
    found = scope_model.live_reasons(model, torch.bfloat16, scheme)
    assert len(found) == (said is not None)
    assert all(reason.found.startswith(said or "") for reason in found)
    if not changes:
        assert scheme.shape(model.layer) == (48, 64)
    # Each scheme knows its own layers alone.
    other = schemes.BY_NAME["fp8-block"]
    assert len(scope_model.live_reasons(model, torch.bfloat16, other)) == 2


def test_scales_of_another_dtype_are_refused() -> None:
    torch = pytest.importorskip("torch")
    model = built(scales=torch.bfloat16)
    scheme = schemes.BY_NAME["fp8-block"]
    (reason,) = scope_model.live_reasons(model, torch.bfloat16, scheme)
    assert "block FP8 scales of torch.bfloat16" in reason.found


class Fp8KVCacheMethod:
    """Stands in for the host's."""


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_scales_of_a_cache_are_dropped_or_refused(scale: float) -> None:
    torch = pytest.importorskip("torch")
    scheme, model = schemes.BY_NAME["fp8-block"], built()
    folder = "sglang.srt.layers.radix_attention"
    attention = type("RadixAttention", (torch.nn.Module,), {"__module__": folder})()
    attention.quant_method = Fp8KVCacheMethod()
    attention.k_scale = torch.nn.Parameter(torch.tensor(scale), requires_grad=False)
    attention.v_scale = torch.nn.Parameter(torch.tensor(1.0), requires_grad=False)
    attention.k_scale_float, attention.v_scale_float = scale, 1.0
    model.attn = attention
    schemes.drop_unit_scales(model, None)
    assert attention.k_scale is not None
    schemes.drop_unit_scales(model, scheme)
    found = scope_model.live_reasons(model, torch.bfloat16, scheme)
    if scale == 1.0:
        assert attention.k_scale is None and attention.v_scale is None
        assert attention.quant_method is None and found == []
    else:
        (reason,) = found
        assert "scales of a quantized KV cache" in reason.found


@pytest.mark.parametrize("proved", [True, False])
def test_what_was_not_compared_is_attested_so(
    monkeypatch: pytest.MonkeyPatch, proved: bool
) -> None:
    for name in ("reasons", "loaded_reasons", "stack_reasons"):
        monkeypatch.setattr(compat, name, lambda *_: [])
    row = schemes.BY_NAME["fp8-block"]._replace(proved=proved)
    monkeypatch.setitem(schemes.BY_NAME, "fp8-block", row)
    decided = hooks.decide(Settings(enable=True), (hooks.SCHEDULER,))

    def attested(scheme: str | None) -> str:
        facts = {"device": "cuda:0", "scheme": scheme}
        return str(attestation.record(decided, facts, {})["numerics"])

    assert attested(None) == attestation.BITWISE
    expected = attestation.BITWISE if proved else attestation.UNVERIFIED
    assert attested("fp8-block") == expected
