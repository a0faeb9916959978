# SPDX-License-Identifier: Apache-2.0
"""The prefix cache is on where memory has room for it beside those who run.

Why: a request takes five states with the cache and one without, and the host then
    gives them mamba_full_memory_ratio of the memory that is left
    (sglang/srt/mem_cache/kv_cache_configurator.py:3338), whatever remains: on a small
    GPU few requests run (resolve_max_num_reqs), or the longest does not fit.
What: pools are sized with the cache. Where that leaves fewer than FEWEST requests, or
    than --max-running-requests if those are less, or no room for one of the full
    context, the cache is turned off and they are sized without it; a line in the log
    says so, and the rank attests none. --max-mamba-cache-size insists: it is not
    looked at. A model without states has no cache: keys that decode computed would be
    found in it.
Scope: targets; before anything is allocated, and the same on every rank, which
    size by the least memory among them.
Retire when: the cache takes no more states than there are prefixes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_exact.hooks.base import hook
from sglang_exact.hooks.reservation import pool_reasons, slack

logger = logging.getLogger(__name__)
_POOLS = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
FEWEST = 8
"""Requests at once that the cache may cost no one."""


def lacking(running: int, wanted: int | None, tokens: int, context: int) -> str:
    """What the cache leaves too little of, as text; "" if nothing.

    running, tokens: of the pools; wanted: --max-running-requests, if given.
    """
    least = min(wanted or FEWEST, FEWEST)
    if running < least:
        return f"{running} running requests, expected {least}"
    if pool_reasons(tokens, context, slack()):
        return f"a KV pool of {tokens} tokens, expected the context of {context}"
    return ""


@hook(
    f"{_POOLS}._resolve_memory_pool_config",
    "AROUND",
    name="prefix_room",
    relies_on=(
        f"{_POOLS}._calculate_mamba_ratio",
        f"{_POOLS}._handle_max_mamba_cache",
        f"{_POOLS}._profile_available_bytes",
        f"{_POOLS}.configure",
        f"{_POOLS}.resolve_max_num_reqs",
        "sglang.srt.runtime_context.RuntimeContext.override",
        "sglang.srt.runtime_context._ConfigBag",
        "sglang.srt.arg_groups.model_override_base.mamba_extra_buffer_of",
    ),
)
def make_room(
    original_fn: Callable[..., Any], self: Any, pre_model_load_memory: int
) -> Any:
    """Around _resolve_memory_pool_config: pools with the cache, or else without."""
    from sglang.srt.runtime_context import get_memory, get_schedule

    schedule = get_schedule()
    hybrid = self.mambaish_config is not None
    insists = hybrid and schedule.max_mamba_cache_size is not None
    if insists or get_memory().disable_radix_cache:
        return original_fn(self, pre_model_load_memory=pre_model_load_memory)
    if not hybrid:
        logger.info("no prefix cache: found a model without states to keep")
        _turn_off()
        return original_fn(self, pre_model_load_memory=pre_model_load_memory)
    try:
        found = original_fn(self, pre_model_load_memory=pre_model_load_memory)
        lacks = lacking(
            int(found.max_running_requests),
            schedule.max_running_requests,
            int(found.max_total_num_tokens),
            int(self.model_config.context_len),
        )
    except (RuntimeError, ValueError) as error:
        # The host's words for no room at all; without the cache it may have some.
        found, lacks = None, str(error)
    if not lacks:
        return found
    logger.warning(
        "no prefix cache: found room beside it for %s; for a cache all the same pass "
        "--max-mamba-cache-size",
        lacks,
    )
    _turn_off()
    return original_fn(self, pre_model_load_memory=pre_model_load_memory)


def _turn_off() -> None:
    """What the arguments would have said with --disable-radix-cache."""
    from sglang.srt.runtime_context import get_context, get_exec

    get_context().override(
        "sglang_exact.prefix_room", disable_radix_cache=True, max_mamba_cache_size=None
    )
    # Worked out from the arguments before; nothing has read it yet.
    mamba = get_exec().mamba
    mamba._set("enable_mamba_extra_buffer", False)
    mamba._set("enable_mamba_extra_buffer_lazy", False)
