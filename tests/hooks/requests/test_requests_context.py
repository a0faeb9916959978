# SPDX-License-Identifier: Apache-2.0
"""The end of the context: drafts take nothing of it, and nothing else either."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from sglang_exact.hooks import context_end

CONTEXT = 64
LAST = CONTEXT - 4
"""KV slots in use before the last step: the host answers up to CONTEXT - 2 tokens."""


@contextmanager
def _speculation(algorithm: str | None, tokens: int) -> Iterator[None]:
    """The host's settings of a server that verifies so many tokens."""
    from sglang.srt.managers import utils
    from sglang.srt.mem_cache import allocation_sizing as sizing

    spec = SimpleNamespace(
        speculative_algorithm=algorithm,
        speculative_num_steps=tokens - 1,
        speculative_eagle_topk=1,
    )
    given: dict[str, Any] = {
        "get_spec": lambda: spec,
        "max_speculative_num_draft_tokens": lambda: tokens if algorithm else None,
    }
    sized = {"get_alloc_page_size": lambda: 1}
    kept = []
    for module, names in ((utils, given), (sizing, given | sized)):
        for name, value in names.items():
            kept.append((module, name, getattr(module, name)))
            setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def test_no_context_is_kept_for_drafts() -> None:
    manager = SimpleNamespace(num_reserved_tokens=4)
    assert context_end.reserve_nothing(None, manager) is None
    assert manager.num_reserved_tokens == 0


def test_control_host_keeps_context_for_drafts() -> None:
    """Of EAGLE and MTP alone: as many tokens as are verified at once."""
    from sglang.srt.managers.utils import compute_num_reserved_tokens

    for algorithm, kept in (("EAGLE", 4), ("DFLASH", 0), ("NGRAM", 0), (None, 0)):
        with _speculation(algorithm, 4):
            assert compute_num_reserved_tokens() == kept


def _next_row(extra: int, tokens: int) -> Any:
    """What the last step of row 1 leaves in row 2, whose places are all -1."""
    from sglang.srt.mem_cache import allocation, allocation_sizing

    rows = torch.full((3, CONTEXT + extra), -1, dtype=torch.int32)
    kv = SimpleNamespace(kv_allocated_len=LAST, kv_committed_len=LAST)
    start, end, count = allocation_sizing.page_aligned_decode_alloc_lens(
        [SimpleNamespace(kv=kv)],
        reserve=allocation_sizing.get_alloc_reserve_per_decode(),
        page_size=1,
    )
    assert count == 2 * tokens
    allocation.assign_req_to_token_pool[(1,)](
        torch.tensor([1]),
        rows,
        torch.tensor(start, dtype=torch.int32),
        torch.tensor(end, dtype=torch.int32),
        torch.arange(count),
        rows.shape[1],
        1,
    )
    assert int((rows >= 0).sum()) == count
    return rows[2]


def test_rows_hold_what_a_step_reserves() -> None:
    from sglang.srt.mem_cache import allocation_sizing as sizing

    for tokens in range(2, 17):
        with _speculation("DFLASH", tokens):
            extra = sizing.get_req_to_token_extra_context_len()
            assert (_next_row(extra, tokens) == -1).all(), tokens
    with _speculation(None, 1):
        host = sizing.get_req_to_token_extra_context_len.__wrapped__
        assert sizing.get_req_to_token_extra_context_len() == host() == 4


def test_control_hosts_rows_spill_into_the_next() -> None:
    """From 9 tokens on; 16 of them overwrite eight places of a neighbour."""
    from sglang.srt.mem_cache import allocation_sizing as sizing

    host = sizing.get_req_to_token_extra_context_len.__wrapped__
    spilled = {}
    for tokens in range(2, 17):
        with _speculation("DFLASH", tokens):
            spilled[tokens] = int((_next_row(host(), tokens) >= 0).sum())
    assert [n for n, count in spilled.items() if count] == list(range(9, 17))
    assert spilled[16] == 8


def test_draft_steps_have_room_for_their_keys() -> None:
    """EAGLE's last draft step attends to the prefix and all drafts before it."""
    for tokens in range(2, 17):
        with _speculation("EAGLE", tokens):
            backend = SimpleNamespace(max_context_len=CONTEXT)
            assert context_end.draft_key_lists(None, backend, None, 1) is None
            assert backend.max_context_len >= LAST + 1 + tokens
