# SPDX-License-Identifier: Apache-2.0
"""The GDN state that the prefix cache keeps is the float32 state at its cut.

Why: a checkpoint inside a prefill step is taken from the chunk kernel's output `h`,
    which has the dtype of k (sglang/kernels/ops/attention/fla/chunk_delta_h.py:397),
    and is widened again into the float32 pool. A prompt that goes on from there has
    other bits than one that was computed. The kernel can write the float32 state at a
    chunk, and TritonGDNKernel does not ask for it
    (sglang/srt/layers/attention/linear/gdn_backend.py:1167).
What: the launches of the host's chunk_gated_delta_rule, in its order, and the kernel's
    own float32 snapshot. Every prefill runs that one binary, whether the server has a
    cache and a request of the step is kept or not: index -1 keeps nothing. Outputs are
    made in tiles of 64 tokens, where the host takes tiles of 16 or 32 for a step of as
    few: a prefill graph (`gdn_prefill_graph`) does not know how many are real.
Scope: GDN prefill of the target with float32 states.
Retire when: TritonGDNKernel.extend passes track_state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_exact.hooks.base import DIRECT, Unsupported, hook, refuse_unknown

if TYPE_CHECKING:
    import torch

_FLA = "sglang.kernels.ops.attention.fla"
_BACKEND = "sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend"
_TRACKING = (
    "sglang.srt.layers.attention.hybrid_linear_attn_backend.MambaAttnBackendBase"
)
_KERNEL = "sglang.srt.layers.attention.linear.kernels.gdn_triton.TritonGDNKernel"
_UNTRACKED = "_sglang_exact_untracked"
# What the host's dispatcher hands to every kernel, and this one has no use for.
_OF_OTHERS = (
    *("state_checkpoint_cu_starts", "num_state_checkpoints", "extend_prefix_lens"),
    *("state_checkpoint_every_n_tokens", "output", "layer_id"),
)


def _offers_snapshot(kernel: Any) -> bool:
    return kernel.supports_track_state_snapshot is True


@hook(_KERNEL, DIRECT, name="prefix_snapshot_asked", in_force=_offers_snapshot)
def ask_for_snapshots(kernel: Any) -> None:
    """Tell the host that `extend` takes track_state, so that it passes one."""
    kernel.supports_track_state_snapshot = True


def _untracked(kernel: Any, states: torch.Tensor, count: int) -> tuple[Any, Any]:
    """A buffer of one state that is never written, and -1 for `count` requests.

    Made once, and again for more requests; states [slots, HV, V, K].
    """
    import torch

    found = getattr(kernel, _UNTRACKED, None)
    if found is None or len(found[1]) < count:
        unused = torch.empty_like(states[:1], dtype=torch.float32)
        never = torch.full((max(count, 64),), -1, dtype=torch.int32)
        found = unused, never.to(states.device)
        setattr(kernel, _UNTRACKED, found)
    return found[0], found[1][:count]


@hook(
    f"{_KERNEL}.extend",
    "REPLACE",
    name="prefix_snapshot",
    relies_on=(
        f"{_FLA}.chunk.chunk_gated_delta_rule",
        f"{_FLA}.chunk.ChunkGatedDeltaRuleFunction",
        f"{_FLA}.chunk.chunk_gated_delta_rule_fwd",
        f"{_FLA}.chunk_delta_h.chunk_gated_delta_rule_fwd_h",
        f"{_FLA}.chunk_fwd.chunk_gated_delta_rule_fwd_intra",
        f"{_FLA}.chunk_o.chunk_fwd_o",
        f"{_FLA}.cumsum.chunk_local_cumsum",
        f"{_FLA}.index.prepare_chunk_indices",
        f"{_BACKEND}.forward_extend",
        f"{_TRACKING}._track_mamba_state_extend",
        f"{_TRACKING}._init_track_conv_indices",
        f"{_TRACKING}._init_track_ssm_indices",
        f"{_TRACKING}._init_track_ssm_indices_from_cpu",
        "sglang.srt.layers.attention.mamba.prefill_track_metadata."
        "build_prefill_track_plan",
    ),
)
def kept(
    self: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    inplace_update: bool = True,
    track_state: torch.Tensor | None = None,
    track_chunk_idx: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    chunk_offsets: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """TritonGDNKernel.extend with float32 snapshots; shapes as there, states in place.

    q, k: [1, T, H, K] bf16; v: [1, T, HV, V] bf16; g, beta: [1, T, HV];
    ssm_states: [slots, HV, V, K] float32; track_state: [bs, HV, V, K] float32, into
    which the state before chunk `track_chunk_idx` [bs] int32 goes, none at -1;
    chunk_indices: [chunks, 2] int32, request and chunk of each 64 tokens, and
    chunk_offsets: [bs + 1] int32, the first of each request; made here if None.
    Returns (outputs [1, T, HV, V], None, states before each chunk in bf16).
    Raises Unsupported for states of another dtype.
    """
    refuse_unknown(
        "TritonGDNKernel.extend",
        {k: v for k, v in others.items() if k not in _OF_OTHERS},
    )
    if ssm_states.dtype.itemsize != 4:
        raise Unsupported(
            f"GDN prefill: found states of {ssm_states.dtype}; expected torch.float32; "
            "fix: drop --mamba-ssm-dtype"
        )
    if track_state is None:
        bs = len(cache_indices)
        track_state, track_chunk_idx = _untracked(self, ssm_states, bs)
    return _chunks(
        *(tensor.contiguous() for tensor in (q, k, v, g, beta)),
        starts=query_start_loc,
        table=chunk_indices,
        state={
            "chunk_offsets": chunk_offsets,
            "initial_state": ssm_states,
            "initial_state_indices": cache_indices,
            "inplace_update": inplace_update,
            "track_state": track_state,
            "track_chunk_idx": track_chunk_idx,
        },
    )


def _chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    starts: torch.Tensor,
    table: torch.Tensor | None,
    state: dict[str, Any],
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """The launches of chunk_gated_delta_rule with the norm in the kernel."""
    from sglang.kernels.ops.attention.fla import chunk_delta_h, chunk_fwd
    from sglang.kernels.ops.attention.fla.cumsum import chunk_local_cumsum
    from sglang.kernels.ops.attention.fla.index import prepare_chunk_indices
    from sglang.kernels.ops.attention.fla.l2norm import l2norm_fwd

    size = chunk_delta_h.CHUNK_SIZE
    if table is None:
        table = prepare_chunk_indices(starts, size)
    cut = {"cu_seqlens": starts, "chunk_indices": table}
    q, k = l2norm_fwd(q), l2norm_fwd(k)
    g = chunk_local_cumsum(g, chunk_size=size, **cut)
    w, u, _ = chunk_fwd.chunk_gated_delta_rule_fwd_intra(
        k=k, v=v, g=g, beta=beta, **cut
    )
    h, v = chunk_delta_h.chunk_gated_delta_rule_fwd_h(
        k=k, w=w, u=u, g=g, **state, **cut
    )
    return _outputs(q, k, v, h, g, size, **cut), None, h


def _outputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    h: torch.Tensor,
    g: torch.Tensor,
    size: int,
    *,
    cu_seqlens: torch.Tensor,
    chunk_indices: torch.Tensor,
) -> torch.Tensor:
    """chunk_fwd_o in tiles of `size` tokens, whatever the step's length.

    Rows of no request stay zero.
    """
    import torch
    from sglang.kernels.ops.attention.fla import chunk_o

    (_, tokens, heads, k_dim), (v_heads, v_dim) = q.shape, v.shape[2:]
    out, block_v = torch.zeros_like(v), 64
    chunk_o.chunk_fwd_kernel_o[(-(-v_dim // block_v), len(chunk_indices), v_heads)](
        q, k, v, h, g, out, cu_seqlens, chunk_indices, k_dim**-0.5,
        T=tokens, H=v_heads, Hg=heads, K=k_dim, V=v_dim, BT=size, BK=128, BV=block_v,
        USE_G=True, IS_VARLEN=True, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out.to(q.dtype)
