# SPDX-License-Identifier: Apache-2.0
"""What the attention hooks have in common: the host's backends, and layers left out."""

from __future__ import annotations

from typing import Any

BACKEND = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
HYBRID = (
    "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend"
)


def layer_reasons(
    backend: Any,
    layer: Any,
    causal: bool,
    logits_soft_cap: float,
    sinks: Any,
    score_mod: Any,
) -> list[str]:
    """Why the overlay's kernels do not serve a layer, with what they expect."""
    window = layer.sliding_window_size
    found = {
        "a soft cap or a temperature by length, expected neither": (
            logits_soft_cap > 0 or layer.xai_temperature_len > 0
        ),
        "a bidirectional layer, expected a causal one": not causal,
        "a sliding window, expected full attention": window is not None and window > -1,
        "attention sinks or a score_mod, expected neither": (
            sinks is not None or score_mod is not None
        ),
        "a scaled KV cache, expected bf16": (
            layer.k_scale is not None or layer.v_scale is not None
        ),
        f"page size {backend.page_size}, expected 1": backend.page_size != 1,
    }
    return [reason for reason, is_found in found.items() if is_found]
