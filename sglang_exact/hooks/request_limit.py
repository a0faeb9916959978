# SPDX-License-Identifier: Apache-2.0
"""No more requests at once than decode attention takes, where nobody said how many.

Why: without --max-running-requests the host takes as many as its pools hold, up to
    4096 (sglang/srt/mem_cache/kv_cache_configurator.py:3119). Decode attention takes
    256 rows of requests; the next one would end the server.
What: the number that the host finds for itself is at most 256, and the log says so. A
    larger one that is given is refused at start (scope_model.size_reasons).
Scope: every target and draft.
Retire when: decode attention takes as many requests as the host's pools.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_exact.hooks.base import hook
from sglang_exact.scope_model import MAX_REQUESTS

logger = logging.getLogger(__name__)


@hook(
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs",
    "AFTER",
    name="request_limit",
)
def resolve_max_num_reqs(result: int, self: Any, token_capacity: int) -> int:
    """After the host's own: at most MAX_REQUESTS requests in a step."""
    if result <= MAX_REQUESTS:
        return result
    logger.info(
        "sglang_exact: %d requests at once, not %d: decode attention takes no more",
        MAX_REQUESTS,
        result,
    )
    return MAX_REQUESTS
