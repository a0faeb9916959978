# SPDX-License-Identifier: Apache-2.0
"""A drafter changes nothing at the end of the context.

Why: the host takes the drafts of EAGLE and MTP off the context that a request may use
    (sglang/srt/managers/utils.py:484), so requests that plain decoding answers get a
    400. And near the end it reserves more KV slots than a request's row has places for
    (mem_cache/allocation_sizing.py:105 against :70, from 9 draft tokens on): what is
    past the end of the row is written to the first places of the next request's.
What: nothing is taken off; rows, and the key lists of EAGLE's draft steps, get room for
    all that a step may reserve.
Scope: every drafter.
Retire when: the host sizes rows by what it reserves, and takes nothing off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_exact.hooks.base import MAIN, TOKENIZER_MANAGER, hook
from sglang_exact.hooks.reservation import slack

_SIZING = "sglang.srt.mem_cache.allocation_sizing"


@hook(
    f"{TOKENIZER_MANAGER}.init_model_config",
    "AFTER",
    name="context_end",
    roles=(MAIN,),
    relies_on=(
        "sglang.srt.managers.utils.compute_num_reserved_tokens",
        "sglang.srt.utils.common.reserve_rope_cache_for_long_sequences",
    ),
)
def reserve_nothing(result: None, self: Any) -> None:
    """After TokenizerManager.init_model_config: the whole context is the request's."""
    self.num_reserved_tokens = 0


@hook(
    f"{_SIZING}.get_req_to_token_extra_context_len",
    "AROUND",
    name="context_end_rows",
    relies_on=(
        f"{_SIZING}.page_aligned_decode_alloc_lens",
        f"{_SIZING}.get_alloc_reserve_per_decode",
        "sglang.srt.speculative.dflash_info_v2.DFlashDraftInputV2.prepare_for_decode",
        "sglang.srt.speculative.eagle_utils.eagle_prepare_for_decode",
    ),
)
def row_headroom(original_fn: Callable[[], int]) -> int:
    """Around get_req_to_token_extra_context_len: places of a row past the context."""
    return max(int(original_fn()), slack())


@hook(
    "sglang.srt.layers.attention.triton_backend.TritonMultiStepDraftBackend.__init__",
    "AFTER",
    name="context_end_drafts",
)
def draft_key_lists(result: None, self: Any, *args: Any, **kwargs: Any) -> None:
    """After TritonMultiStepDraftBackend.__init__: drafts lie past the context, too."""
    self.max_context_len += slack()
