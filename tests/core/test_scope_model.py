# SPDX-License-Identifier: Apache-2.0
"""What is supported of a model: its file, the host's view of it, its modules."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_exact import scope_model
from sglang_exact.rehearsal import models

FIELDS = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 512,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "head_dim": 256,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
}


def found(reasons: list[Any]) -> list[str]:
    return [reason.found for reason in reasons]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"architectures": None}, ["model architecture unknown"]),
        ({"architectures": ["Other"]}, ["model architecture Other"]),
        (
            {"model_type": "qwen3_5_moe_text", "num_experts": 4},
            ["a text model of type qwen3_5_moe_text"],
        ),
        # The host's default for dense models: experts that nobody builds.
        ({"num_experts": 512}, []),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            ["a quantized checkpoint (fp8)"],
        ),
        (
            {"compression_config": {"format": "int-quantized"}},
            ["a quantized checkpoint (compression_config in config.json)"],
        ),
        ({"vocab_size": 510}, ["a vocabulary of 510 tokens"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_type longrope"]),
        ({"rope_scaling": {"type": "su"}}, ["rope_type su"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, []),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, []),
        # A size without a switch is in force, as in Mistral's configuration.
        (
            {"sliding_window": 4096},
            ["sliding windows (sliding_window 4096) in config.json"],
        ),
        (
            {"sliding_window": 4096, "use_sliding_window": True},
            ["sliding windows (sliding_window 4096) in config.json"],
        ),
        ({"sliding_window": 4096, "use_sliding_window": False}, []),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            ["layers of type sliding_attention in config.json"],
        ),
        ({"layer_types": ["full_attention", "linear_attention"]}, []),
        (
            {"attn_logit_softcapping": 50.0},
            ["a soft cap of attention (attn_logit_softcapping) in config.json"],
        ),
        (
            {"final_logit_softcapping": 30.0},
            ["a soft cap of the logits (final_logit_softcapping) in config.json"],
        ),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [dict, SimpleNamespace])
def test_configuration(
    changes: dict[str, Any], said: list[str], nested: bool, shape: type
) -> None:
    """Of a text model and of one inside another, read from a file or by the host."""
    fields = {**FIELDS, **changes}
    if nested:
        top = {"architectures": fields["architectures"]}
        fields = {**top, "model_type": "qwen3_5", "text_config": shape(**fields)}
    assert found(scope_model.model_reasons(shape(**fields), "bfloat16")) == said


def test_dtype() -> None:
    config = SimpleNamespace(**FIELDS)
    assert scope_model.model_reasons(config, "torch.bfloat16") == []
    assert found(scope_model.model_reasons(config, "torch.float16")) == [
        "model dtype torch.float16"
    ]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "FP8"),
        ("hf_quant_config.json", {"quant_algo": "NVFP4"}, "NVFP4"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": None}}, None),
        ("hf_quant_config.json", [], None),
        ("quant_model_description.json", {}, "modelslim"),
        ("other.json", {"quant_algo": "FP8"}, None),
    ],
)
def test_files_beside_it(
    tmp_path: Path, name: str, content: object, said: str | None
) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    assert found(scope_model.file_reasons(str(tmp_path))) == (
        [f"a quantized checkpoint ({said})"] if said else []
    )


def setup(**changes: Any) -> tuple[Any, Any]:
    """The host's resolved arguments and ModelConfig, all as supported."""
    graphs = SimpleNamespace(
        prefill=SimpleNamespace(
            backend=changes.pop("prefill", "disabled"),
            bs=changes.pop("buckets", [4, 512]),
            max_context_size=changes.pop("max_context", None),
        ),
        decode=SimpleNamespace(backend=changes.pop("decode", "full")),
    )
    model = SimpleNamespace(
        hf_config=SimpleNamespace(**FIELDS),
        dtype="torch.bfloat16",
        quantization=changes.pop("quantization", None),
        context_len=changes.pop("context_len", 4096),
    )
    cfg = {
        "cuda_graph_config": graphs,
        "chunked_prefill_size": 8192,
        "max_prefill_tokens": 16384,
        "max_running_requests": None,
        "tp_size": 1,
        "speculative_algorithm": None,
        "disable_radix_cache": True,
    }
    return SimpleNamespace(**{**cfg, **changes}), model


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"decode": "disabled"}, None),
        ({"decode": "breakable"}, "decode graphs breakable"),
        ({"prefill": "full"}, "prefill graphs full"),
        ({"prefill": "breakable"}, None),
        ({"prefill": "breakable", "buckets": None}, None),
        ({"max_context": 4096}, None),
        ({"prefill": "breakable", "max_context": 4096}, "prefill graphs of contexts"),
        # As for a step: the last bucket that fits, and one row more.
        ({"prefill": "breakable", "buckets": [61680]}, None),
        ({"prefill": "breakable", "buckets": [61681]}, "prefill graphs of up to 61681"),
        ({"buckets": [61681]}, None),
        ({"quantization": "modelopt_fp8"}, "a quantized checkpoint (modelopt_fp8)"),
        ({"max_running_requests": 256}, None),
        ({"max_running_requests": 257}, "--max-running-requests 257"),
        ({"chunked_prefill_size": -1}, None),
        ({"chunked_prefill_size": 61680}, None),
        ({"chunked_prefill_size": 61696}, "up to 61696 prompt tokens in a step"),
        (
            {"chunked_prefill_size": -1, "context_len": 262144},
            "up to 262144 prompt tokens in a step",
        ),
        (
            {"chunked_prefill_size": -1, "max_prefill_tokens": 300000},
            "up to 300000 prompt tokens in a step",
        ),
    ],
)
def test_what_the_host_made_of_it(changes: dict[str, Any], said: str | None) -> None:
    reasons = scope_model.resolved_reasons(*setup(**changes))
    assert len(reasons) == (said is not None)
    assert all(reason.found.startswith(said or "") for reason in reasons)


