# SPDX-License-Identifier: Apache-2.0
"""A request starts when it fits beside the others, and all of them can end.

Why: the host admits requests on a guess of how long their answers get
    (sglang/srt/managers/schedule_policy.py:746, at most 4096 tokens each), and when
    the guess fails it takes a request back and prefills its answer anew. Prefill and
    decode differ in bits, so an answer would depend on memory pressure.
What: what all live requests hold now, their next steps included, stays within the KV
    pool, and so does all that they may ever need (prompt + max_new_tokens + what a
    verify step holds in reserve), or it stays within the pool and the host memory that
    `preemption` sends requests to. There the largest of them counts twice: one is sent
    away whole, however little is missing. A request that does not fit waits, and so
    does everybody new while one is away. At start-up the pool must hold one request of
    the full context, so that none waits for ever and none is cut short by the pool
    (sglang/srt/managers/scheduler.py:2723). Tokens of the prefix cache that no request
    of these holds are evicted for them.
Scope: KV pools of one size (no sliding-window or shared pools).
Retire when: the host can be told to never retract.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from sglang_exact.hooks import away
from sglang_exact.hooks.base import HOST_SCHEDULER, hook
from sglang_exact.reasons import Reason, Refused

logger = logging.getLogger(__name__)
ALLOCATOR = "TokenToKVPoolAllocator"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"


def slack() -> int:
    """KV slots that one request may hold beyond prompt and answer.

    The host reserves two blocks per step (allocation_sizing.py:64); one more covers
    the block that ends the request, and one the step that overlap scheduling starts
    before it knows the end.
    """
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_len_per_decode

    return 4 * int(get_alloc_len_per_decode())


def need(req: Any) -> int:
    """KV slots that a request of the host holds at most, from start to end."""
    return len(req.origin_input_ids) + int(req.sampling_params.max_new_tokens) + slack()


def soon(req: Any, ahead: int) -> int:
    """KV slots that a request holds until `ahead` tokens from now, at most."""
    done = len(req.origin_input_ids) + len(req.output_ids)
    return min(done + ahead + slack(), need(req))


def _group(req: Any, live: Iterable[Any]) -> list[Any]:
    return list({id(one): one for one in (*live, req)}.values())


def fits_soon(req: Any, live: Iterable[Any], capacity: int, ahead: int = 0) -> bool:
    """Whether `req` fits beside `live` now, in a pool of `capacity` slots."""
    return sum(soon(one, ahead) for one in _group(req, live)) <= capacity


def fits(req: Any, live: Iterable[Any], capacity: int, host: int) -> bool:
    """Whether `req` and `live` can all end: `host` more slots' KV can be put aside."""
    needs = [need(one) for one in _group(req, live)]
    return min(sum(needs), sum(needs) + max(needs) - host) <= capacity


@hook(
    f"{_ADDER}.add_one_req",
    "AROUND",
    name="reservation",
    relies_on=(
        "sglang.srt.mem_cache.allocation_sizing.get_alloc_len_per_decode",
        "sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode",
        f"{HOST_SCHEDULER}.init_req_max_new_tokens",
        f"{HOST_SCHEDULER}._get_new_batch_prefill_raw",
    ),
)
def add_one_req(
    original_fn: Callable[..., Any],
    self: Any,
    req: Any,
    has_chunked_req: bool,
    truncation_align_size: int | None,
) -> Any:
    """Around each admission: NO_TOKEN unless the request fits, and all can end."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    running = self.running_batch.reqs if self.running_batch is not None else []
    capacity = int(self.token_to_kv_pool_allocator.size)
    live, host = [*running, *self.can_run_list], away.room.host_tokens
    if away.room.away or not (
        fits_soon(req, live, capacity) and fits(req, live, capacity, host)
    ):
        return AddReqResult.NO_TOKEN
    return original_fn(
        self,
        req,
        has_chunked_req=has_chunked_req,
        truncation_align_size=truncation_align_size,
    )


def pool_reasons(capacity: int, context_length: int, reserve: int) -> list[Reason]:
    """Reasons why a KV pool of `capacity` slots cannot keep the promise."""
    if capacity >= context_length + reserve:
        return []
    return [
        Reason(
            f"a KV pool of {capacity} tokens for a context of {context_length}",
            f"at least {context_length + reserve} tokens, so that memory never ends "
            "or cuts a request",
            f"pass --context-length {max(capacity - reserve, 0)} or less, or raise "
            "--mem-fraction-static",
        )
    ]


@hook(f"{HOST_SCHEDULER}.init_model_worker", "AFTER", name="reservation_pool")
def check_pool(result: None, self: Any) -> None:
    """After Scheduler.init_model_worker: the pool holds one request of any length.

    Raises Refused, also where slots cannot be counted one by one.
    """
    allocator = self.tp_worker.model_runner.token_to_kv_pool_allocator
    kind = type(allocator).__name__
    if kind != ALLOCATOR:
        raise Refused(
            [
                Reason(
                    f"KV slots from {kind}",
                    f"{ALLOCATOR}, whose slots can be counted",
                    "drop --page-size, --enable-unified-memory and other flags that "
                    "choose a KV pool",
                )
            ]
        )
    capacity = int(allocator.size)
    context = int(self.model_config.context_len)
    reasons = pool_reasons(capacity, context, slack())
    if reasons:
        raise Refused(reasons)
    full = capacity // (context + slack())
    if full < self.max_running_requests:
        logger.info(
            "KV pool of %d tokens: %d of %d concurrent requests if all fill the "
            "context of %d; what does not fit beside the others waits",
            capacity,
            full,
            self.max_running_requests,
            context,
        )
