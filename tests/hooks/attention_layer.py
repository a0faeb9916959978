# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the host's RadixAttention, as the attention hooks read it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def attention_layer(heads: int, dim: int, **changes: Any) -> Any:
    """Full attention, bf16 KV cache; `changes` overrule single fields."""
    fields = {
        "layer_id": 0,
        "tp_q_head_num": heads,
        "qk_head_dim": dim,
        "v_head_dim": dim,
        "scaling": 0.5,
        "sliding_window_size": -1,
        "xai_temperature_len": -1,
        "k_scale": None,
        "v_scale": None,
    }
    return SimpleNamespace(**(fields | changes))
