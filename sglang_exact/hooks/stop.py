# SPDX-License-Identifier: Apache-2.0
"""Stop conditions, checked after every token of an accepted block.

Why: the host checks a block once (sglang/srt/managers/schedule_batch.py:2007):
    stop strings before end tokens, strings in list order, over a tail that is longer
    by the block. An end token followed by a stop string, two stop strings, or a
    string that plain decoding cannot see end the request elsewhere. A request that
    is being aborted is not checked at all, and returns its whole last block, past
    its end token and past max_new_tokens.
What: the block is taken off and put back one token at a time; the host's own check
    runs after each, exactly as in plain decoding, until it says that the request is
    finished. Then the rest is put back (cache accounting counts it) and
    `finished_len` marks the end. An aborted request is checked too, and stays
    aborted: what it returns is the start of plain decoding's answer.
Scope: every request, all drafters; a block of one token goes straight to the host.
Retire when: the host checks accepted tokens one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_exact.hooks.base import Hook

_REQ = "sglang.srt.managers.schedule_batch.Req"


def stop_token_by_token(
    original_fn: Callable[..., None], self: Any, new_accepted_len: int = 1
) -> None:
    """Around Req.update_finish_state: one host check per accepted token."""
    if new_accepted_len <= 1 or self.finished():
        original_fn(self, new_accepted_len)
        return
    abort, self.to_finish = self.to_finish, None
    _check_each(original_fn, self, new_accepted_len)
    if abort:
        self.finished_reason = abort


def _check_each(original_fn: Callable[..., None], req: Any, count: int) -> None:
    """Check the last `count` output ids, one at a time, until one is the end."""
    block = list(req.output_ids[-count:])
    before = len(req.output_ids) - count
    del req.output_ids[before:]
    for seen, token in enumerate(block, start=1):
        req.output_ids.append(token)
        original_fn(req, 1)
        if req.finished():
            if req.finished_len is None:
                req.finished_len = before + seen
            req.output_ids.extend(block[seen:])
            return


HOOK = Hook(
    name="stop_token_by_token",
    target=f"{_REQ}.update_finish_state",
    kind="AROUND",
    replacement=stop_token_by_token,
    relies_on=(
        f"{_REQ}._check_str_based_finish",
        f"{_REQ}._check_token_based_finish",
        f"{_REQ}._check_vocab_boundary_finish",
        f"{_REQ}._cap_finished_len_at_max_new_tokens",
        f"{_REQ}.tail_str",
    ),
    speculative=True,
)
