# SPDX-License-Identifier: Apache-2.0
"""Nothing that decides bits changes under a request that is being served.

Why: a paused engine takes new weights while its requests keep the cache of the old
    ones (sglang/srt/managers/tokenizer_manager.py:2303), and set_internal_state can
    relax the acceptance rule of speculation
    (sglang/srt/managers/scheduler_components/internal_state.py:146). An update with
    "flush_cache": false, or one that failed half-way, leaves prefixes of the old
    weights in the cache (scheduler_components/weight_updater.py:107).
What: weight updates are refused, through the host's own answer, while any request is
    live; each one, and the end of a session, empties the prefix cache, whatever it asks
    for. Acceptance thresholds cannot be changed.
Scope: the control endpoints of a running server.
Retire when: never; this is the overlay's own contract.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_exact.hooks.base import HOST_SCHEDULER, Unsupported, hook
from sglang_exact.reasons import Reason, message

logger = logging.getLogger(__name__)
_UPDATER = (
    "sglang.srt.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager"
)
_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_ACCEPTANCE = (
    "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc",
)
LIVE = Reason(
    "a weight update while requests are live",
    "an idle server (an answer from two sets of weights is neither's)",
    'let the requests end or pause with {"mode": "abort"}, then update',
)


def _is_live(updater: Any) -> bool:
    # Requests that wait have no state yet, and finished ones need none any more.
    scheduler = updater.scheduler
    running = scheduler.collect_inflight_reqs()
    return scheduler.chunked_req is not None or any(not r.finished() for r in running)


def _empty_cache(tree: Any) -> None:
    """Drop every prefix; requests that wait hold none, and no others are live."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    if tree.disable:
        return
    tree.evict(EvictParams(num_tokens=int(tree.full_evictable_size())))
    if left := int(tree.total_size()[0]):
        raise Unsupported(
            f"found {left} tokens of the old weights in the prefix cache, expected it "
            "empty; fix: report this, and restart the server"
        )


@hook(
    f"{_UPDATER}.end_weight_update",
    "AROUND",
    name="live_changes_session_end",
    relies_on=(
        f"{_CACHE}.evict",
        f"{_CACHE}.total_size",
        "sglang.srt.mem_cache.base_prefix_cache.EvictParams",
    ),
)
@hook(
    f"{_UPDATER}.begin_weight_update",
    "AROUND",
    name="live_changes_session",
    relies_on=(
        f"{HOST_SCHEDULER}.collect_inflight_reqs",
        f"{_UPDATER}.update_weights_from_tensor",
        f"{_UPDATER}.update_weights_from_distributed",
    ),
)
@hook(f"{_UPDATER}.update_weights_from_ipc", "AROUND", name="live_changes_ipc")
@hook(f"{_UPDATER}.update_weights_from_disk", "AROUND", name="live_changes")
def update_while_idle(original_fn: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """Around each way to new weights: refused, in its own answer, while one is live.

    Updates from tensors and from a process group run only inside a session, whose end
    is refused as well. The prefix cache is emptied after each, even if it failed.
    """
    if not _is_live(self):
        result = original_fn(self, recv_req)
        _empty_cache(self.scheduler.tree_cache)
        return result
    from sglang.srt.managers import io_struct

    # Every message X...Input of the host has its X...Output.
    answer = getattr(io_struct, type(recv_req).__name__.replace("Input", "Output"))
    return answer(success=False, message=message([LIVE]))


@hook(f"{_UPDATER}.check_weights", "AROUND", name="live_changes_check")
def check_weights(original_fn: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """Around /weights_checker: it may look at weights, not reset them."""
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    if recv_req.action == "reset_tensors":
        reason = Reason(
            "/weights_checker with action 'reset_tensors'",
            "'checksum', 'snapshot' or 'compare' (random weights answer nothing)",
            "restart the server, or update its weights while it is idle",
        )
        return CheckWeightsReqOutput(success=False, message=message([reason]))
    return original_fn(self, recv_req)


@hook(
    "sglang.srt.managers.scheduler_components.internal_state."
    "SchedulerInternalStateController.set_internal_state",
    "AROUND",
    name="live_changes_state",
)
def set_internal_state(
    original_fn: Callable[..., Any], self: Any, recv_req: Any
) -> Any:
    """Around set_internal_state: the acceptance rule stays exact."""
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    asked = [
        f"{name}={recv_req.server_args[name]}"
        for name in _ACCEPTANCE
        if recv_req.server_args.get(name, 1.0) != 1.0
    ]
    if asked:
        reason = Reason(", ".join(asked), "1.0 (only equal tokens)", "leave it alone")
        logger.warning("%s", message([reason]))
        return SetInternalStateReqOutput(updated=False)
    return original_fn(self, recv_req)
