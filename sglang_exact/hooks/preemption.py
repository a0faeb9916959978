# SPDX-License-Identifier: Apache-2.0
"""When KV slots run short, the youngest request waits in host memory, bit for bit.

Why: the host makes room by taking a request back and prefilling its answer anew
    (sglang/srt/managers/scheduler.py:4459, schedule_batch.py:3451), which moves bits.
    Reserving all that every request may ever need makes clients wait for room that
    nobody uses: without max_tokens that is the whole context.
What: `reservation` admits on what is needed soon. Before a decode step that does not
    fit, the result that is still in flight is processed; then the KV of the youngest
    request, target's and drafts', is copied to host memory by the host's own pools and
    its slots are given back, until the step fits. It keeps its row, states and place
    (`away`), so nothing of it is computed again. Before anybody new is admitted, those
    who are away come back, the oldest first, as soon as they fit beside the others with
    tokens to spare. The oldest of all is never sent away and always fits, so everybody
    comes back. No clock is read: all ranks decide alike.
Scope: every served KV pool and drafter. A request that is away can be aborted; it
    counts as live for weight updates, flushes and pauses. Who would not fit into host
    memory is not admitted in the first place; `retraction` is the second lock.
Retire when: the host preempts without recomputing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_exact.hooks import away, registered
from sglang_exact.hooks.base import HOST_SCHEDULER, hook
from sglang_exact.hooks.reservation import fits_soon

logger = logging.getLogger(__name__)
_BATCH = "sglang.srt.managers.schedule_batch"
_POOLS = "sglang.srt.mem_cache.memory_pool"
AHEAD = 256
"""Tokens that everybody can go on for, at least, after one came back."""
_metrics: dict[str, Any] = {}


@hook(
    f"{HOST_SCHEDULER}.init_overlap",
    "AFTER",
    name="preemption_room",
    relies_on=(
        f"{_POOLS}.MHATokenToKVPool.get_cpu_copy",
        f"{_POOLS}.MHATokenToKVPool.load_cpu_copy",
        f"{_POOLS}.HybridLinearKVPool.get_cpu_copy",
        f"{_POOLS}.HybridLinearKVPool.load_cpu_copy",
        "sglang.srt.speculative.base_spec_worker.BaseSpecWorker._draft_model_runners",
    ),
)
def open_room(result: None, self: Any) -> None:
    """After Scheduler.init_overlap: pools stand; how much host memory KV may take."""
    gib = registered.read().settings.preempt_gib
    if gib == 0:
        return
    away.open_room(self, gib)
    if self.metrics_reporter.current_scheduler_metrics_enabled:
        _publish()
    logger.info(
        "KV of up to %d tokens may wait in host memory (%.1f GiB a rank)",
        away.room.host_tokens,
        away.room.host_tokens * away.room.token_bytes / away.GIB,
    )


def _publish() -> None:
    """Counter and gauge in /metrics, of the rank whose metrics the host shows."""
    from prometheus_client import Counter, Gauge

    _metrics["sent"] = Counter(
        "sglang_exact:preempted_requests",
        "Requests whose KV was copied to host memory to make room.",
    )
    _metrics["away"] = Gauge(
        "sglang_exact:preempted_tokens_away",
        "Tokens whose KV waits in host memory.",
        multiprocess_mode="mostrecent",
    )


def _is_short(scheduler: Any, batch: Any) -> bool:
    """Whether the next decode step lacks slots; a prompt under way keeps its own."""
    tokens = batch.new_tokens_required_next_decode()
    if (prompt := scheduler.chunked_req) is not None:
        tokens += len(prompt.origin_input_ids) - prompt.kv.kv_allocated_len
    return not scheduler.token_to_kv_pool_allocator.check_decode_capacity(
        num_tokens=tokens,
        tree_cache=scheduler.tree_cache,
        requests=batch.reqs,
        spec_algorithm=batch.spec_algorithm,
    )


@hook(
    f"{HOST_SCHEDULER}.update_running_batch",
    "AROUND",
    name="preemption",
    relies_on=(
        f"{HOST_SCHEDULER}.event_loop_normal",
        f"{HOST_SCHEDULER}.event_loop_overlap",
        f"{HOST_SCHEDULER}.run_batch",
        f"{HOST_SCHEDULER}.get_next_batch_to_run",
        f"{_BATCH}.ScheduleBatch.filter_batch",
        f"{_BATCH}.ScheduleBatch.new_tokens_required_next_decode",
        "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator"
        ".check_decode_capacity",
        "sglang.srt.mem_cache.common.release_kv_cache",
        "sglang.srt.mem_cache.common.free_kv_row_segments",
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.filter_batch",
        "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator"
        ".filter",
    ),
)
def make_room(original_fn: Callable[..., Any], self: Any, batch: Any) -> Any:
    """Around update_running_batch: send the youngest away until the step fits.

    None skips decode for one turn of the loop, which then processes the last result.
    """
    if not _is_short(self, batch):
        return original_fn(self, batch)
    if self.enable_overlap and self.result_queue:
        return None
    while len(batch.reqs) > 1 and _is_short(self, batch):
        if not away.room.takes(batch.reqs[-1].kv.kv_allocated_len):
            break
        one = away.send(self, batch)
        batch.batch_is_full = False
        _tell(self, "sent to", one)
        if "sent" in _metrics:
            _metrics["sent"].inc()
    if self.chunked_req is not None and _is_short(self, batch):
        return None
    return original_fn(self, batch)


def _tell(scheduler: Any, what: str, one: away.Away) -> None:
    if "away" in _metrics:
        _metrics["away"].set(away.room.used())
    if scheduler.metrics_reporter.is_stats_logging_rank:
        logger.info(
            "request %s, %d tokens of KV: %s host memory; %d of %d tokens are away",
            one.req.rid,
            one.length,
            what,
            away.room.used(),
            away.room.host_tokens,
        )


def _comes_back(scheduler: Any, running: Any, one: away.Away) -> bool:
    """Whether one that is away fits, with AHEAD tokens for everybody who runs then."""
    live = [*running.reqs, scheduler.chunked_req]
    allocator = scheduler.token_to_kv_pool_allocator
    return fits_soon(
        one.req, [req for req in live if req is not None], int(allocator.size), AHEAD
    ) and allocator.check_decode_capacity(
        num_tokens=one.length, tree_cache=scheduler.tree_cache
    )


@hook(
    f"{HOST_SCHEDULER}.get_new_batch_prefill",
    "AROUND",
    name="preemption_return",
    relies_on=(
        f"{_BATCH}.ScheduleBatch.merge_batch",
        "sglang.srt.mem_cache.allocation.alloc_token_slots",
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.merge_batch",
    ),
)
def bring_back(original_fn: Callable[..., Any], self: Any, running_batch: Any) -> Any:
    """Around get_new_batch_prefill: who is away comes back before anybody new.

    A prompt under way goes on meanwhile; `reservation` admits nobody beside it.
    """
    for one in [one for one in away.room.away if one.req.to_finish]:
        _end(self, one)
    while away.room.away and _comes_back(self, running_batch, away.room.away[0]):
        one = away.room.away[0]
        away.fetch(self, one)
        _tell(self, "back from", one)
        if running_batch.is_empty():
            running_batch = one.batch
        else:
            running_batch.merge_batch(one.batch)
    if away.room.away and self.chunked_req is None:
        from sglang.srt.managers.schedule_batch import NextBatchPlan

        return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
    return original_fn(self, running_batch=running_batch)


def _end(scheduler: Any, one: away.Away) -> None:
    """End one that was aborted while away, as the host ends a running one."""
    req = one.req
    req.finished_reason, req.to_finish = req.to_finish, None
    away.drop(scheduler, one)
    if scheduler.draft_worker is not None:
        scheduler.draft_worker.note_request_finished(rid=req.rid, natural_stop=False)
    req.time_stats.set_completion_time()
    scheduler.output_streamer.stream_output([req], req.return_logprob)


@hook(
    f"{HOST_SCHEDULER}._collect_inflight_batches",
    "AFTER",
    name="preemption_live",
    relies_on=(
        f"{HOST_SCHEDULER}.abort_request",
        f"{HOST_SCHEDULER}.collect_inflight_reqs",
        f"{HOST_SCHEDULER}._poll_timeout_aborts",
    ),
)
def count_as_live(result: list[Any], self: Any) -> list[Any]:
    """After _collect_inflight_batches: with who is away, to abort or wait for."""
    return [*result, *(one.batch for one in away.room.away)]


@hook(
    f"{HOST_SCHEDULER}.is_fully_idle",
    "AFTER",
    name="preemption_idle",
    relies_on=(f"{HOST_SCHEDULER}.flush_cache", f"{HOST_SCHEDULER}.on_idle"),
)
def not_idle(
    result: bool,
    self: Any,
    for_health_check: bool = False,
    ignore_waiting: bool = False,
) -> bool:
    """After is_fully_idle: not while somebody is away."""
    return result and not away.room.away


@hook(
    "sglang.srt.managers.scheduler_components.internal_state."
    "SchedulerInternalStateController.get_internal_state",
    "AFTER",
    name="preemption_counts",
)
def add_counts(result: Any, self: Any, recv_req: Any) -> Any:
    """After get_internal_state: /server_info, internal_states[0], says who is away."""
    result.internal_state["sglang_exact_preemption"] = away.room.counts()
    return result
