# SPDX-License-Identifier: Apache-2.0
"""A request sent to host memory and back, on the host's own pools and batches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from request_tools import VOCAB, batch_info, make_request

from sglang_exact.hooks import away, preemption

SLOTS, LENGTH, PROTECTED = 48, 10, 4
PENALTIES = {"frequency_penalty": 0.5, "repetition_penalty": 1.3, "presence_penalty": 0}
OUTPUT = torch.tensor([[5, 9, 11], [9, 9, 12]])
"""Tokens that three requests have emitted, a row a step."""


@pytest.fixture(autouse=True)
def empty_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(away, "room", away.Room())
    yield
    assert away.room.away == []


def kv_pool(seed: int, layers: int) -> Any:
    """A pool of the host, full of random numbers."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = MHATokenToKVPool(SLOTS, 1, torch.bfloat16, 2, 8, layers, "cpu", False)
    torch.manual_seed(seed)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape))
    return pool


class Tree:
    """The part of the prefix cache that a request goes through."""

    def __init__(self, allocator: Any, table: Any) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

        self.token_to_kv_pool_allocator = allocator
        self.req_to_token_pool = table
        self.unlocked: list[Any] = []
        self.released: list[Any] = []
        self.free_kv_row = partial(BasePrefixCache.free_kv_row, self)

    def unlock(self, lock: Any) -> None:
        self.unlocked.append(lock)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        self.released.append((req, checkpointed))

    def supports_prefix_sharing(self) -> bool:
        return False


def make_scheduler() -> Any:
    """Pools of a target of two layers and a draft of one."""
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    target, draft = kv_pool(1, 2), kv_pool(2, 1)
    allocator = TokenToKVPoolAllocator(SLOTS, torch.bfloat16, "cpu", target, False)
    table = ReqToTokenPool(4, 32, "cpu", False)
    runners = (SimpleNamespace(token_to_kv_pool=draft),)
    finished: list[str] = []
    return SimpleNamespace(
        device="cpu",
        token_to_kv_pool_allocator=allocator,
        req_to_token_pool=table,
        tree_cache=Tree(allocator, table),
        draft_worker=SimpleNamespace(
            _draft_model_runners=lambda: runners,
            note_request_finished=lambda rid, natural_stop: finished.append(rid),
        ),
        finished=finished,
        pools=(target, draft),
    )


def make_batch(scheduler: Any, count: int = 3) -> Any:
    """A batch between two steps; every request holds LENGTH slots."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

    reqs = [make_request(**PENALTIES) for _ in range(count)]
    info, _ = batch_info(reqs)
    for ids in OUTPUT:
        info.penalizer_orchestrator.cumulate_output_tokens(ids[:count])
    scheduler.req_to_token_pool.alloc(reqs)
    for i, req in enumerate(reqs):
        req.rid, req.lock = f"r{i}", f"lock {i}"
        slots = scheduler.token_to_kv_pool_allocator.alloc(LENGTH)
        place = (req.kv.req_pool_idx, slice(0, LENGTH))
        scheduler.req_to_token_pool.write(place, slots.int())
        req.kv.kv_committed_len = LENGTH - 2
        req.kv.kv_allocated_len = LENGTH
        req.kv.cache_protected_len = PROTECTED if i == count - 1 else 0
    rows = torch.tensor([req.kv.req_pool_idx for req in reqs])
    draft = DFlashDraftInputV2.create_idle_input("cpu")
    draft.future_indices = rows
    batch = ScheduleBatch(
        reqs=reqs,
        sampling_info=info,
        req_pool_indices=rows,
        req_pool_indices_cpu=rows,
        seq_lens=torch.arange(8, 8 + count),
        seq_lens_cpu=torch.arange(8, 8 + count),
        orig_seq_lens=torch.arange(8, 8 + count),
        model_config=SimpleNamespace(is_encoder_decoder=False),
        spec_info=draft,
        device="cpu",
    )
    info.penalizer_orchestrator.batch = batch
    return batch


def kv_bits(scheduler: Any, req: Any) -> list[Any]:
    """The KV of a request in every layer of every pool, as integers."""
    row = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :LENGTH].long()
    buffers = [b for p in scheduler.pools for b in (*p.k_buffer, *p.v_buffer)]
    return [buffer[row].view(torch.int16).clone() for buffer in buffers]


def penalised(batch: Any) -> Any:
    """What a step's penalties make of zeros, and of ones, as integers."""
    logits = torch.ones(len(batch.reqs), VOCAB)
    batch.sampling_info._apply_pre_grammar_logits_transforms(logits)
    return logits.view(torch.int32)