def test_a_quantized_checkpoint_is_named_once() -> None:
    cfg, model = setup(quantization="fp8")
    model.hf_config.quantization_config = {"quant_method": "fp8"}
    assert len(scope_model.resolved_reasons(cfg, model)) == 1


def test_where_32_bits_end() -> None:
    """By hand, for the 27B: 2 x 17408 columns of gate_up, 48 states of 128 x 128."""
    text = SimpleNamespace(**FIELDS)
    assert scope_model.step_limit(text, 1, 256) == (2**31 - 1) // 34816 == 61680
    narrow = SimpleNamespace(**{**FIELDS, "intermediate_size": 128})
    # The rows of in_proj_qkvz, 16384 wide, come before the states of the chunks.
    assert scope_model.step_limit(narrow, 1, 1) == (2**31 - 1) // 16384 == 131071
    states = (2**31 - 1) // (48 * 128 * 128) == 2730
    assert states and scope_model.step_limit(narrow, 1, 2000) == 730 * 64
    # Without head_dim, as in Qwen2's: 4096 / 32; q, gate, k and v of 32 heads each.
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32}
    assert scope_model.step_limit(sizes, 1, 1) == (2**31 - 1) // 16384


def test_decode_attention_takes_as_many_requests() -> None:
    kernel = pytest.importorskip("sglang_exact_kernels.decode_attention")
    assert kernel._MAX_BS == scope_model.MAX_REQUESTS


def test_softmax_depends_on_the_place_of_a_row() -> None:
    """Why the vocabulary counts: rows of 4 floats start where others start."""
    for vocabulary in (512, 510):
        starts = {row * vocabulary * 4 % 16 for row in range(8)}
        text = {"vocab_size": vocabulary}
        assert (scope_model._vocabulary_reasons(text) == []) is (starts == {0})


def test_sizes_of_the_models_that_are_made(tmp_path: Path) -> None:
    """The rehearsal's own targets are inside."""
    for make in (models.make_target, models.make_27b_target):
        folder = make(tmp_path / make.__name__)
        config = json.loads((folder / "config.json").read_text())
        assert scope_model.model_reasons(config, "bfloat16") == []


class Quantized:
    """A method that no dense bfloat16 layer has."""


def built(
    folder: str = "sglang.srt.layers.linear", kind: str = "RowParallelLinear"
) -> Any:
    torch = pytest.importorskip("torch")

    def module(folder: str, kind: str) -> Any:
        made = type(kind, (torch.nn.Module,), {"__module__": folder})()
        made.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
        return made

    top = module("sglang.srt.models.qwen3_5_text", "Qwen3_5ForCausalLM")
    top.layer = module(folder, kind)
    return top


def test_the_model_as_built() -> None:
    torch = pytest.importorskip("torch")
    assert scope_model.live_reasons(built(), torch.bfloat16) == []
    (cache,) = scope_model.live_reasons(built(), torch.float8_e4m3fn)
    assert cache.found == "a KV cache of torch.float8_e4m3fn"
    experts = built("sglang.srt.layers.moe.fused_moe_triton.layer", "FusedMoE")
    (reason,) = scope_model.live_reasons(experts, torch.bfloat16)
    assert "FusedMoE in the loaded model (first layer)" in reason.found
    quantized = built()
    quantized.layer.quant_method = Quantized()
    (reason,) = scope_model.live_reasons(quantized, torch.bfloat16)
    assert "layers of Quantized" in reason.found
    narrow = built()
    narrow.layer.weight = torch.nn.Parameter(
        torch.zeros(2, dtype=torch.float8_e4m3fn), requires_grad=False
    )
    (reason,) = scope_model.live_reasons(narrow, torch.bfloat16)
    assert "weights of torch.float8_e4m3fn" in reason.found
    # No request reaches a vision tower.
    seeing = built()
    seeing.visual = built("elsewhere", "Tower")
    assert scope_model.live_reasons(seeing, torch.bfloat16) == []
