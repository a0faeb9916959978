# SPDX-License-Identifier: Apache-2.0
"""One token per row: a function of that row's logits, settings, seed and position.

Why: in the host's sampler (sglang/srt/layers/sampler.py:238, 785, 950) the answer of
    a request depends on its neighbours. One sampled neighbour sends greedy rows
    through softmax and top_k = 1, which decides ties otherwise. One neighbour with
    top-p moves the seeded noise of all rows from token ids to ranks. top-p sums
    float32 with torch.cumsum, whose order depends on the number of rows and, for one
    row, on timing. min-p with a seed fails an assertion and ends the server. A custom
    logit processor is called with the rows of every request that shares it.
What: greedy rows (top_k = 1) take torch.argmax of the logits, lowest id on ties,
    whatever the batch. Sampled rows: probabilities in float32 as the host has them;
    stable descending sort; top-k by rank; top-p on sums in 2**-52 fixed point, which
    no order can change; min-p against the largest; then the host's seeded Gumbel
    noise in float64, always by token id; argmax. Custom processors see one row at a
    time.
Scope: plain decoding, prefill and verify. A request without a seed has the host's
    default seed of deterministic mode, 42. Batches without any seed (the host's
    memory rehearsals) keep the host's sampler.
Retire when: the host samples each row by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_exact.hooks.base import Unsupported, hook

if TYPE_CHECKING:
    import torch

_MODULE = "sglang.srt.layers.sampler"
_GREEDY_IDS = "_sglang_exact_greedy_ids"
_FIXED_POINT = 2.0**52
"""Exact for float32 probabilities from 2**-28 up; sums stay below 2**53."""
_ROWS_AT_ONCE = 16
"""Bounds the float64 scratch to 16 vocabularies; rows do not see each other."""


@hook(f"{_MODULE}.Sampler._preprocess_logits", "AFTER", name="sampling_greedy_ids")
def keep_greedy_ids(
    result: torch.Tensor, self: Any, logits: torch.Tensor, sampling_info: Any
) -> None:
    """After Sampler._preprocess_logits: argmax before logits become probabilities."""
    if not sampling_info.is_all_greedy and sampling_info.is_any_greedy:
        setattr(sampling_info, _GREEDY_IDS, result.argmax(dim=-1))


def support(probs: torch.Tensor, info: Any, rows: slice) -> torch.Tensor:
    """Probabilities with everything outside top-k, top-p and min-p set to zero.

    probs: [rows, vocab] float32. A row without a filter keeps every entry, also when
    its float32 probabilities sum to more than one.
    """
    import torch

    filtered = (
        info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
    )
    if not filtered:
        return probs
    top_ks = info.top_ks[rows].view(-1, 1)
    top_ps = info.top_ps[rows].view(-1, 1).double()
    min_ps = info.min_ps[rows].view(-1, 1)
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    fixed = (ordered.double() * _FIXED_POINT).to(torch.int64)
    before = fixed.cumsum(dim=-1) - fixed
    kept = rank < top_ks
    kept &= (before <= (top_ps * _FIXED_POINT).to(torch.int64)) | (top_ps >= 1.0)
    kept &= ordered >= ordered[:, :1] * min_ps
    mask = torch.zeros_like(kept).scatter_(1, ids, kept)
    return probs.masked_fill(~mask, 0.0)


def seeded_choice(
    weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Gumbel-max over token ids with the host's hash of (seed, position, id).

    weights: [rows, vocab] float32, zero outside the support; seeds, positions:
    [rows] int64. Returns [rows] int64. The clamps are those of the host's
    multinomial_with_seed.
    """
    import torch
    from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32

    ids = torch.arange(weights.shape[-1], device=weights.device)
    hashed = murmur_hash32(seeds.to(torch.uint64), positions, ids)
    noise = hashed.to(torch.float64) / torch.iinfo(torch.uint32).max
    noise.log_().clamp_(min=torch.finfo(torch.float64).min, max=-(2.0**-32)).neg_()
    noise.log_().neg_()
    return noise.add_(weights.double().log_()).argmax(dim=-1)


def draw(
    probs: torch.Tensor,
    info: Any,
    positions: torch.Tensor,
    greedy_ids: torch.Tensor | None,
) -> torch.Tensor:
    """One id per row, int32 [rows]; greedy rows take `greedy_ids`.

    probs: [rows, vocab] float32; `info`: a SamplingBatchInfo with one entry per row.
    """
    import torch

    drawn = []
    for start in range(0, probs.shape[0], _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        weights = support(probs[rows], info, rows)
        drawn.append(seeded_choice(weights, info.sampling_seed[rows], positions[rows]))
    ids = torch.cat(drawn)
    if info.is_any_greedy:
        if greedy_ids is None:
            raise Unsupported(
                "found a mixed batch without the argmax of its greedy rows; expected "
                "it from Sampler._preprocess_logits; fix: install the pinned host"
            )
        ids = torch.where(info.top_ks <= 1, greedy_ids.to(ids.dtype), ids)
    return ids.to(torch.int32)


@hook(
    f"{_MODULE}.Sampler._sample_from_probs",
    "AROUND",
    name="sampling_draw",
    relies_on=(
        f"{_MODULE}.Sampler.forward",
        "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
    ),
)
def draw_from_probs(
    original_fn: Callable[..., Any],
    self: Any,
    probs: torch.Tensor,
    sampling_info: Any,
    positions: torch.Tensor,
    simple_sampling_case: bool,
) -> tuple[torch.Tensor, Any]:
    """Around Sampler._sample_from_probs: `draw`, and no sampling mask (refused)."""
    if sampling_info.sampling_seed is None:
        result: tuple[torch.Tensor, Any] = original_fn(
            self, probs, sampling_info, positions, simple_sampling_case
        )
        return result
    greedy_ids = getattr(sampling_info, _GREEDY_IDS, None)
    return draw(probs, sampling_info, positions, greedy_ids), None


@hook(
    f"{_MODULE}.apply_custom_logit_processor",
    "REPLACE",
    name="sampling_custom_processor",
)
def process_rows_alone(
    logits: torch.Tensor, sampling_batch_info: Any, num_tokens_in_batch: int = 1
) -> None:
    """Replace apply_custom_logit_processor: one call per row, in row order.

    logits: [requests * num_tokens_in_batch, vocab], changed in place.
    """
    entries = sampling_batch_info.custom_logit_processor.values()
    pairs = sorted(
        ((row, entry.processor) for entry in entries for row in entry.rows),
        key=lambda pair: pair[0],
    )
    for request, processor in pairs:
        params = sampling_batch_info.custom_params[request]
        for offset in range(num_tokens_in_batch):
            row = request * num_tokens_in_batch + offset
            changed = processor(logits[row : row + 1].clone(), [params])
            logits[row : row + 1] = changed.to(logits.dtype)
