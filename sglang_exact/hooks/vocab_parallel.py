# SPDX-License-Identifier: Apache-2.0
"""One argmax over the whole vocabulary, with and without logprobs.

Why: with several ranks the host may leave a verify block's logits in shards and take
    the argmax of each shard in a kernel of its own (sglang/srt/layers/
    logits_processor.py:1103, dflash_worker_v2.py:629), but only while no request of
    the batch asks for logprobs. Plain decoding gathers and takes torch.argmax. The
    two differ on NaN, and the shard's softcap is computed by another kernel. The test
    for penalties reads a field that no object has, so it lets penalised requests in.
What: the shards are gathered for every block; then argmax as in plain decoding,
    lowest id on ties, also across the edge of two shards.
Scope: DFLASH and DFlash2 at tensor parallel 2. Targets without softcap and with bf16
    logits, which are all that are served, gather before anyway.
Retire when: the host's shard argmax is the argmax of its plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_exact.hooks.base import hook

_PROCESSOR = "sglang.srt.layers.logits_processor.LogitsProcessor"


@hook(
    "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._can_skip_verify_logits",
    "AROUND",
    name="vocab_parallel",
    relies_on=(
        f"{_PROCESSOR}._gather_softcap_fused",
        f"{_PROCESSOR}._gather_attn_tp_logits",
        "sglang.srt.layers.vocab_parallel_embedding.VocabParallelEmbedding.forward",
        "sglang.srt.distributed.parallel_state.GroupCoordinator.all_reduce",
    ),
)
def never_skip(
    original_fn: Callable[..., bool], self: Any, batch: Any, sampling_info: Any
) -> bool:
    """Around DFlashWorkerV2._can_skip_verify_logits: gather the logits, always."""
    return False
