# SPDX-License-Identifier: Apache-2.0
"""Requests whose KV waits in host memory, and what brings it there and back.

A request that is away keeps its row of the request table, its GDN states, convolution
windows and what the host relays from step to step by row: rows and states are there
for every request that may run, and nobody new is admitted while one is away. Only its
KV slots, of target and draft, are given to others; their contents are copied.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

GIB = 1 << 30
_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


@dataclass(frozen=True, eq=False)
class Away:
    """One request: its batch of one, and its KV of `length` slots, a copy a pool."""

    batch: Any
    copies: list[Any]
    length: int

    @property
    def req(self) -> Any:
        """The host's request."""
        return self.batch.reqs[0]


class Room:
    """Host memory for KV in this rank, who is there (oldest first), and counts.

    `host_tokens` is its size; 0 while nobody may be sent there.
    """

    def __init__(self) -> None:
        self.host_tokens = 0
        self.token_bytes = 0
        self.away: list[Away] = []
        self.sent = 0
        self.returned = 0
        self.tokens_sent = 0

    def used(self) -> int:
        """Tokens that are away."""
        return sum(one.length for one in self.away)

    def takes(self, length: int) -> bool:
        """Whether `length` more tokens may be sent away."""
        return self.used() + length <= self.host_tokens

    def facts(self) -> dict[str, int]:
        """What the attestation says of it: size in tokens, bytes a token."""
        return {"host_tokens": self.host_tokens, "token_bytes": self.token_bytes}

    def counts(self) -> dict[str, int]:
        """What /server_info says of it now."""
        return {
            **self.facts(),
            "preempted": self.sent,
            "preempted_tokens": self.tokens_sent,
            "returned": self.returned,
            "away": len(self.away),
            "away_tokens": self.used(),
        }


room = Room()
"""Of this process, which serves one scheduler; filled in when its pools stand."""


def open_room(scheduler: Any, gib: float | None) -> None:
    """Size the room: `gib` GiB for all ranks together; None takes half of what is.

    Every rank comes to the same size, since each decides for itself who is sent away.
    """
    import torch
    from sglang.srt.runtime_context import get_parallel

    slot = torch.zeros(1, dtype=torch.int64, device=scheduler.device)
    room.token_bytes = sum(_bytes(pool.get_cpu_copy(slot)) for pool in pools(scheduler))
    total = host_memory() // 2 if gib is None else int(gib * GIB)
    room.host_tokens = total // int(get_parallel().tp_size) // room.token_bytes


def host_memory() -> int:
    """Bytes of memory that this host, or its container, may use; equal on all ranks."""
    import psutil

    found = [int(psutil.virtual_memory().total)]
    for path in _LIMITS:
        found += _limit(path)
    return min(found)


def _limit(path: str) -> list[int]:
    try:
        with open(path) as file:
            text = file.read().strip()
    except FileNotFoundError:
        return []
    return [int(text)] if text.isdecimal() else []


def _bytes(copies: Any) -> int:
    """Bytes of a pool's copy, which is tensors in nested lists and tuples."""
    if isinstance(copies, list | tuple):
        return sum(map(_bytes, copies))
    return 0 if copies is None else int(copies.nbytes)


def pools(scheduler: Any) -> Iterator[Any]:
    """The KV pools whose slots a request holds: the target's, and each draft's."""
    yield scheduler.token_to_kv_pool_allocator.get_kvcache()
    if scheduler.draft_worker is not None:
        for runner in scheduler.draft_worker._draft_model_runners():
            yield runner.token_to_kv_pool


def send(scheduler: Any, batch: Any) -> Away:
    """Copy the KV of the batch's last request out and give its slots back.

    No result of the batch may wait to be processed: KV, states and the tokens that the
    request has are those of one step.
    """
    one = Away(split_last(batch), [], batch.reqs[-1].kv.kv_allocated_len)
    kv, slots = one.req.kv, _row(scheduler, one)
    for pool in pools(scheduler):
        one.copies.append(pool.get_cpu_copy(slots))
    tree = scheduler.tree_cache
    tree.free_kv_row(kv, [(kv.cache_protected_len, one.length)])
    tree.unlock(one.req.lock)
    # What it comes back to is its own: it holds nothing of the tree any more.
    one.req.lock = one.req.last_node = None
    kv.cache_protected_len = kv.cache_inserted_len = 0
    batch.filter_batch(keep_indices=list(range(len(batch.reqs) - 1)))
    room.away.insert(0, one)
    room.sent += 1
    room.tokens_sent += one.length
    return one


def fetch(scheduler: Any, one: Away) -> None:
    """Give one that is away new slots, with the KV it had, and its place in a batch."""
    from sglang.srt.mem_cache.allocation import alloc_token_slots

    slots = alloc_token_slots(scheduler.tree_cache, one.length)
    place = (one.req.kv.req_pool_idx, slice(0, one.length))
    table = scheduler.req_to_token_pool.req_to_token
    scheduler.req_to_token_pool.write(place, slots.to(table.dtype))
    row = _row(scheduler, one)
    for pool, copied in zip(pools(scheduler), one.copies, strict=True):
        pool.load_cpu_copy(copied, row)
    room.away.remove(one)
    room.returned += 1


def drop(scheduler: Any, one: Away) -> None:
    """Forget one that is away: its row and states are free again."""
    tree, req = scheduler.tree_cache, one.req
    tree.on_release(req, checkpointed=False)
    scheduler.req_to_token_pool.free(req)
    req.kv.mark_kv_released()
    room.away.remove(one)


def _row(scheduler: Any, one: Away) -> torch.Tensor:
    table = scheduler.req_to_token_pool.req_to_token
    slots: torch.Tensor = table[one.req.kv.req_pool_idx, : one.length].long()
    return slots


def split_last(batch: Any) -> Any:
    """A batch of the last request alone; `batch` still has them all.

    What the host filters in place is copied first, so that nothing is shared.
    """
    one = copy.copy(batch)
    one.sampling_info = _own_sampling(batch.sampling_info, one)
    one.spec_info = copy.copy(batch.spec_info)
    one.filter_batch(keep_indices=[len(batch.reqs) - 1])
    one.batch_is_full = False
    return one


def _own_sampling(info: Any, batch: Any) -> Any:
    """A copy of the sampling parameters whose penalizers are of `batch`."""
    own = copy.copy(info)
    own.penalizer_orchestrator = orchestrator = copy.copy(info.penalizer_orchestrator)
    orchestrator.batch = batch
    orchestrator.penalizers = {}
    for kind, penalizer in info.penalizer_orchestrator.penalizers.items():
        orchestrator.penalizers[kind] = mine = copy.copy(penalizer)
        mine._orchestrator_ref = weakref.ref(orchestrator)
    return own
