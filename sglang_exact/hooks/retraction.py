# SPDX-License-Identifier: Apache-2.0
"""A request that the host takes back ends with an error; it is never recomputed.

Why: a retracted request is prefilled again together with the tokens it has generated
    (sglang/srt/managers/schedule_batch.py:3451), and prefill's chunk kernels do not
    have decode's bits. Pausing in mode `retract` does the same to every request
    (sglang/srt/managers/scheduler.py:5817).
What: retract_decode hands its requests to the host's own abort path, with status 503.
    Pausing in mode `retract` is refused with status 400; `in_place` and `abort` stay.
Scope: decode batches and the pause endpoint. With the reservation of KV slots no
    request should get here; this is the second lock.
Retire when: the host can be told to never retract.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from sglang_exact.hooks.base import HOST_SCHEDULER, MAIN, TOKENIZER_MANAGER, hook
from sglang_exact.reasons import Reason, Refused, message

RETRACTED = (
    "found a request taken back for lack of KV memory; expected to run it to its end "
    "(recomputing it would change its bits); fix: send it again, or serve with fewer "
    "--max-running-requests or a smaller --context-length"
)
PAUSE = Reason(
    "pause_generation with mode 'retract'",
    "'in_place' or 'abort' (recomputing an answer by prefill changes its bits)",
    'send {"mode": "in_place"}, or {"mode": "abort"} before a weight update',
)


@hook(
    "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode",
    "AFTER",
    name="retraction",
    relies_on=(
        f"{HOST_SCHEDULER}.update_running_batch",
        "sglang.srt.managers.schedule_batch.release_req",
    ),
)
def retract_decode(
    result: tuple[list[Any], float, list[Any]], self: Any
) -> tuple[list[Any], float, list[Any]]:
    """After ScheduleBatch.retract_decode: what it retracted is aborted instead.

    Returns (retracted, new token ratio, to abort) as the host does; the first list
    is empty.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    retracted, ratio, to_abort = result
    for req in retracted:
        req.to_finish = FINISH_ABORT(RETRACTED, HTTPStatus.SERVICE_UNAVAILABLE)
    return [], ratio, [*to_abort, *retracted]


@hook(
    f"{TOKENIZER_MANAGER}.pause_generation",
    "AROUND",
    name="retraction_pause",
    roles=(MAIN,),
)
async def refuse_pause(
    original_fn: Callable[..., Awaitable[None]], self: Any, obj: Any
) -> None:
    """Around TokenizerManager.pause_generation: refuse mode `retract`."""
    if obj.mode == "retract":
        from fastapi import HTTPException

        raise HTTPException(HTTPStatus.BAD_REQUEST, message([PAUSE]))
    await original_fn(self, obj)


@hook(f"{HOST_SCHEDULER}.pause_generation", "BEFORE", name="retraction_pause_rank")
def guard_pause(self: Any, recv_req: Any) -> None:
    """Before Scheduler.pause_generation: mode `retract` cannot come this far."""
    if recv_req.mode == "retract":
        raise Refused([PAUSE])
