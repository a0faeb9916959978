# SPDX-License-Identifier: Apache-2.0
"""Prefill attention by the overlay's kernel: the same bits wherever a prompt is cut.

Why: the host's deterministic prefill kernel gives every query head its own pass over
    the keys in unpipelined 64-row tiles, walks tiles that no row of the program sees,
    and copies the request's slots together in every layer
    (sglang/kernels/ops/attention/extend_attention.py:1172, 326). At 128k that is most
    of the time to the first token.
What: `sglang_exact_kernels.prefill_attention` serves plain and chunked prefill of the
    target, in plain and speculative serving alike. Prefix slots and new slots are read
    where they lie.
Scope: forward mode EXTEND on the target's triton backend, causal layers with full
    attention, page size 1, head_dim up to 256, no scaled cache. Layers with a sliding
    window, a soft cap, sinks, a score_mod, no causality or MLA stay with the host's
    kernel: that depends on the layer alone, so both arms choose alike. A custom mask
    raises. The draft keeps the host's kernel.
Retire when: the host's deterministic prefill is as fast as its default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_exact.hooks.base import Hook, refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_BACKEND = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
_HEAD_DIMS = range(16, 257)


class UnsupportedPrefill(RuntimeError):
    """A prefill whose bits would depend on more than its own tokens."""


def host_reasons(
    backend: Any,
    layer: Any,
    causal: bool,
    logits_soft_cap: float,
    sinks: Any,
    score_mod: Any,
) -> list[str]:
    """Why a layer's prefill stays with the host's kernel; nothing of the batch."""
    found = []
    if backend.use_mla:
        found.append("MLA")
    if logits_soft_cap > 0 or layer.xai_temperature_len > 0:
        found.append("a soft cap or a temperature by length")
    if not causal:
        found.append("a bidirectional layer")
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        found.append("a sliding window")
    if sinks is not None or score_mod is not None:
        found.append("attention sinks or a score_mod")
    if layer.k_scale is not None or layer.v_scale is not None:
        found.append("a scaled KV cache")
    if backend.page_size != 1:
        found.append(f"page size {backend.page_size}")
    if layer.qk_head_dim not in _HEAD_DIMS or layer.v_head_dim not in _HEAD_DIMS:
        found.append(f"head_dim {layer.qk_head_dim} and {layer.v_head_dim}")
    return found


def prefill_rows(
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
    """Around _forward_extend_unified: plain extend runs the overlay's kernel.

    q, o: [num_tokens, heads * head_dim]. Raises UnsupportedPrefill for a custom mask.
    """
    refuse_unknown("TritonAttnBackend._forward_extend_unified", unknown)
    given = (causal, logits_soft_cap, sinks)
    if (
        self.is_draft_runner
        or forward_batch.forward_mode.name != "EXTEND"
        or host_reasons(self, layer, *given, score_mod)
    ):
        result: torch.Tensor = original_fn(
            self,
            q,
            o,
            layer,
            forward_batch,
            *given,
            score_mod=score_mod,
            aux_tensors=aux_tensors,
        )
        return result
    _attend(self, q, o, layer, forward_batch)
    return o


def _attend(
    backend: Any, q: torch.Tensor, o: torch.Tensor, layer: Any, forward_batch: Any
) -> None:
    from sglang_exact_kernels.prefill_attention import prefill_attention

    metadata, pool = backend.forward_metadata, backend.token_to_kv_pool
    if metadata.custom_mask is not None:
        raise UnsupportedPrefill(
            "found a custom mask in a plain prefill; expected the causal one; fix: "
            "install the pinned host release"
        )
    heads, bs = layer.tp_q_head_num, forward_batch.batch_size
    prefill_attention(
        q.view(-1, heads, layer.qk_head_dim),
        pool.get_key_buffer(layer.layer_id),
        pool.get_value_buffer(layer.layer_id),
        o.view(-1, heads, layer.v_head_dim),
        qo_indptr=metadata.qo_indptr[: bs + 1].int(),
        kv_indptr=metadata.kv_indptr[: bs + 1],
        kv_indices=metadata.kv_indices,
        out_cache_loc=forward_batch.out_cache_loc,
        max_extend_len=metadata.max_extend_len,
        sm_scale=layer.scaling,
    )


HOOK = Hook(
    name="prefill_attention",
    target=f"{_BACKEND}._forward_extend_unified",
    kind="AROUND",
    replacement=prefill_rows,
    relies_on=(
        f"{_BACKEND}.forward_extend",
        f"{_BACKEND}.init_forward_metadata",
        "sglang.srt.model_executor.forward_batch_info.ForwardMode",
    ),
)
