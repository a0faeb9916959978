# SPDX-License-Identifier: Apache-2.0
"""Prefill attention by the overlay's kernel: the same bits wherever a prompt is cut.

Why: the host's deterministic prefill kernel gives every query head its own pass over
    the keys in unpipelined 64-row tiles, walks tiles that no row of the program sees,
    and copies the request's slots together in every layer
    (sglang/kernels/ops/attention/extend_attention.py:1172, 326). At 128k that is most
    of the time to the first token.
What: `sglang_exact_kernels.prefill_attention` serves plain and chunked prefill of the
    target, in plain and speculative serving alike. A step of GATHER_KEYS keys or more
    copies them together first and loads tiles by TMA, where the GPU has such a kernel;
    the bits are those of reading keys where they lie, which the self-test compares.
    One scratch serves all layers. It is allocated once, at the backend's first prefill
    (the server's warm-up request), for the longest context: 4 KiB per key for 4 KV
    heads of 256, half a GiB at 128k, from what mem_fraction_static leaves free. Steps
    that do not fit in it read keys where they lie.
Scope: forward mode EXTEND on the target's triton backend, causal layers with full
    attention, page size 1, head_dim up to 256, no scaled cache. Layers with a sliding
    window, a soft cap, sinks, a score_mod, no causality or MLA stay with the host's
    kernel: that depends on the layer alone, so both arms choose alike. A custom mask
    raises. The draft keeps the host's kernel.
Retire when: the host's deterministic prefill is as fast as its default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_exact.hooks.attention_layer import BACKEND, layer_reasons
from sglang_exact.hooks.base import Unsupported, hook, refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_GRAPHS = (
    "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner"
)
_HEAD_DIMS = range(16, 257)
_DENSE = "_sglang_exact_dense"

_STEP_KEYS, _STEP_REQUESTS = 16384, 64
"""What a step may hold beside the longest context; larger ones are not copied."""


def host_reasons(backend: Any, layer: Any, *call: Any) -> list[str]:
    """Why a layer's prefill stays with the host's kernel; nothing of the batch.

    call: what `layer_reasons` takes after the layer.
    """
    found = layer_reasons(backend, layer, *call)
    if backend.use_mla:
        found.append("MLA")
    if not {layer.qk_head_dim, layer.v_head_dim} <= set(_HEAD_DIMS):
        found.append(f"head_dim {layer.qk_head_dim} and {layer.v_head_dim}")
    return found


@hook(
    f"{BACKEND}._forward_extend_unified",
    "AROUND",
    name="prefill_attention",
    relies_on=(
        f"{BACKEND}.forward_extend",
        f"{BACKEND}.init_forward_metadata",
        "sglang.srt.model_executor.forward_batch_info.ForwardMode",
        # Under a prefill graph: padded rows stop at attention and the GDN layers.
        f"{_GRAPHS}.can_replay_locally",
        f"{_GRAPHS}.capture_prepare",
        f"{_GRAPHS}.load_batch",
        f"{_GRAPHS}._execute_body_capture",
        f"{_GRAPHS}._trim_logits_output",
        "sglang.srt.layers.radix_attention.RadixAttention",
        "sglang.srt.layers.radix_linear_attention.RadixLinearAttention",
        "sglang.srt.layers.radix_linear_attention._linear_attention_with_output_impl",
    ),
)
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

    q, o: [num_tokens, heads * head_dim]. Raises Unsupported for a custom mask.
    """
    refuse_unknown("TritonAttnBackend._forward_extend_unified", unknown)
    given = (causal, logits_soft_cap, sinks)
    if (
        self.is_draft_runner
        or forward_batch.forward_mode.name != "EXTEND"
        or host_reasons(self, layer, *given, score_mod)
    ):
        more = {"score_mod": score_mod, "aux_tensors": aux_tensors}
        result: torch.Tensor = original_fn(
            self, q, o, layer, forward_batch, *given, **more
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
        raise Unsupported(
            "found a custom mask in a plain prefill; expected the causal one; fix: "
            "install the pinned host release"
        )
    heads, bs = layer.tp_q_head_num, forward_batch.batch_size
    rows = q.view(-1, heads, layer.qk_head_dim)
    k_buffer = pool.get_key_buffer(layer.layer_id)
    keys = metadata.kv_indices.numel() + len(rows)
    prefill_attention(
        rows,
        k_buffer,
        pool.get_value_buffer(layer.layer_id),
        o.view(-1, heads, layer.v_head_dim),
        qo_indptr=metadata.qo_indptr[: bs + 1].int(),
        kv_indptr=metadata.kv_indptr[: bs + 1],
        kv_indices=metadata.kv_indices,
        out_cache_loc=forward_batch.out_cache_loc,
        max_extend_len=metadata.max_extend_len,
        sm_scale=layer.scaling,
        dense=dense_scratch(backend, k_buffer, layer.v_head_dim, keys, bs),
    )


def dense_scratch(
    backend: Any, k_buffer: torch.Tensor, v_head_dim: int, keys: int, bs: int
) -> torch.Tensor | None:
    """Scratch for a step of `keys` keys, or None where keys stay where they lie.

    k_buffer [slots, kv_heads, head_dim]. The first call allocates, for every layer.
    """
    import torch

    from sglang_exact_kernels import prefill_attention as kernel

    kv_heads, dim = k_buffer.shape[1:]
    if not kernel.copies(k_buffer.device, dim, v_head_dim):
        return None
    held: torch.Tensor | None = getattr(backend, _DENSE, None)
    if held is None:
        most = int(backend.max_context_len) + _STEP_KEYS
        shape = kernel.dense_shape(most, _STEP_REQUESTS, kv_heads, dim)
        held = torch.empty(shape, dtype=k_buffer.dtype, device=k_buffer.device)
        setattr(backend, _DENSE, held)
    needed = kernel.dense_shape(keys, bs, kv_heads, dim)
    fits = needed[2] <= held.shape[2] and (needed[1], dim) == held.shape[1::2]
    return held if fits and keys >= kernel.GATHER_KEYS else None
