# SPDX-License-Identifier: Apache-2.0
"""One attention kernel for decode and for verify, its splits at fixed positions.

Why: the host's decode kernel cuts the keys by the row's own length and merges the
    parts in a loop whose unrolling depends on the context length
    (sglang/kernels/ops/attention/decode_attention.py:530,968); as decode rows, every
    draft position of a block would read the whole prefix again.
What: `sglang_exact_kernels.decode_attention` serves the target's decode and verify.
    All draft positions of a request share each key tile that is loaded; a row's bits
    depend on its own keys alone, so a block of one is plain decode.
Scope: the target runner's triton backend; full attention, page size 1, bf16 cache.
    Soft caps, sinks, windows and score_mod are refused. The draft keeps the host's.
Retire when: the host decodes and verifies with one batch-invariant kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_exact.hooks.attention_layer import BACKEND
from sglang_exact.hooks.base import Unsupported, hook

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_STAT = "_sglang_exact_part_stat"
_GRAPH_STAT = "_sglang_exact_graph_part_stat"
_OWN = "_sglang_exact_decode_attention"


def is_own(backend: Any) -> bool:
    """Whether this backend decodes with the overlay's kernel."""
    return bool(getattr(backend, _OWN, False))


def key_bound(backend: Any) -> int:
    """Most keys that a row can have: the context and one block beyond it."""
    return int(backend.max_context_len) + int(backend.num_draft_tokens or 1)


def scratch(
    backend: Any, rows: int, part_acc: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scratch (part_acc, part_stat) for `rows` rows; the host's where it has one.

    Allocates only outside of graph capture: init_cuda_graph_state sized it for the
    largest captured batch. Raises Unsupported otherwise.
    """
    import torch

    heads, splits = backend.num_head, backend.max_kv_splits
    if part_acc is None:
        part_acc = getattr(backend, "cuda_graph_attn_logits", None)
    if part_acc is None or part_acc.shape[0] < rows:
        _refuse_in_capture(rows)
        shape = (rows, heads, splits, backend.v_head_dim)
        part_acc = torch.empty(shape, dtype=torch.float32, device=backend.device)
    return part_acc, _part_stat(backend, part_acc.shape[0])


def _part_stat(backend: Any, rows: int) -> torch.Tensor:
    """part_stat [rows, heads, splits, 2] of the backend.

    Graphs hold the address of the one under _GRAPH_STAT, so an eager batch that is
    larger gets its own and never replaces it.
    """
    for name in (_GRAPH_STAT, _STAT):
        held: torch.Tensor | None = getattr(backend, name, None)
        if held is not None and held.shape[0] >= rows:
            return held[:rows]
    _refuse_in_capture(rows)
    stat = _new_part_stat(backend, rows)
    setattr(backend, _STAT, stat)
    return stat


def _new_part_stat(backend: Any, rows: int) -> torch.Tensor:
    import torch

    shape = (rows, backend.num_head, backend.max_kv_splits, 2)
    return torch.zeros(shape, dtype=torch.float32, device=backend.device)


def _refuse_in_capture(rows: int) -> None:
    from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

    if get_is_capture_mode():
        raise Unsupported(
            f"{rows} attention rows during graph capture; expected the buffers of "
            "init_cuda_graph_state to hold them; fix: install the pinned host release"
        )


def attend(
    backend: Any,
    kv: tuple[torch.Tensor, torch.Tensor],
    q: torch.Tensor,
    o: torch.Tensor,
    *,
    part_acc: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
    num_draft_tokens: int = 1,
    out_cache_loc: torch.Tensor | None = None,
) -> None:
    """Run the kernel on q, o [rows, heads, head_dim] and the layer's K, V pools."""
    from sglang_exact_kernels.decode_attention import decode_attention

    acc, stat = scratch(backend, q.shape[0], part_acc)
    decode_attention(
        q,
        kv[0],
        kv[1],
        o,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        part_acc=acc,
        part_stat=stat,
        sm_scale=sm_scale,
        max_context_len=key_bound(backend),
        num_draft_tokens=num_draft_tokens,
        out_cache_loc=out_cache_loc,
    )


def decode_launcher(backend: Any) -> Callable[..., None]:
    """A function with the host's decode_attention_fwd parameters, for one backend."""

    def decode_attention_fwd(
        q: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        o: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        attn_logits: torch.Tensor,
        attn_lse: torch.Tensor,
        num_kv_splits: torch.Tensor,
        max_kv_splits: int,
        sm_scale: float,
        k_scale: float,
        v_scale: float,
        logit_cap: float = 0.0,
        sinks: Any = None,
        xai_temperature_len: int = -1,
        has_mla: bool = False,
        use_pdl: bool = False,
        page_size: int = 1,
        score_mod: Any = None,
        aux_tensors: Any = None,
        enable_lean: bool | None = None,
        lean_Mp: Any = None,
        lean_Lp: Any = None,
        lean_Op: Any = None,
        lean_locks: Any = None,
        uneven_batch: Any = None,
    ) -> None:
        asked = {
            "logit_cap": logit_cap > 0,
            "sinks": sinks is not None,
            "xai_temperature_len": xai_temperature_len > 0,
            "MLA": has_mla,
            f"page size {page_size}": page_size != 1,
            "score_mod": score_mod is not None,
            "a scaled KV cache": (k_scale, v_scale) != (1.0, 1.0),
        }
        found = [name for name, given in asked.items() if given]
        if found:
            raise Unsupported(
                f"decode attention with {', '.join(found)}; expected none of these"
            )
        attend(
            backend,
            (k_buffer, v_buffer),
            q,
            o,
            part_acc=attn_logits,
            kv_indptr=kv_indptr[: q.shape[0] + 1],
            kv_indices=kv_indices,
            sm_scale=sm_scale,
        )

    return decode_attention_fwd


@hook(
    f"{BACKEND}.__init__",
    "AFTER",
    name="decode_attention",
    relies_on=(f"{BACKEND}.forward_decode",),
)
def use_own_kernel(
    result: None,
    self: Any,
    model_runner: Any,
    skip_prefill: bool = False,
    kv_indptr_buf: torch.Tensor | None = None,
    *,
    dllm_fa4: bool = False,
) -> None:
    """After TritonAttnBackend.__init__: the target decodes with our kernel.

    The host sizes its scratch by max_kv_splits; ours needs fewer splits.
    """
    if self.is_draft_runner or self.use_mla:
        return
    from sglang_exact_kernels.decode_attention import max_splits

    self.max_kv_splits = max_splits(key_bound(self))
    self.decode_attention_fwd = decode_launcher(self)
    setattr(self, _OWN, True)


@hook(f"{BACKEND}.init_cuda_graph_state", "AFTER", name="decode_attention_scratch")
def allocate_scratch(
    result: None,
    self: Any,
    max_bs: int,
    max_num_tokens: int,
    kv_indices_buf: torch.Tensor | None = None,
    cuda_graph_num_kv_splits_buf: torch.Tensor | None = None,
) -> None:
    """After init_cuda_graph_state: scratch for the largest captured batch."""
    if is_own(self):
        setattr(self, _GRAPH_STAT, _new_part_stat(self, max_num_tokens))