def same(first: list[Any], second: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("alone", [False, True])
def test_what_comes_back_has_the_bits_that_left(alone: bool) -> None:
    """Target and draft KV, penalties and places, though others took the slots."""
    scheduler = make_scheduler()
    batch = make_batch(scheduler)
    youngest = batch.reqs[-1]
    before, counted = kv_bits(scheduler, youngest), penalised(batch)
    free = scheduler.token_to_kv_pool_allocator.available_size()
    one = away.send(scheduler, batch)
    assert [req.rid for req in batch.reqs] == ["r0", "r1"]
    assert one.req is youngest
    assert youngest.lock is None
    assert scheduler.tree_cache.unlocked == ["lock 2"]
    # The tree's own slots are the tree's; they are evictable now.
    now = scheduler.token_to_kv_pool_allocator.available_size()
    assert now == free + LENGTH - PROTECTED
    assert torch.equal(penalised(batch), counted[:2])
    taken = scheduler.token_to_kv_pool_allocator.alloc(LENGTH)
    for pool in scheduler.pools:
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer[taken] = float("nan")
    away.fetch(scheduler, one)
    assert same(kv_bits(scheduler, youngest), before)
    if alone:
        assert torch.equal(penalised(one.batch), counted[2:])
        return
    batch.merge_batch(one.batch)
    assert [req.rid for req in batch.reqs] == ["r0", "r1", "r2"]
    assert torch.equal(penalised(batch), counted)
    assert batch.seq_lens.tolist() == [8, 9, 10]
    rows = [req.kv.req_pool_idx for req in batch.reqs]
    assert batch.req_pool_indices.tolist() == rows
    assert batch.spec_info.future_indices.tolist() == rows
    assert (youngest.kv.kv_committed_len, youngest.kv.kv_allocated_len) == (
        LENGTH - 2,
        LENGTH,
    )


def test_control_slots_hold_other_bits_without_the_copy() -> None:
    scheduler = make_scheduler()
    batch = make_batch(scheduler)
    before = kv_bits(scheduler, batch.reqs[-1])
    one = away.send(scheduler, batch)
    slots = scheduler.token_to_kv_pool_allocator.alloc(LENGTH)
    place = (one.req.kv.req_pool_idx, slice(0, LENGTH))
    scheduler.req_to_token_pool.write(place, slots.int())
    assert not same(kv_bits(scheduler, one.req), before)
    away.room.away.remove(one)


def test_size_of_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a token in all pools; memory in GiB of both ranks, or half of it."""
    from sglang.srt import runtime_context

    monkeypatch.setattr(
        runtime_context, "get_parallel", lambda: SimpleNamespace(tp_size=2)
    )
    monkeypatch.setattr(away, "host_memory", lambda: 4 * away.GIB)
    token = 3 * 2 * 2 * 8 * 2
    for gib in (None, 2.0):
        away.open_room(make_scheduler(), gib)
        assert away.room.facts() == {
            "host_tokens": away.GIB // token,
            "token_bytes": token,
        }
    assert away.room.takes(away.GIB // token)
    assert not away.room.takes(away.GIB // token + 1)


def test_memory_is_that_of_the_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    whole = away.host_memory()
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(away, "_LIMITS", (str(limit), str(tmp_path / "absent")))
    limit.write_text("max\n")
    assert away.host_memory() >= whole
    limit.write_text("4096\n")
    assert away.host_memory() == 4096


def test_aborted_while_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends as a running one does; row and states are free, its slots were."""
    scheduler = make_scheduler()
    batch = make_batch(scheduler)
    one = away.send(scheduler, batch)
    # Another one, older, that waits for room.
    other = away.send(scheduler, batch)
    monkeypatch.setattr(preemption, "_comes_back", lambda *unused: False)
    rows = scheduler.req_to_token_pool.available_size()
    slots = scheduler.token_to_kv_pool_allocator.available_size()
    streamed: list[Any] = []
    scheduler.output_streamer = SimpleNamespace(
        stream_output=lambda reqs, logprob: streamed.extend(reqs)
    )
    live = preemption.count_as_live([None, batch], scheduler)
    assert one.req in live[-1].reqs
    one.req.to_finish = end = SimpleNamespace(message="Aborted")
    scheduler.chunked_req = None
    plan = preemption.bring_back(
        lambda self, running_batch: "prefill", scheduler, batch
    )
    assert plan.batch_to_run is None, "nobody new is admitted"
    assert one.req.finished_reason is end
    assert streamed == [one.req]
    assert scheduler.finished == ["r2"]
    assert scheduler.tree_cache.released == [(one.req, False)]
    assert scheduler.req_to_token_pool.available_size() == rows + 1
    assert scheduler.token_to_kv_pool_allocator.available_size() == slots
    assert away.room.away == [other]
    assert [req.rid for req in preemption.count_as_live([], scheduler)[0].reqs] == [
        "r1"
    ]
    away.drop(scheduler, other)
    assert preemption.count_as_live([batch], scheduler) == [batch]
