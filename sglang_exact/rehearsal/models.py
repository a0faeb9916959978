# SPDX-License-Identifier: Apache-2.0
"""Model folders for rehearsals: tiny hybrid targets, drafts, and full-width configs.

The tiny target has random weights written under the checkpoint's tensor names, the
same bytes for the same arguments. Drafts and full-width models are a config.json
alone and are loaded with `--load-format dummy` or
`--speculative-draft-load-format dummy`.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sglang_exact import schemes
from sglang_exact.rehearsal.dense import DENSE, dense_config, dense_shapes
from sglang_exact.rehearsal.drafters import (
    DRAFT_KINDS,
    OF_TARGET,
    Config,
    drafter,
)

Shapes = Iterator[tuple[str, tuple[int, ...]]]
"""Name in the checkpoint and shape of each tensor."""

EOS_TOKEN_ID = 2
MASK_TOKEN_ID = 0
FULL_ATTENTION_INTERVAL = 4
"""Every fourth layer is attention, the others are gated delta nets (Qwen3.5)."""

_TINY: Config = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
}

# Shapes of the 27B text model of the Qwen3.5 family.
_27B: Config = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "head_dim": 256,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "max_position_embeddings": 262144,
    "bos_token_id": None,
    "eos_token_id": 248044,
}
_27B_VOCAB = 248320
_27B_MASK_TOKEN_ID = 248070


def make_target(
    path: str | Path,
    layers: int = 4,
    *,
    vocab_size: int = 512,
    seed: int = 0,
    family: str = "qwen3_5",
) -> Path:
    """Write a tiny random target: config.json and model.safetensors.

    Args:
        path: folder, made if absent.
        layers: decoder layers; every fourth of a hybrid is attention.
        vocab_size: tokens; ids 0, 1, 2 are mask, bos and eos.
        seed: of the weights. The same arguments give the same bytes.
        family: one of `TARGETS`.

    Returns:
        `path`.
    """
    import torch
    from safetensors.torch import save_file

    from sglang_exact.rehearsal.interpreter import f32_to_bf16

    target = TARGETS[family]
    config = target.config(target.tiny, layers, vocab_size, 10000.0)
    folder = _write_config(path, config)
    tensors = {}
    for name, values in _tiny_weights(target.shapes(config), seed, target.norm):
        bits = torch.from_numpy(f32_to_bf16(values).copy())
        tensors[name] = bits.view(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_draft(
    path: str | Path,
    kind: str,
    *,
    target_layers: int = 4,
    vocab_size: int = 512,
    block_size: int = 4,
) -> Path:
    """Write the config of a tiny draft for `make_target`; weights are loaded as dummy.

    Args:
        path: folder, made if absent.
        kind: one of `DRAFT_KINDS`.
        target_layers, vocab_size: those of the target.
        block_size: tokens per verified block, drafts are one fewer.

    Raises:
        ValueError: unknown `kind`.
    """
    if drafter(kind).model == OF_TARGET:
        return _write_config(
            path, _hybrid_config(_TINY, target_layers, vocab_size, 10000.0)
        )
    base = {
        **{k: _TINY[k] for k in ("hidden_size", "intermediate_size", "head_dim")},
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
    }
    ids = [0, target_layers // 2]
    return _write_config(
        path,
        _draft_config(
            base, kind, target_layers, ids, vocab_size, block_size, MASK_TOKEN_ID
        ),
    )


def make_27b_target(
    path: str | Path,
    layers: int = 64,
    *,
    vocab_size: int = _27B_VOCAB,
    scheme: str = "",
) -> Path:
    """Write the config of a 27B-wide target with `layers` layers (64 is the model).

    `scheme` is one of `schemes.SCHEMES`, whose weights are quantised on the spot; the
    gates' projections are not, as in the official checkpoints.
    """
    config = _hybrid_config(_27B, layers, vocab_size, 10000000.0)
    if scheme:
        gates = ("in_proj_a", "in_proj_b", "in_proj_ba")
        config["quantization_config"] = {
            **schemes.BY_NAME[scheme].config,
            schemes.BY_NAME[scheme].kept: ["lm_head"]
            + [
                f"model.layers.{layer}.linear_attn.{gate}"
                for layer in range(layers)
                for gate in gates
            ],
        }
    return _write_config(path, config)


def make_27b_draft(
    path: str | Path,
    kind: str = "dflash",
    target_layers: int = 64,
    *,
    layers: int = 5,
    block_size: int = 8,
    vocab_size: int = _27B_VOCAB,
) -> Path:
    """Write the config of a draft for `make_27b_target(path, target_layers)`.

    Raises:
        ValueError: unknown `kind`.
    """
    if drafter(kind).model == OF_TARGET:
        return make_27b_target(path, target_layers, vocab_size=vocab_size)
    base = {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": layers,
        "max_position_embeddings": 262144,
        "rope_theta": 10000000,
    }
    ids = _spread_layer_ids(layers, target_layers)
    return _write_config(
        path,
        _draft_config(
            base, kind, target_layers, ids, vocab_size, block_size, _27B_MASK_TOKEN_ID
        ),
    )


def make_wide_target(path: str | Path, layers: int, *, family: str) -> Path:
    """Write the config of a full-width target of an attention-only family.

    Raises:
        ValueError: the family has no such sizes.
    """
    config = _wide(family)
    return _write_config(
        path,
        TARGETS[family].config(
            config, layers, config["vocab_size"], config["rope_theta"]
        ),
    )


def make_wide_draft(
    path: str | Path,
    kind: str,
    target_layers: int,
    *,
    family: str,
    layers: int = 5,
    block_size: int = 8,
) -> Path:
    """Write the config of a draft for `make_wide_target`; its sizes are the target's.

    Raises:
        ValueError: unknown `kind`, or the family has no such sizes.
    """
    config = _wide(family)
    names = (
        "hidden_size",
        "intermediate_size",
        "head_dim",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rope_theta",
    )
    base = {name: config[name] for name in names} | {"num_hidden_layers": layers}
    vocab = config["vocab_size"]
    ids = _spread_layer_ids(layers, target_layers)
    return _write_config(
        path,
        _draft_config(base, kind, target_layers, ids, vocab, block_size, vocab - 1),
    )


def _wide(family: str) -> Config:
    config = TARGETS[family].wide
    if not config:
        known = [name for name, target in TARGETS.items() if target.wide]
        raise ValueError(f"found family {family!r}, expected one of {', '.join(known)}")
    return config


def _spread_layer_ids(count: int, target_layers: int) -> list[int]:
    """At most `count` target layers, evenly spread, whose output the draft reads."""
    count = min(count, target_layers - 1)
    if count == 1:
        return [0]
    return sorted({round(i * (target_layers - 2) / (count - 1)) for i in range(count)})


def _hybrid_config(
    shape: Config, layers: int, vocab_size: int, rope_theta: float
) -> Config:
    kinds = [
        "full_attention" if (i + 1) % FULL_ATTENTION_INTERVAL == 0 else
        "linear_attention"
        for i in range(layers)
    ]  # fmt: skip
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **shape,
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "full_attention_interval": FULL_ATTENTION_INTERVAL,
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "partial_rotary_factor": 0.25,
            "rope_theta": rope_theta,
            "rope_type": "default",
        },
        "initializer_range": 0.02,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
    }


def _draft_config(
    base: Config,
    kind: str,
    target_layers: int,
    layer_ids: list[int],
    vocab_size: int,
    block_size: int,
    mask_token_id: int,
) -> Config:
    if kind not in DRAFT_KINDS:
        raise ValueError(
            f"found draft kind {kind!r}, expected one of {', '.join(DRAFT_KINDS)}"
        )
    layers = base["num_hidden_layers"]
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **base,
        "layer_types": ["full_attention"] * layers,
        "num_target_layers": target_layers,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "dflash_config": {
            "mask_token_id": mask_token_id,
            "target_layer_ids": layer_ids,
        },
    }
    return config | drafter(kind).config(config, block_size)


def _write_config(path: str | Path, config: Config) -> Path:
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="ascii")
    return folder


def _tiny_weights(shapes: Shapes, seed: int, norm: float) -> Iterator[tuple[str, Any]]:
    """(checkpoint name, float32 values) of every tensor of the tiny target."""
    import numpy as np

    for name, shape in shapes:
        # RandomState's streams are frozen; Generator's may change with numpy.
        rng = np.random.RandomState(zlib.crc32(f"{seed}:{name}".encode()))
        if name.endswith("A_log"):
            values = np.log(rng.uniform(1.0, 16.0, shape))
        elif name.endswith("dt_bias"):
            values = rng.uniform(-4.0, 1.0, shape)
        elif name.endswith("linear_attn.norm.weight"):
            values = 1.0 + rng.uniform(-0.2, 0.2, shape)
        elif "norm" in name:
            values = norm + rng.uniform(-0.2, 0.2, shape)
        elif name.endswith(".bias"):
            values = rng.uniform(-0.5, 0.5, shape)
        elif "embed_tokens" in name:
            values = rng.standard_normal(shape)
        else:
            # Gain over 1/sqrt(fan-in): far from the regime in which one token wins
            # every time, and logits far enough apart that ties are rare.
            gain = 3.0 if name == "lm_head.weight" else 2.0
            values = rng.standard_normal(shape) * (gain / math.sqrt(shape[-1]))
        yield name, values.astype(np.float32)


def _hybrid_shapes(config: Config) -> Shapes:
    hidden, inner, vocab = (
        config[k] for k in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads, kv_heads, head = (
        config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    k_dim = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    v_heads = config["linear_num_value_heads"]
    v_dim = v_heads * config["linear_value_head_dim"]
    conv_dim = 2 * k_dim + v_dim
    yield "model.embed_tokens.weight", (vocab, hidden)
    for i, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{i}"
        if kind == "full_attention":
            attn = f"{layer}.self_attn"
            # Query and output gate share q_proj.
            yield f"{attn}.q_proj.weight", (2 * heads * head, hidden)
            yield f"{attn}.k_proj.weight", (kv_heads * head, hidden)
            yield f"{attn}.v_proj.weight", (kv_heads * head, hidden)
            yield f"{attn}.o_proj.weight", (hidden, heads * head)
            yield f"{attn}.q_norm.weight", (head,)
            yield f"{attn}.k_norm.weight", (head,)
        else:
            gdn = f"{layer}.linear_attn"
            yield f"{gdn}.A_log", (v_heads,)
            yield f"{gdn}.dt_bias", (v_heads,)
            yield (
                f"{gdn}.conv1d.weight",
                (conv_dim, 1, config["linear_conv_kernel_dim"]),
            )
            yield f"{gdn}.in_proj_qkv.weight", (conv_dim, hidden)
            yield f"{gdn}.in_proj_z.weight", (v_dim, hidden)
            yield f"{gdn}.in_proj_b.weight", (v_heads, hidden)
            yield f"{gdn}.in_proj_a.weight", (v_heads, hidden)
            yield f"{gdn}.norm.weight", (config["linear_value_head_dim"],)
            yield f"{gdn}.out_proj.weight", (hidden, v_dim)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


class Target(NamedTuple):
    """The tiny model of a family.

    Attributes:
        tiny: its sizes.
        config: config.json, from sizes, layers, tokens of the vocabulary, rope_theta.
        shapes: of its tensors, from that.
        norm: around which its norms' weights lie; 0.0 where they scale by 1 + weight.
        wide: its sizes on a GPU, {} where it has none.
    """

    tiny: Config
    config: Callable[[Config, int, int, float], Config]
    shapes: Callable[[Config], Shapes]
    norm: float = 0.0
    wide: Config = {}


TARGETS = {
    "qwen3_5": Target(_TINY, _hybrid_config, _hybrid_shapes),
    **{
        name: Target(sizes.tiny, dense_config, dense_shapes, 1.0, sizes.wide)
        for name, sizes in DENSE.items()
    },
}
"""One for each of `scope_families.FAMILIES`, by its name."""
