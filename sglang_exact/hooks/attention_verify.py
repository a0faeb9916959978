# SPDX-License-Identifier: Apache-2.0
"""Verify attention as decode rows, one per draft position.

Why: the host verifies with its one-pass extend kernel
    (sglang/kernels/ops/attention/extend_attention.py:1172, 64-key tiles) and decodes
    with a split-KV kernel (decode_attention.py:530, 32-key tiles, a second stage
    that merges splits). The sums are taken in another order.
What: the kernel of `decode_attention` runs on bs * draft_tokens rows. Row (request r,
    position i) has the keys 0 .. prefix_r + i: those of the host's kv_indices, then
    the block's own write locations. Nothing is built per step, the host never waits.
Scope: target_verify on the target runner, linear chains, no sliding window, no
    sinks, page size 1. Everything else raises.
Retire when: the host verifies attention with decode arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_exact.hooks import decode_attention
from sglang_exact.hooks.base import Hook, refuse_unknown
from sglang_exact.hooks.gdn_verify import UnsupportedVerify

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_BACKEND = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
_HYBRID = (
    "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend"
)


def _is_chain(backend: Any) -> bool:
    """Whether drafts are linear, so that a mask can only be the causal one."""
    return bool(backend.topk <= 1)


def verify_rows(
    original_fn: Callable[..., Any],
    self: Any,
    q: torch.Tensor,
    o: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    causal: bool,
    logits_soft_cap: float,
    sinks: torch.Tensor | None,
    score_mod: Any = None,
    aux_tensors: Any = None,
    **unknown: object,
) -> torch.Tensor:
    """Around _forward_extend_unified: target_verify runs the decode kernel.

    q, o: [num_rows, heads * head_dim], one row per draft position.
    """
    refuse_unknown("TritonAttnBackend._forward_extend_unified", unknown)
    if self.is_draft_runner or not forward_batch.forward_mode.is_target_verify():
        result: torch.Tensor = original_fn(
            self,
            q,
            o,
            layer,
            forward_batch,
            causal,
            logits_soft_cap,
            sinks,
            score_mod=score_mod,
            aux_tensors=aux_tensors,
        )
        return result
    _check_layer(self, layer, causal, logits_soft_cap, sinks, score_mod)
    heads, pool = layer.tp_q_head_num, self.token_to_kv_pool
    metadata = self.forward_metadata
    num_rows = forward_batch.batch_size * metadata.max_extend_len
    decode_attention.attend(
        self,
        (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)),
        q.view(-1, heads, layer.qk_head_dim),
        o.view(-1, heads, layer.v_head_dim),
        part_acc=None,
        kv_indptr=metadata.kv_indptr[: forward_batch.batch_size + 1],
        kv_indices=metadata.kv_indices,
        sm_scale=layer.scaling,
        num_draft_tokens=metadata.max_extend_len,
        out_cache_loc=forward_batch.out_cache_loc[:num_rows],
    )
    return o


def _check_layer(
    backend: Any,
    layer: Any,
    causal: bool,
    logits_soft_cap: float,
    sinks: Any,
    score_mod: Any,
) -> None:
    found = []
    if not decode_attention.is_own(backend):
        found.append("the host's decode kernel, expected the hook decode_attention")
    if logits_soft_cap > 0 or layer.xai_temperature_len > 0:
        found.append("a soft cap or a temperature by length, expected neither")
    if not causal:
        found.append("a bidirectional layer, expected a causal one")
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        found.append("a sliding window, expected full attention")
    if sinks is not None or score_mod is not None:
        found.append("attention sinks or a score_mod, expected neither")
    if layer.k_scale is not None or layer.v_scale is not None:
        found.append("a scaled KV cache, expected bf16")
    if backend.page_size != 1:
        found.append(f"page size {backend.page_size}, expected 1")
    if not _is_chain(backend):
        found.append(f"topk {backend.topk}, expected 1 (a linear chain)")
    if found:
        raise UnsupportedVerify(
            "verify attention cannot have decode's bits: " + "; ".join(found)
        )


HOOK = Hook(
    name="attention_verify",
    target=f"{_BACKEND}._forward_extend_unified",
    kind="AROUND",
    replacement=verify_rows,
    relies_on=(
        f"{_BACKEND}.forward_extend",
        f"{_BACKEND}.init_forward_metadata",
        f"{_HYBRID}.init_forward_metadata",
        f"{_HYBRID}.init_forward_metadata_in_graph",
    ),
    speculative=True,
)
