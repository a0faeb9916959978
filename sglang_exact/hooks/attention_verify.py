# SPDX-License-Identifier: Apache-2.0
"""Verify attention as decode rows, one per draft position.

Why: the host verifies with its one-pass extend kernel
    (sglang/kernels/ops/attention/extend_attention.py:1172, 64-key tiles) and decodes
    with a split-KV kernel (decode_attention.py:530, 32-key tiles, a second stage
    that merges splits). The sums are taken in another order.
What: row (request r, position i) is a decode row with keys 0 .. prefix_r + i: the
    host's own decode launcher runs on bs * draft_tokens rows. The row metadata is
    built once per forward by one kernel into static buffers, inside the captured
    graph, so nothing is rebuilt per layer and the host never waits.
Scope: target_verify on the target runner, linear chains, no sliding window, no
    sinks, page size 1. Everything else raises.
Retire when: the host verifies attention with decode arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

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
_ROWS = "_sglang_exact_rows"


class Rows(NamedTuple):
    """Static decode-row metadata of one attention backend.

    indptr [rows + 1] int32, splits [rows] int32, indices [rows * context] int64:
    the dtypes of decode's own arrays, so that the same kernel binaries run.
    logits [rows, heads, splits, head_dim] and lse [rows, heads, splits] float32.
    """

    indptr: torch.Tensor
    splits: torch.Tensor
    indices: torch.Tensor
    logits: torch.Tensor
    lse: torch.Tensor
    uneven: torch.Tensor


def _allocate(backend: Any, rows: int, logits: Any, lse: Any) -> Rows:
    """Buffers for `rows` decode rows; scratch is the host's where it has some."""
    import torch

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=backend.device)

    if logits is None:
        heads, splits = backend.num_head, backend.max_kv_splits
        logits = empty(rows, heads, splits, backend.v_head_dim, dtype=torch.float32)
        lse = empty(rows, heads, splits, dtype=torch.float32)
    return Rows(
        empty(rows + 1, dtype=torch.int32),
        empty(rows, dtype=torch.int32),
        # A block may reach past the context by its own length.
        empty(
            rows * (backend.max_context_len + backend.num_draft_tokens),
            dtype=torch.int64,
        ),
        logits,
        lse,
        empty(1, dtype=torch.int32),
    )


def _rows(backend: Any, num_rows: int) -> Rows:
    rows: Rows | None = getattr(backend, _ROWS, None)
    if rows is None or rows.splits.shape[0] < num_rows:
        # Only before the first capture, or in eager mode: a captured graph holds
        # the addresses, and init_cuda_graph_state sized them for the largest batch.
        from sglang.srt.model_executor.runner_utils.capture_mode import (
            get_is_capture_mode,
        )

        if get_is_capture_mode():
            raise UnsupportedVerify(
                f"verify of {num_rows} rows during graph capture; expected at most "
                f"{0 if rows is None else rows.splits.shape[0]} (from "
                "init_cuda_graph_state); fix: install the pinned host release"
            )
        rows = _allocate(backend, num_rows, None, None)
        setattr(backend, _ROWS, rows)
    return rows


def allocate_rows(
    result: None,
    self: Any,
    max_bs: int,
    max_num_tokens: int,
    kv_indices_buf: torch.Tensor | None = None,
    cuda_graph_num_kv_splits_buf: torch.Tensor | None = None,
) -> None:
    """After init_cuda_graph_state: row buffers for the largest captured verify."""
    if self.is_draft_runner or not self.num_draft_tokens:
        return
    if decode_attention.is_own(self):
        return
    rows = _allocate(
        self, max_num_tokens, self.cuda_graph_attn_logits, self.cuda_graph_attn_lse
    )
    setattr(self, _ROWS, rows)


