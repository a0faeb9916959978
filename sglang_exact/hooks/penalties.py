# SPDX-License-Identifier: Apache-2.0
"""Penalties: one order of operations, never a token late, in every row of a block.

Why: plain decoding itself has three answers. Without overlap the penalizers change
    the logits in the order of a Python set, which differs between processes
    (orchestrator.py:72); with overlap they are summed first
    (sampling_batch_info.py:441). With overlap the last token is not known on the host
    yet, so the last but one is counted, and at the first step a prompt token
    (schedule_batch.py:3715); whether it lags depends on which other prompts arrive.
    Custom logit processors read the same late list. DFLASH and DSpark never count, the
    other drafters count one token of those that a block gave (eagle_utils.py:863), and
    every row of a block gets the penalties of its first (eagle_utils.py:560).
What: additive penalties are summed in float32 and added, then scaling ones applied,
    on every path. A batch with such a request has its last result taken before the
    next one is prepared, so counts hold every emitted token; other batches overlap
    as before. Row i of a block gets the penalties after the drafts before it, counted
    by the host's penalizers on copies: what plain decoding has there if they stand.
Scope: plain and speculative; overlap on and off. Requests without penalties, beside
    ones with them: the host adds zeros and divides by ones.
Retire when: the host counts tokens on the device and sums before it adds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sglang_exact.hooks.base import HOST_SCHEDULER, hook
from sglang_exact.hooks.requests import needs_last_token, uses_penalties

if TYPE_CHECKING:
    import torch

_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_PENALIZERS = "sglang.srt.sampling.penaltylib"
_NGRAM = "sglang.srt.speculative.ngram_worker.NGRAMWorker"
_MOVING = (
    "cumulated_frequency_penalties",
    "cumulated_presence_penalties",
    "cumulated_repetition_penalties",
    "len_output_tokens",
)
"""What the host's penalizers change when a token is counted, [bs, vocab] or [bs, 1]."""
_COUNTED = "_sglang_exact_counted"
"""On a request: how many of its emitted tokens its penalties hold."""


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
    live = self.penalizer_orchestrator
    if live is not None and live.is_required:
        apply(live.penalizers.values(), logits)
    else:
        _change(logits, self.acc_additive_penalties, self.acc_scaling_penalties)


def apply(penalizers: Iterable[Any], logits: torch.Tensor) -> None:
    """Penalise logits [bs, vocab] in place, as far as the penalizers have counted."""
    import torch

    additive = torch.zeros_like(logits, dtype=torch.float32)
    scaling = None
    for penalizer in penalizers:
        if not penalizer.is_prepared():
            continue
        if not penalizer.is_multiplicative:
            penalizer.apply(additive)
        elif scaling is None:
            scaling = penalizer.get_scaling_penalties()
        else:
            scaling = scaling * penalizer.get_scaling_penalties()
    _change(logits, additive, scaling)


def _change(logits: torch.Tensor, additive: Any, scaling: Any) -> None:
    from sglang.srt.sampling.penaltylib.repetition_penalty import (
        apply_scaling_penalties,
    )

    if additive is not None:
        logits.add_(additive)
    if scaling is not None:
        apply_scaling_penalties(logits, scaling)


def copies(orchestrator: Any) -> list[Any]:
    """The penalizers that are in use, to count on without the originals."""
    found = []
    for penalizer in orchestrator.penalizers.values():
        if penalizer.is_prepared():
            one = copy.copy(penalizer)
            for name, value in _moving(one):
                setattr(one, name, value.clone())
            found.append(one)
    return found


def _moving(penalizer: Any) -> list[tuple[str, torch.Tensor]]:
    names = (name for name in _MOVING if hasattr(penalizer, name))
    return [(name, getattr(penalizer, name)) for name in names]


def follow(
    penalizers: Sequence[Any], logits: torch.Tensor, drafts: torch.Tensor
) -> None:
    """Penalise every row of a block as after the drafts before it, in place.

    penalizers: `copies`, which hold the committed tokens, column 0 of drafts included;
    they count on. logits [bs * width, vocab] float32, drafts [bs, width].
    """
    import torch

    vocab = logits.shape[-1]
    rows = logits.view(*drafts.shape, vocab)
    # What a wrong draft counts is never looked at; out of range it would end the run.
    ids = drafts.to(torch.int64).clamp(0, vocab - 1)
    for step in range(drafts.shape[1]):
        if step:
            for penalizer in penalizers:
                penalizer.cumulate_output_tokens(ids[:, step])
        # Contiguous as in a decode step: compiled code may depend on strides.
        row = rows[:, step].contiguous()
        apply(penalizers, row)
        rows[:, step] = row


@hook(
    "sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens",
    "REPLACE",
    name="penalties_emitted",
    relies_on=tuple(
        f"{_PENALIZERS}.{module}.{name}._cumulate_output_tokens"
        for module, name in (
            ("frequency_penalty", "BatchedFrequencyPenalizer"),
            ("presence_penalty", "BatchedPresencePenalizer"),
            ("repetition_penalty", "BatchedRepetitionPenalizer"),
            ("min_new_tokens", "BatchedMinNewTokensPenalizer"),
        )
    ),
)
def count_emitted(self: Any) -> None:
    """Replace ScheduleBatch.cumulate_penalty_output_tokens: every token, once.

    A block may give several to one request and one to another.
    """
    new: list[Sequence[int]] = []
    for req in self.reqs:
        counted = getattr(req, _COUNTED, 0)
        new.append(req.output_ids[counted:] if uses_penalties(req) else ())
        setattr(req, _COUNTED, len(req.output_ids))
    penalizers = self.sampling_info.penalizer_orchestrator.penalizers.values()
    for step in range(max(map(len, new), default=0)):
        ids = [given[step] if step < len(given) else 0 for given in new]
        # What a request without penalties counts changes nothing.
        live = [
            step < len(given) or not uses_penalties(req)
            for given, req in zip(new, self.reqs, strict=True)
        ]
        _count(penalizers, ids, live, self.device)


def _count(
    penalizers: Iterable[Any], ids: list[int], live: list[bool], device: Any
) -> None:
    """Count one token of each request that is live, with the host's own penalizers."""
    import torch
    from sglang.srt.utils.common import is_pin_memory_available

    def upload(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        made = torch.tensor(
            values, dtype=dtype, pin_memory=is_pin_memory_available(device)
        )
        return made.to(device, non_blocking=True)

    tokens = upload(ids, torch.int64)
    kept = None if all(live) else upload(live, torch.bool).unsqueeze(1)
    for penalizer in penalizers:
        before = [] if kept is None else [(n, v.clone()) for n, v in _moving(penalizer)]
        penalizer.cumulate_output_tokens(output_ids=tokens)
        for name, value in before:
            counted = getattr(penalizer, name)
            setattr(penalizer, name, torch.where(kept, counted, value))


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
    "sglang.srt.managers.schedule_batch.ScheduleBatch.grammar_needs_sync",
    "AFTER",
    name="penalties_ngram",
    relies_on=(
        f"{_NGRAM}._prepare_draft_tokens",
        f"{_NGRAM}._update_ngram_corpus",
        f"{HOST_SCHEDULER}.is_disable_overlap_for_batch",
    ),
)
def results_are_in(result: bool, self: Any) -> bool:
    """After ScheduleBatch.grammar_needs_sync: whether no result of this batch waits.

    NGRAM asks this before it adds the last block to the tokens of a request. Where
    `take_last_result` took it, the block would stand there twice.
    """
    return result or (
        self.spec_algorithm.is_ngram() and any(map(needs_last_token, self.reqs))
    )


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
