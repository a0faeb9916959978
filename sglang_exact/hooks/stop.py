# SPDX-License-Identifier: Apache-2.0
"""Stop conditions, checked after every token of an accepted block.

Why: the host checks a block once (sglang/srt/managers/schedule_batch.py:2007):
    stop strings before end tokens, strings in list order, over a tail that is longer
    by the block. An end token followed by a stop string, two stop strings, or a
    string that plain decoding cannot see end the request elsewhere.
What: the block is taken off and put back one token at a time; the host's own check
    runs after each, exactly as in plain decoding, until it says that the request is
    finished. Then the rest is put back (cache accounting counts it) and
    `finished_len` marks the end.
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
    if new_accepted_len <= 1 or self.finished() or self.to_finish:
        original_fn(self, new_accepted_len)
        return
    block = list(self.output_ids[-new_accepted_len:])
    before = len(self.output_ids) - new_accepted_len
    del self.output_ids[before:]
    for count, token in enumerate(block, start=1):
        self.output_ids.append(token)
        original_fn(self, 1)
        if self.finished():
            if self.finished_len is None:
                self.finished_len = before + count
            self.output_ids.extend(block[count:])
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