def _fill_rows(hybrid: Any, forward_batch: Any) -> None:
    backend = hybrid.full_attn_backend
    if backend.is_draft_runner or not forward_batch.forward_mode.is_target_verify():
        return
    if decode_attention.is_own(backend):
        return
    from sglang_exact_kernels.verify_rows import fill_verify_rows

    metadata = backend.forward_metadata
    steps = metadata.max_extend_len
    num_rows = forward_batch.batch_size * steps
    if metadata.custom_mask is not None and not _is_chain(backend):
        raise UnsupportedVerify("verify with a tree mask; expected a linear chain")
    if forward_batch.out_cache_loc.shape[0] < num_rows:
        raise UnsupportedVerify(
            f"{forward_batch.out_cache_loc.shape[0]} write locations for {num_rows} "
            "draft positions; expected one each (ragged verify is not supported)"
        )
    rows = _rows(backend, num_rows)
    fill_verify_rows(
        metadata.kv_indptr[: forward_batch.batch_size + 1],
        metadata.kv_indices,
        forward_batch.out_cache_loc[:num_rows],
        steps,
        split_tile_size=backend.split_tile_size,
        max_context_len=backend.max_context_len,
        row_indptr=rows.indptr,
        row_splits=rows.splits,
        row_indices=rows.indices,
    )


def _is_chain(backend: Any) -> bool:
    """Whether drafts are linear, so that a mask can only be the causal one."""
    return bool(backend.topk <= 1)


def fill_in_graph(result: None, self: Any, forward_batch: Any) -> None:
    """After init_forward_metadata_in_graph: recorded, and replayed every step."""
    _fill_rows(self, forward_batch)


def fill_eager(result: None, self: Any, forward_batch: Any) -> None:
    """After the eager init_forward_metadata."""
    _fill_rows(self, forward_batch)


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
    _check_layer(self, layer, causal, sinks, score_mod)
    heads = layer.tp_q_head_num
    metadata = self.forward_metadata
    num_rows = forward_batch.batch_size * metadata.max_extend_len
    if decode_attention.is_own(self):
        pool = self.token_to_kv_pool
        decode_attention.attend(
            self,
            (
                pool.get_key_buffer(layer.layer_id),
                pool.get_value_buffer(layer.layer_id),
            ),
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
    rows = _rows(self, num_rows)
    self.decode_attention_fwd(
        q.view(-1, heads, layer.qk_head_dim),
        self.token_to_kv_pool.get_key_buffer(layer.layer_id),
        self.token_to_kv_pool.get_value_buffer(layer.layer_id),
        o.view(-1, heads, layer.v_head_dim),
        rows.indptr[: num_rows + 1],
        rows.indices,
        rows.logits,
        rows.lse,
        rows.splits[:num_rows],
        self.max_kv_splits,
        layer.scaling,
        1.0,
        1.0,
        logit_cap=logits_soft_cap,
        sinks=sinks,
        xai_temperature_len=layer.xai_temperature_len,
        has_mla=self.use_mla,
        use_pdl=self.use_pdl,
        page_size=self.page_size,
        enable_lean=False,
        uneven_batch=rows.uneven,
    )
    return o


def _check_layer(
    backend: Any, layer: Any, causal: bool, sinks: Any, score_mod: Any
) -> None:
    found = []
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


HOOKS = (
    Hook(
        name="attention_verify",
        target=f"{_BACKEND}._forward_extend_unified",
        kind="AROUND",
        replacement=verify_rows,
        relies_on=(
            f"{_BACKEND}.forward_decode",
            f"{_BACKEND}.forward_extend",
            f"{_BACKEND}.get_num_kv_splits",
            "sglang.kernels.ops.attention.decode_attention.decode_attention_fwd",
            "sglang.kernels.ops.attention.decode_attention._fwd_grouped_kernel_stage1",
            "sglang.kernels.ops.attention.decode_attention._decode_grouped_att_m_fwd",
            "sglang.kernels.ops.attention.decode_attention._fwd_kernel_stage2",
        ),
        speculative=True,
    ),
    Hook(
        name="attention_verify_buffers",
        target=f"{_BACKEND}.init_cuda_graph_state",
        kind="AFTER",
        replacement=allocate_rows,
        speculative=True,
    ),
    Hook(
        name="attention_verify_rows_graph",
        target=f"{_HYBRID}.init_forward_metadata_in_graph",
        kind="AFTER",
        replacement=fill_in_graph,
        speculative=True,
    ),
    Hook(
        name="attention_verify_rows_eager",
        target=f"{_HYBRID}.init_forward_metadata",
        kind="AFTER",
        replacement=fill_eager,
        relies_on=(f"{_BACKEND}.init_forward_metadata",),
        speculative=True,
    ),
)
