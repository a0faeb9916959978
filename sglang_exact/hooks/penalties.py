# SPDX-License-Identifier: Apache-2.0
"""Penalties: one order of operations, and never a token late.

Why: plain decoding itself has three answers. Without overlap the penalizers change
    the logits in the order of a Python set, which differs between processes
    (orchestrator.py:72); with overlap they are summed first
    (sampling_batch_info.py:441). With overlap the last token is not known on the host
    yet, so the last but one is counted, and at the first step a prompt token
    (schedule_batch.py:3715); whether it lags depends on which other prompts arrive.
    Custom logit processors read the same late list. DFLASH and DSpark never count.
What: additive penalties are summed in float32 and added, then scaling ones applied,
    on every path. A batch with such a request has its last result taken before the
    next one is prepared, so counts hold every emitted token; other batches overlap
    as before. DFLASH and DSpark count as the host's other drafters do.
Scope: plain and speculative; overlap on and off. Requests without penalties, beside
    ones with them: the host adds zeros and divides by ones.
Retire when: the host counts tokens on the device and sums before it adds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_exact.hooks.base import HOST_SCHEDULER, hook
from sglang_exact.hooks.requests import needs_last_token

if TYPE_CHECKING:
    import torch

_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_PENALIZERS = "sglang.srt.sampling.penaltylib"


@hook(
    f"{_INFO}._apply_pre_grammar_logits_transforms",
    "REPLACE",
    name="penalties_order",
    relies_on=(
        f"{_INFO}.update_penalties",
        f"{_INFO}.copy_for_forward",
        f"{_PENALIZERS}.orchestrator.BatchedPenalizerOrchestrator"
        ".accumulate_additive_penalties",
        f"{_PENALIZERS}.orchestrator.BatchedPenalizerOrchestrator"
        ".accumulate_scaling_penalties",
    ),
)
def add_then_scale(self: Any, logits: torch.Tensor) -> None:
    """Replace _apply_pre_grammar_logits_transforms; logits [rows, vocab] in place."""
    from sglang.srt.sampling.penaltylib.repetition_penalty import (
        apply_scaling_penalties,
    )

    additive, scaling = self.acc_additive_penalties, self.acc_scaling_penalties
    live = self.penalizer_orchestrator
    if live is not None and live.is_required:
        additive, scaling = _accumulate(live, logits)
    if additive is not None:
        logits.add_(additive)
    if scaling is not None:
        apply_scaling_penalties(logits, scaling)


def _accumulate(orchestrator: Any, logits: torch.Tensor) -> tuple[Any, Any]:
    import torch

    additive = torch.zeros_like(logits, dtype=torch.float32)
    orchestrator.accumulate_additive_penalties(additive)
    return additive, orchestrator.accumulate_scaling_penalties()


@hook(
    f"{HOST_SCHEDULER}.get_next_batch_to_run",
    "BEFORE",
    name="penalties_last_token",
    relies_on=(
        f"{HOST_SCHEDULER}.event_loop_overlap",
        "sglang.srt.managers.schedule_batch.ScheduleBatch"
        ".cumulate_penalty_output_tokens",
    ),
)
def take_last_result(self: Any, running_batch: Any, last_batch: Any) -> None:
    """Before Scheduler.get_next_batch_to_run: no result of a counted request waits.

    The loop pops the last result itself while `last_batch` is set; it is taken here.
    """
    if not self.enable_overlap or not self.result_queue:
        return
    if not any(
        needs_last_token(req) for batch, _ in self.result_queue for req in batch.reqs
    ):
        return
    while self.result_queue:
        batch, result = self.result_queue.popleft()
        self.process_batch_result(batch, result)
    self.last_batch = None


@hook(
    "sglang.srt.speculative.dflash_info_v2.DFlashDraftInputV2.prepare_for_decode",
    "BEFORE",
    name="penalties_count",
    relies_on=("sglang.srt.speculative.eagle_utils.eagle_prepare_for_decode",),
)
def count_tokens(self: Any, batch: Any) -> None:
    """Before DFlashDraftInputV2.prepare_for_decode: count the last emitted token."""
    if batch.sampling_info.penalizer_orchestrator.is_required:
        batch.cumulate_penalty_output_tokens()
