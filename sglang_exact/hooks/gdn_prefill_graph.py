# SPDX-License-Identifier: Apache-2.0
"""GDN's prefill runs inside the prefill graphs.

Why: the host captures KDA's extend in a prefill graph and breaks the graph at every GDN
    layer (sglang/srt/layers/radix_linear_attention.py:115). 48 breaks of about 0.6 ms
    are most of a short prompt's time to its first token.
What: the launches of the step without a graph, in its order, on the host's own tables
    of KDA (sglang/srt/layers/attention/linear/kda_prefill_graph.py): made for a bucket,
    written anew before each replay, their spare rows of no request. A program reads
    its request's rows alone, so a row's bits are those without the graph. What the
    prefix cache keeps is written by the graph too.
Scope: GDN prefill of the target on a GPU, steps of at most `MAX_REQUESTS` requests that
    fit the largest graph; all others run without a graph, as before.
Retire when: GDNAttnBackend.supports_prefill_graph_extend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_exact.hooks.base import DIRECT, hook

if TYPE_CHECKING:
    import torch

MAX_REQUESTS = 16
"""In one captured step. A graph's launches are sized by it: at 27B 16 requests cost
25 MB of states before each chunk, and 50 MB of states that may be kept."""
_LINEAR = "sglang.srt.layers.attention.linear"
_BACKEND = f"{_LINEAR}.gdn_backend.GDNAttnBackend"
_KDA = f"{_LINEAR}.kda_backend.KDAAttnBackend"
_GRAPH = f"{_LINEAR}.kda_prefill_graph"
_HYBRID = (
    "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend"
)
_TRACK = "sglang.kernels.ops.mamba.kda_prefill_track"
# Methods of KDA's backend that fill its tables and know nothing of KDA.
_FILLERS = (
    *("_prefill_graph_cache_indices", "_fill_prefill_graph_metadata"),
    "_prefill_graph_track_rows",
)


class Tables(NamedTuple):
    """One bucket's tables: the host's, and what convolution inputs are kept.

    rows: [MAX_REQUESTS, width - 1] int64, rows of the step whose inputs are kept;
    slots: [MAX_REQUESTS] int64, where; the padding's slot 0 for none.
    """

    host: Any
    rows: torch.Tensor
    slots: torch.Tensor


def _captures(backend: Any) -> bool:
    return vars(backend).get("supports_prefill_graph_extend") is supports


@hook(
    _BACKEND,
    DIRECT,
    name="gdn_prefill_graph",
    in_force=_captures,
    relies_on=(
        f"{_GRAPH}.KDAPrefillGraphMetadata",
        f"{_GRAPH}.build_track_rows",
        f"{_GRAPH}.kda_extend_in_graph",
        *(f"{_KDA}.{name}" for name in _FILLERS),
        f"{_KDA}.init_prefill_graph_metadata",
        f"{_KDA}.refresh_prefill_graph_metadata",
        f"{_HYBRID}.__init__",
        f"{_HYBRID}.init_forward_metadata_for_breakable_cuda_graph_capture",
        f"{_HYBRID}.prepare_forward_metadata_for_breakable_cuda_graph_replay",
        "sglang.srt.layers.radix_linear_attention.RadixLinearAttention.forward",
        "sglang.srt.layers.radix_linear_attention._linear_attention_with_output_impl",
    ),
)
def offer(backend: Any) -> None:
    """Tell the host that GDN's extend needs no break, and what its tables are."""
    from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend

    for name in _FILLERS:
        setattr(backend, name, getattr(KDAAttnBackend, name))
    backend.prefill_graph_max_seqs = MAX_REQUESTS
    backend.prefill_graph_metadata = None
    backend.supports_prefill_graph_extend = supports
    backend.prefill_graph_extend_active = active
    backend.init_prefill_graph_metadata = allocate
    backend.refresh_prefill_graph_metadata = refresh


def supports(self: Any) -> bool:
    """Whether this backend's extend can be captured: of the host's Triton kernels.

    An MTP head has such a backend too, and no GDN layer: its graphs stay as they are.
    """
    name = type(self.kernel_dispatcher.extend_kernel).__name__
    other = self.enable_mis or self.is_draft_worker
    return name == "TritonGDNKernel" and not other


def active(self: Any) -> bool:
    """Whether the step being captured runs on a bucket's tables."""
    return self.prefill_graph_metadata is not None


def allocate(self: Any, forward_batch: Any) -> Tables:
    """Tables of the bucket being captured, filled for its dummy step."""
    import torch
    from sglang.srt.layers.attention.linear.kda_prefill_graph import (
        KDAPrefillGraphMetadata,
    )

    slots = self._prefill_graph_cache_indices(forward_batch)
    made = KDAPrefillGraphMetadata.allocate(
        num_tokens=forward_batch.extend_num_tokens,
        max_seqs_cap=MAX_REQUESTS,
        track=True,
        cache_index_dtype=slots.dtype,
        device=self.device,
    )
    width, none = self.conv_states_shape[-1], made.track_dst
    tables = Tables(made, none.new_zeros(made.max_seqs, width), torch.zeros_like(none))
    refresh(self, tables, forward_batch)
    return tables


