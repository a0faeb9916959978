# SPDX-License-Identifier: Apache-2.0
"""Verify keeps what each token does to a GDN state, not the states themselves.

Why: the host keeps the state after every token of a block
    (sglang/srt/mem_cache/memory_pool.py:883): at the 27B's width 144 MiB a token and
    request, 37 GiB for 32 requests of 8, which the KV pool lacks, written in every
    step. Its own replay (--enable-linear-replayssm-spec) has another arithmetic.
What: a block's records are u, k and exp(g) of each token (`gdn_verify`), 12 MiB a
    request. The commit replays the accepted ones on the state before the block with
    the decode kernel's two operations an element, all layers in one launch. The
    convolution's windows are kept and committed by the host.
    The host sizes its pools without the states of blocks; the records are taken off.
Scope: GDN with float32 states and chains. Where `gdn_verify` is off, so is this.
Retire when: the host replays GDN with decode arithmetic.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_exact.hooks import registered
from sglang_exact.hooks.base import SCHEDULER, Unsupported, hook

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
_POOL = "sglang.srt.mem_cache.memory_pool.MambaPool"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator"
_SCATTER = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
_GIB = 1 << 30

_sizing = False
"""Whether the host is sizing its pools; there it is told that no states are kept."""


def _replays() -> bool:
    return any(ours.name == "gdn_verify" for ours in registered.read().of(SCHEDULER))


def _width(cache_params: Any) -> int:
    """Floats of a token's records in one layer."""
    from sglang_exact_kernels.gdn_verify import record_width

    shape = cache_params.shape
    hv, v, k = shape.temporal
    return record_width(int(shape.num_k_heads_per_tp), hv, k, v)


@hook(
    f"{_POOL}.__init__",
    "AROUND",
    name="gdn_records",
    relies_on=(
        f"{_POOL}._allocate_deduplicated_conv_window",
        f"{_POOL}.SpeculativeState",
        f"{_POOL}.State",
    ),
)
def allocate(original_fn: Callable[..., None], self: Any, **given: Any) -> None:
    """Around MambaPool.__init__: records in place of the states of blocks.

    They stand where the states would, as `intermediate_ssm`: float32
    [layers, requests + 1, draft tokens, record_width].
    """
    tokens, params = given.get("speculative_num_draft_tokens"), given["cache_params"]
    if tokens is None or not _replays():
        original_fn(self, **given)
        return
    import torch

    requests = given["spec_state_size"]
    original_fn(self, **{**given, "spec_state_size": 0})
    self.mamba_cache = dataclasses.replace(
        self.mamba_cache,
        intermediate_ssm=_records(self, params, requests + 1, tokens),
        intermediate_conv_window=_windows(self, given),
    )
    if torch.cuda.is_available():
        # The host's states of one block go back to the device, not into a cache.
        torch.cuda.empty_cache()
    size = self.mamba_cache.intermediate_ssm.nbytes / _GIB
    logger.info(
        "sglang_exact: records of %d draft tokens for %d requests: %.2f GiB, "
        "in place of the states of blocks",
        tokens,
        requests,
        size,
    )


def _records(pool: Any, params: Any, rows: int, tokens: int) -> torch.Tensor:
    import torch

    layers = len(pool.mamba_layer_ids)
    size = (layers, rows, tokens, _width(params))
    return torch.zeros(size, dtype=torch.float32, device=pool.device)


def _windows(pool: Any, given: dict[str, Any]) -> list[torch.Tensor]:
    """The host's windows of the convolution's inputs, for the real number of requests.

    Laid out as the host laid out those of one request.
    """
    import torch

    views, whole = [], []
    params, tokens = given["cache_params"], given["speculative_num_draft_tokens"]
    rows = given["spec_state_size"] + 1
    for shape, small, view in zip(
        params.shape.conv,
        pool._intermediate_conv_window_phys,
        pool.mamba_cache.intermediate_conv_window,
        strict=True,
    ):
        if small is view:
            made = torch.zeros(
                (view.shape[0], rows, *view.shape[2:]),
                dtype=view.dtype,
                device=view.device,
            )
            physical = made
        else:
            physical, made = pool._allocate_deduplicated_conv_window(
                conv_shape=shape,
                num_mamba_layers=view.shape[0],
                spec_state_size=rows - 1,
                speculative_num_draft_tokens=tokens,
                conv_dtype=view.dtype,
            )
        views.append(made)
        whole.append(physical)
    pool._intermediate_conv_window_phys = whole
    return views


@hook(
    f"{_CONFIGURATOR}.KVCacheConfigurator._handle_max_mamba_cache",
    "AROUND",
    name="gdn_records_room",
    relies_on=(f"{_CONFIGURATOR}.KVCacheConfigurator._build_hybrid_req_pool",),
)
def size_pools(
    original_fn: Callable[..., float], self: Any, total_rest_memory: float
) -> float:
    """Around _handle_max_mamba_cache: GiB left for the KV pool, records taken off."""
    global _sizing
    if self.spec_algorithm.is_none() or not _replays():
        return original_fn(self, total_rest_memory)
    from sglang.srt.runtime_context import get_schedule, get_spec

    _sizing = True
    try:
        left = original_fn(self, total_rest_memory)
    finally:
        _sizing = False
    params = self.mambaish_config.mamba2_cache_params
    rows = int(get_schedule().max_running_requests) + 1
    tokens = int(get_spec().speculative_num_draft_tokens)
    floats = len(params.layers) * rows * tokens * _width(params)
    return left - 4 * floats / _GIB


@hook(
    f"{_CONFIGURATOR}._pd_prefill_skips_mamba_spec_state",
    "AROUND",
    name="gdn_records_sized",
)
def no_states_of_blocks(original_fn: Callable[[], bool]) -> bool:
    """Around _pd_prefill_skips_mamba_spec_state: true while pools are sized."""
    return _sizing or original_fn()


@hook(
    f"{_SCATTER}.fused_mamba_state_scatter_with_mask",
    "AROUND",
    name="gdn_commit",
    relies_on=(
        f"{_SCATTER}.scatter_mamba_states_after_mtp_verify",
        f"{_SCATTER}.fused_conv_window_scatter_with_mask",
    ),
)
def commit(
    original_fn: Callable[..., None],
    dst: torch.Tensor,
    src: torch.Tensor,
    dst_indices_raw: torch.Tensor,
    step_indices_raw: torch.Tensor,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """Around fused_mamba_state_scatter_with_mask: replay where `src` are records.

    dst: states [layers, slots, HV, V, K] float32; src: records, see `allocate`;
    step_indices_raw: [bs] last accepted step, negative for none. Raises Unsupported.
    """
    if src.ndim != 4:
        original_fn(dst, src, dst_indices_raw, step_indices_raw, src_indices_raw)
        return
    if src_indices_raw is not None:
        raise Unsupported(
            "commit after verify: found rows of another batch; expected those of this "
            "one; fix: unset SGLANG_ENABLE_PP_SPEC"
        )
    import torch

    from sglang_exact_kernels.gdn_commit import gdn_commit

    rows = torch.arange(len(step_indices_raw), dtype=torch.int32, device=dst.device)
    gdn_commit(
        dst,
        src,
        cache_indices=dst_indices_raw.contiguous(),
        record_rows=rows,
        last_steps=step_indices_raw.contiguous(),
    )
