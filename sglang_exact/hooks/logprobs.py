# SPDX-License-Identifier: Apache-2.0
"""Top-k logprobs with a stated tie rule: higher value first, then the lower id.

Why: the host calls torch.topk (sglang/srt/layers/logprob_processor.py:106, 241, 246),
    which picks its algorithm by the number of rows and leaves the order of equal
    values, and which of them are listed, to it. Plain decoding has bs rows, verify
    bs * draft_tokens, prompt logprobs as many as the chunk; bf16 logits tie often.
What: value and id are packed into one int64 key per entry; keys are distinct, so
    every algorithm returns the same k of them in the same order. The values are
    gathered back and keep their bits.
Scope: output and prompt top-k logprobs, plain and speculative.
Retire when: torch.topk has a tie rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_exact.hooks.base import hook, refuse_unknown

if TYPE_CHECKING:
    import torch

_MODULE = "sglang.srt.layers.logprob_processor"
_LOW_BITS = 0xFFFFFFFF
_ROWS_AT_ONCE = 16
"""Bounds the int64 scratch to 16 vocabularies; rows do not see each other."""


def top_k(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest entries of each row and their ids, ties to the lower id.

    values: [rows, vocab], any float type that float32 holds exactly. Returns
    ([rows, k] of the same dtype, [rows, k] int64). -0.0 and 0.0 tie; NaN with a
    clear sign bit is largest.
    """
    import torch

    starts = range(0, max(values.shape[0], 1), _ROWS_AT_ONCE)
    parts = [_top_k(values[i : i + _ROWS_AT_ONCE], k) for i in starts]
    return torch.cat([v for v, _ in parts]), torch.cat([i for _, i in parts])


def _top_k(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    # Adding +0.0 turns -0.0 into 0.0.
    bits = (values.float() + 0.0).view(torch.int32).to(torch.int64)
    # Negative floats order the wrong way round as integers.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(values.shape[-1], device=values.device, dtype=torch.int64)
    keys = (ordered << 32) | (_LOW_BITS - ids)
    best = keys.topk(k, dim=-1).values
    chosen = _LOW_BITS - (best & _LOW_BITS)
    return values.gather(-1, chosen), chosen


@hook(
    f"{_MODULE}.get_top_logprobs_raw",
    "REPLACE",
    name="logprobs_top_k",
    relies_on=(
        f"{_MODULE}.compute_spec_logprobs",
        f"{_MODULE}.OutputLogprobProcessor.compute_logprobs",
        f"{_MODULE}.get_token_ids_logprobs_raw",
    ),
)
def top_logprobs(
    logprobs: torch.Tensor,
    top_logprobs_nums: list[int],
    stage: Any,
    extend_logprob_pruned_lens_cpu: list[int] | None = None,
    no_copy_to_cpu: bool = False,
) -> tuple[list[Any], list[Any]]:
    """Replace get_top_logprobs_raw; one entry per request, rows as the host cuts them.

    logprobs: [rows, vocab]. Values and ids stay tensors under `no_copy_to_cpu`.
    """
    from sglang.srt.layers.logprob_processor import LogprobStage

    found_values, found_ids = top_k(logprobs, max(top_logprobs_nums))
    values: Any = found_values if no_copy_to_cpu else found_values.tolist()
    ids: Any = found_ids if no_copy_to_cpu else found_ids.tolist()
    if stage == LogprobStage.DECODE:
        return (
            [values[i][:k] for i, k in enumerate(top_logprobs_nums)],
            [ids[i][:k] for i, k in enumerate(top_logprobs_nums)],
        )
    all_values: list[Any] = []
    all_ids: list[Any] = []
    row = 0
    for k, count in zip(
        top_logprobs_nums, extend_logprob_pruned_lens_cpu or [], strict=False
    ):
        count = max(count, 0)
        all_values.append([values[row + j][:k] for j in range(count)])
        all_ids.append([ids[row + j][:k] for j in range(count)])
        row += count
    return all_values, all_ids


@hook(f"{_MODULE}.get_top_logprobs_chunk", "AROUND", name="logprobs_prompt_top_k")
def prompt_top_logprobs(
    original_fn: Callable[..., int],
    logprobs: torch.Tensor,
    top_k_nums: list[int],
    pruned_lens: list[int],
    top_logprobs_val: list[Any],
    top_logprobs_idx: list[Any],
    split_pruned_len: int,
    log_normalizer: tuple[torch.Tensor, torch.Tensor] | None = None,
    precomputed_topk: tuple[torch.Tensor, torch.Tensor] | None = None,
    copy_to_pinned_cpu: bool = False,
    **unknown: object,
) -> int:
    """Around get_top_logprobs_chunk: hand the host a top-k that is already ordered.

    The host takes a precomputed top-k only together with a normalizer; (0, 0)
    subtracts nothing from logprobs that are normalized already.
    """
    refuse_unknown("get_top_logprobs_chunk", unknown)
    import torch

    if precomputed_topk is None:
        precomputed_topk = top_k(logprobs, max(top_k_nums))
    if log_normalizer is None:
        zero = torch.zeros(
            logprobs.shape[0], dtype=torch.float32, device=logprobs.device
        )
        log_normalizer = (zero, zero)
    return original_fn(
        logprobs,
        top_k_nums,
        pruned_lens,
        top_logprobs_val,
        top_logprobs_idx,
        split_pruned_len,
        log_normalizer=log_normalizer,
        precomputed_topk=precomputed_topk,
        copy_to_pinned_cpu=copy_to_pinned_cpu,
    )
