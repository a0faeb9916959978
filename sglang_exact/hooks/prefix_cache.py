# SPDX-License-Identifier: Apache-2.0
"""A request has the same bits whether its prefix was cached or computed.

Why: the host's cache of a hybrid model keeps whatever state it finds: decode gives its
    own states away every mamba_track_interval tokens, with the KV that decode computed
    (sglang/srt/managers/schedule_batch.py:3803, speculative/spec_utils.py:987), and a
    request that finishes gives them to the tree
    (sglang/srt/mem_cache/unified_cache/components/mamba.py:606). Prefill has other
    bits, and a prompt that starts off the grid is cut elsewhere than a whole one.
What: every node that can be matched ends at a multiple of the grid that was a cut of
    it; its KV and convolution inputs were computed by prefill; its state is the float32
    state at that cut (`prefix_snapshot`). So a hit starts on the grid, the rest of the
    prompt is cut as without it (`prefill_grid`), and by induction what it leaves in
    the tree is again what a server without a cache computes.
    A match needs a state (components/mamba.py:152) and a state comes in by
    prepare_for_caching_req alone: there anything else than a multiple of the grid
    within the prompt is left out. A match off the grid ends the server. The interval
    lies beyond the context, so that decode keeps no states in the first place.
    Logprobs of the prompt are computed: the host matches up to logprob_start_len only.
    A draft's KV lies in the target's slots and comes with a hit; what it drafts is
    verified. Weight updates empty the tree (`live_changes`).
    Each running request holds its state, its checkpoints to be and the locked node of
    its prefix; the host runs as many requests as the pool has room for all of these,
    and every other state is evictable, so the cache takes nothing from who runs.
Scope: UnifiedRadixCache with the strategies extra_buffer and extra_buffer_lazy.
    no_buffer, host memory, sessions and other caches are refused (`scope`).
Retire when: the host caches float32 states of prefill alone, on the grid.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_exact.hooks.base import HOST_SCHEDULER, Unsupported, hook
from sglang_exact.hooks.prefill_grid import mamba_prefill_chunk_grid
from sglang_exact.reasons import Reason, Refused

logger = logging.getLogger(__name__)
_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_STATES = "sglang.srt.mem_cache.unified_cache.components.mamba.MambaComponent"
_BATCH = "sglang.srt.managers.schedule_batch"


@hook(
    f"{_STATES}.prepare_for_caching_req",
    "AFTER",
    name="prefix_insert",
    relies_on=(
        f"{_CACHE}.checkpoint_into_tree",
        f"{_STATES}.cleanup_after_caching_req",
        f"{_STATES}._select_finished_checkpoint",
        f"{_BATCH}.ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend",
        "sglang.srt.mem_cache.common.checkpoint_kv_cache",
        "sglang.srt.mem_cache.common.release_kv_cache",
        "sglang.srt.runtime_context.mamba_checkpoint_grid",
    ),
)
def keep_prefill_alone(
    result: int | None,
    self: Any,
    req: Any,
    insert_params: Any,
    token_ids_len: int,
    is_finished: bool,
) -> int | None:
    """After prepare_for_caching_req: tokens to keep, 0 unless at a cut of prefill.

    The host then gives back the state that it had put aside.
    """
    if not result:
        return result
    cut = result % mamba_prefill_chunk_grid() == 0
    return result if cut and result <= len(req.origin_input_ids) else 0


@hook(
    f"{_CACHE}.match_prefix",
    "AFTER",
    name="prefix_match",
    relies_on=(
        f"{_CACHE}._finalize_match_result",
        f"{_STATES}.create_match_validator",
        f"{_STATES}.finalize_match_result_in_cache",
        f"{_STATES}.finalize_match_result_in_tree_core",
        f"{_STATES}.redistribute_on_node_split",
        f"{_BATCH}.Req._compute_max_prefix_len",
        f"{_BATCH}.ScheduleBatch._collect_deferred_mamba_cow_and_clear",
    ),
)
def check_match(result: Any, self: Any, params: Any) -> None:
    """After match_prefix: a hit ends on the grid. Raises Unsupported."""
    hit, grid = int(result.device_prefix_len), mamba_prefill_chunk_grid()
    if hit % grid:
        raise Unsupported(
            f"prefix cache: found a hit of {hit} tokens; expected a multiple of "
            f"{grid}; fix: report this, and pass --disable-radix-cache"
        )


NO_STATES = Reason(
    "the prefix cache of a model without states",
    "none (keys that decode computed would be found in it)",
    "pass --disable-radix-cache",
)


def interval_reasons(interval: int, context_length: int) -> list[Reason]:
    """Reasons in the tokens between two states that decode would keep."""
    if interval > context_length:
        return []
    return [
        Reason(
            f"--mamba-track-interval {interval} with a context of {context_length}",
            "more than the context (decode's states are not prefill's)",
            "drop --mamba-track-interval; it is set for you",
        )
    ]


@hook(f"{HOST_SCHEDULER}.init_model_worker", "AFTER", name="prefix_interval")
def check_interval(result: None, self: Any) -> None:
    """After Scheduler.init_model_worker: decode keeps nothing. Raises Refused."""
    from sglang.srt.runtime_context import get_exec, get_memory

    if not get_memory().disable_radix_cache and mamba_prefill_chunk_grid() == 1:
        raise Refused([NO_STATES])
    mamba = get_exec().mamba
    if not mamba.enable_mamba_extra_buffer:
        return
    context = int(self.model_config.context_len)
    if reasons := interval_reasons(int(mamba.mamba_track_interval), context):
        raise Refused(reasons)


def room(scheduler: Any) -> dict[str, Any] | None:
    """What the attestation says of the cache; None where it is off.

    `states`: those of all running requests, at most `running`, and of prefixes.
    """
    from sglang.srt.runtime_context import get_exec, get_memory

    if get_memory().disable_radix_cache:
        return None
    pool, mamba = scheduler.tp_worker.model_runner.req_to_token_pool, get_exec().mamba
    return {
        "strategy": mamba.mamba_radix_cache_strategy,
        "interval": int(mamba.mamba_track_interval),
        "states": int(pool.mamba_allocator.size),
        "running": int(scheduler.max_running_requests),
    }
