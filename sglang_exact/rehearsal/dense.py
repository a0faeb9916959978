# SPDX-License-Identifier: Apache-2.0
"""Attention-only models for rehearsals: sizes, config.json and tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from sglang_exact.rehearsal.drafters import Config


def dense_config(
    shape: Config, layers: int, vocab_size: int, rope_theta: float
) -> Config:
    """config.json; `shape` has what is the family's own."""
    return {
        **shape,
        "num_hidden_layers": layers,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rope_theta": rope_theta,
        "initializer_range": 0.02,
        "pad_token_id": None,
        "use_cache": True,
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
    }


def dense_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name in the checkpoint and shape of each tensor of such a config.json."""
    hidden, inner, vocab = (
        config[k] for k in ("hidden_size", "intermediate_size", "vocab_size")
    )
    head = config["head_dim"]
    rows = {
        "q": config["num_attention_heads"] * head,
        "k": config["num_key_value_heads"] * head,
        "v": config["num_key_value_heads"] * head,
    }
    kind = config["model_type"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        attn = f"{layer}.self_attn"
        for part, size in rows.items():
            yield f"{attn}.{part}_proj.weight", (size, hidden)
            if kind == "qwen2" or config.get("attention_bias"):
                yield f"{attn}.{part}_proj.bias", (size,)
        yield f"{attn}.o_proj.weight", (hidden, rows["q"])
        if config.get("attention_bias"):
            yield f"{attn}.o_proj.bias", (hidden,)
        if kind == "qwen3":
            yield f"{attn}.q_norm.weight", (head,)
            yield f"{attn}.k_norm.weight", (head,)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


class Sizes(NamedTuple):
    """What a family's config.json says: of its tiny model, and on a GPU ({}: none)."""

    tiny: Config
    wide: Config


_TINY: Config = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _sizes(kind: str, tiny: Config, wide: Config, **own: Any) -> Sizes:
    """`own` holds for both models; what the sizes say as well wins."""
    base = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        **own,
    }
    return Sizes(base | _TINY | tiny, base | wide if wide else {})


_LLAMA3_ROPE: Config = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Shapes of Qwen3-8B and of Llama-3.1-8B.
_QWEN3_8B: Config = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_LLAMA_8B: Config = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "rope_scaling": _LLAMA3_ROPE,
}

DENSE = {
    "qwen3": _sizes(
        "qwen3",
        {"tie_word_embeddings": True},
        _QWEN3_8B,
        attention_bias=False,
        use_sliding_window=False,
        sliding_window=None,
    ),
    "llama": _sizes(
        "llama",
        {
            "attention_bias": True,
            "rope_scaling": {**_LLAMA3_ROPE, "original_max_position_embeddings": 64},
        },
        _LLAMA_8B,
        attention_bias=False,
        mlp_bias=False,
    ),
    "qwen2": _sizes(
        "qwen2",
        {
            # The host's class takes no other than hidden_size over heads.
            "head_dim": 16,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
        },
        {},
        use_sliding_window=False,
        sliding_window=None,
    ),
    "mistral": _sizes(
        "mistral",
        {"num_attention_heads": 6, "head_dim": 48},
        {},
        sliding_window=None,
    ),
}
"""Sizes by the name of the family."""
