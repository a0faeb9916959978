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
from sglang_exact.hooks.attention_layer import BACKEND, HYBRID, layer_reasons
from sglang_exact.hooks.base import Unsupported, hook, refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


@hook(
    f"{BACKEND}._forward_extend_unified",
    "AROUND",
    name="attention_verify",
    relies_on=(
        f"{BACKEND}.forward_extend",
        f"{BACKEND}.init_forward_metadata",
        f"{HYBRID}.init_forward_metadata",
        f"{HYBRID}.init_forward_metadata_in_graph",
    ),
)
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
        given = (q, o, layer, forward_batch, causal, logits_soft_cap, sinks)
        more = {"score_mod": score_mod, "aux_tensors": aux_tensors}
        result: torch.Tensor = original_fn(self, *given, **more)
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


def _check_layer(backend: Any, layer: Any, *call: Any) -> None:
    """Raise Unsupported with every reason; `call`: what `layer_reasons` takes."""
    found = []
    if not decode_attention.is_own(backend):
        found.append("the host's decode kernel, expected the hook decode_attention")
    found += layer_reasons(backend, layer, *call)
    # Linear drafts alone: their mask can only be the causal one.
    if backend.topk > 1:
        found.append(f"topk {backend.topk}, expected 1 (a linear chain)")
    if found:
        raise Unsupported(
            "verify attention cannot have decode's bits: " + "; ".join(found)
        )