def refresh(self: Any, tables: Tables, forward_batch: Any) -> None:
    """Write the tables for a step, before its replay."""
    import torch

    self._fill_prefill_graph_metadata(
        meta=tables.host,
        forward_batch=forward_batch,
        cache_indices=self._prefill_graph_cache_indices(forward_batch),
    )
    self.prefill_graph_metadata = tables
    host, (rows, width) = tables.host, tables.rows.shape
    steps = torch.arange(width, device=tables.rows.device)
    found = (host.track_conv_start[:rows, None] + steps).clamp_(min=0)
    # As the step without a graph: no row past the step's last.
    torch.minimum(found, host.num_logical_tokens.long() - 1, out=tables.rows)
    torch.mul(host.track_dst, host.track_mode > 0, out=tables.slots)


@hook(f"{_BACKEND}.init_forward_metadata", "BEFORE", name="gdn_prefill_graph_left")
def leave(self: Any, *_: Any, **__: Any) -> None:
    """A step without a graph has no bucket's tables."""
    self.prefill_graph_metadata = None


@hook(
    f"{_BACKEND}.forward_extend",
    "AROUND",
    name="gdn_prefill_graph_extend",
    relies_on=(
        f"{_BACKEND}._convolve_prefill",
        f"{_BACKEND}._prefill_gates",
        f"{_TRACK}.kda_track_ssm_state",
        "sglang.kernels.ops.mamba.causal_conv1d_triton.causal_conv1d_fn",
        "sglang.srt.layers.attention.mamba.causal_conv1d.causal_conv1d_fn",
    ),
)
def extend(
    original_fn: Callable[..., Any],
    self: Any,
    layer: Any,
    forward_batch: Any,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    **given: Any,
) -> Any:
    """Around forward_extend: `captured` while a prefill graph is."""
    tables = getattr(self, "prefill_graph_metadata", None)
    if tables is None or forward_batch.forward_mode.is_target_verify():
        return original_fn(self, layer, forward_batch, mixed_qkv, a, b, **given)
    return captured(self, layer, mixed_qkv, a, b)


def captured(
    self: Any, layer: Any, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """One layer's extend on a bucket's tables, without a look at the host's lengths.

    mixed_qkv: [tokens, q + k + v] bf16 before the convolution; a, b: [tokens, HV] bf16.
    Returns [1, tokens, HV, V] bf16, zero where no request is; states, and those that
    the prefix cache keeps, are written in place.
    """
    import torch
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn
    from sglang.kernels.ops.mamba.kda_prefill_track import kda_track_ssm_state

    tables = self.prefill_graph_metadata
    host = tables.host
    cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    conv, states = cache.conv[0], cache.temporal
    inputs = mixed_qkv[tables.rows].transpose(1, 2)
    kept = (host.track_mode > 0)[:, None, None]
    # Slot 0 is the padding's, and gets back what it holds.
    conv.index_copy_(
        0, tables.slots, torch.where(kept, inputs.to(conv.dtype), conv[tables.slots])
    )
    qkv = causal_conv1d_fn(
        mixed_qkv.transpose(0, 1),
        layer.conv_weights,
        layer.bias,
        activation=layer.activation,
        conv_states=conv,
        has_initial_state=host.has_initial_state,
        cache_indices=host.cache_indices,
        query_start_loc=host.cu_seqlens,
        seq_lens_cpu=None,
        block_table=host.conv_block_table,
    ).transpose(0, 1)
    heads = (layer.num_q_heads, layer.num_k_heads, layer.num_v_heads)
    parts = qkv.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
    q, k, v = (
        part.unflatten(-1, (count, -1)).unsqueeze(0)
        for part, count in zip(parts, heads, strict=True)
    )
    gates, beta = self._prefill_gates(layer, a, b)
    track = states.new_empty((host.max_seqs, *states.shape[1:]), dtype=torch.float32)
    out, _, _ = self.kernel_dispatcher.extend(
        q=q, k=k, v=v, g=gates, beta=beta,
        ssm_states=states, cache_indices=host.cache_indices,
        query_start_loc=host.cu_seqlens, chunk_indices=host.chunk_indices,
        chunk_offsets=host.chunk_offsets, track_state=track,
        track_chunk_idx=host.track_chunk_idx,
    )  # fmt: skip
    kda_track_ssm_state(
        ssm_pool=states,
        h_track=track,
        track_mode=host.track_mode,
        track_dst=host.track_dst,
        cache_indices=host.cache_indices,
    )
    return out
