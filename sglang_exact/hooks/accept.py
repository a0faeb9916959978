# SPDX-License-Identifier: Apache-2.0
"""Drafts are accepted while they are what plain decoding would emit.

Why: the host accepts drafts by its own rules: rejection sampling with coins that plain
    decoding never draws (eagle_utils.py:724), coins without the request's seed
    (dflash_utils.py:893), a selector that mixes draft probabilities in
    (dflash_worker_v2.py:2200). One sampled request takes the greedy ones of its batch
    along. Penalties are dropped (dflash_utils.py:236) or held still over a block
    (eagle_utils.py:560), custom logit processors dropped (eagle_utils.py) or called
    for rows whose prefix they do not know; NaN is sanitised in some of the paths.
What: `verify_sampling.choose` gives the token after every row; the host's greedy
    acceptance, which compares integers, takes the matching prefix and the token
    after it.
Scope: DFLASH and DFlash2, DSpark, and all that verify through eagle_sample (EAGLE,
    NEXTN, NGRAM). Linear chains. All-greedy batches without adjustments take the
    host's own path; no step waits for the device.
Retire when: the host samples verify rows with the ordinary sampler.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_exact.hooks.base import Unsupported, hook, refuse_unknown
from sglang_exact.hooks.verify_sampling import (
    Block,
    choose,
    is_plain_greedy,
    one_hot,
    wrong_where_serial,
)

if TYPE_CHECKING:
    import torch

_SPECULATIVE = "sglang.srt.speculative"
_DSPARK = f"{_SPECULATIVE}.dspark_components"


@hook(
    f"{_SPECULATIVE}.dflash_worker_v2.DFlashWorkerV2._accept_block",
    "AROUND",
    name="accept_dflash",
    relies_on=(
        "sglang.srt.model_executor.model_runner.ModelRunner.sample",
        "sglang.srt.model_executor.model_runner.ModelRunner._preprocess_logits",
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.apply_logits_bias",
    ),
)
def accept_dflash(
    original_fn: Callable[..., Any],
    self: Any,
    *,
    candidates: torch.Tensor,
    next_token_logits: torch.Tensor | None,
    sampling_info: Any,
    draft_input: Any,
    prefix_lens: torch.Tensor,
    bs: int,
    target_predict: torch.Tensor | None = None,
    **unknown: object,
) -> Any:
    """Around DFlashWorkerV2._accept_block; also the selector of DFlash2.

    candidates [bs, width] int64. A grammar mask is in the logits already: masking
    first and adding finite numbers after gives the same values.
    """
    refuse_unknown("DFlashWorkerV2._accept_block", unknown)
    # Draft probabilities play no part in what is accepted.
    self._selector_sample = None
    if sampling_info is not None and target_predict is not None:
        if not is_plain_greedy(sampling_info):
            raise Unsupported(
                "found an argmax without logits for a batch that adjusts or samples"
            )
    elif sampling_info is not None and next_token_logits is not None:
        block = Block(next_token_logits, sampling_info, prefix_lens, candidates)
        target_predict = choose(block)
        candidates = wrong_where_serial(candidates, target_predict, sampling_info)
    return original_fn(
        self,
        candidates=candidates,
        next_token_logits=next_token_logits,
        sampling_info=sampling_info,
        draft_input=draft_input,
        prefix_lens=prefix_lens,
        bs=bs,
        target_predict=target_predict,
    )


@hook(
    f"{_SPECULATIVE}.dflash_utils.apply_dflash_verify_logits_adjustments",
    "REPLACE",
    name="accept_dflash_adjust",
)
def adjust_at_accept(
    *, next_token_logits: torch.Tensor, sampling_info: Any, draft_token_num: int
) -> None:
    """Replace apply_dflash_verify_logits_adjustments: acceptance does it, in order."""


@hook(
    f"{_DSPARK}.dspark_verify.TargetVerifyExecutor.accept_and_finalize",
    "AROUND",
    name="accept_dspark",
    relies_on=(f"{_DSPARK}.dspark_verify.accept_draft_tokens",),
)
def accept_dspark(
    original_fn: Callable[..., Any],
    self: Any,
    *,
    folded_accept: bool,
    bs: int,
    verify_ids_2d: torch.Tensor,
    target_logits: torch.Tensor | None,
    draft_block: Any,
    sampling_info: Any,
    draft_input: Any,
    layout: Any,
    prefix_lens: torch.Tensor,
    draft_tokens: torch.Tensor,
    simulate_bonus_sampling_info: Any = None,
    **unknown: object,
) -> Any:
    """Around TargetVerifyExecutor.accept_and_finalize; folded steps are plain greedy.

    verify_ids_2d [bs, width] int64, draft_tokens [bs, width - 1].
    """
    refuse_unknown("TargetVerifyExecutor.accept_and_finalize", unknown)
    if layout is not None:
        raise Unsupported("found a ragged verify; expected the static layout")
    if not folded_accept and sampling_info is not None and target_logits is not None:
        block = Block(target_logits, sampling_info, prefix_lens, verify_ids_2d)
        chosen = choose(block)
        verify_ids_2d = wrong_where_serial(verify_ids_2d, chosen, sampling_info)
        if not is_plain_greedy(sampling_info):
            target_logits = one_hot(chosen, target_logits)
        sampling_info = None
    return original_fn(
        self,
        folded_accept=folded_accept,
        bs=bs,
        verify_ids_2d=verify_ids_2d,
        target_logits=target_logits,
        draft_block=draft_block,
        sampling_info=sampling_info,
        draft_input=draft_input,
        layout=layout,
        prefix_lens=prefix_lens,
        draft_tokens=draft_tokens,
        simulate_bonus_sampling_info=simulate_bonus_sampling_info,
    )


@hook(
    f"{_DSPARK}.dspark_verify.verify_logits_adjustments_are_noop",
    "REPLACE",
    name="accept_dspark_fold",
)
def may_fold(sampling_info: Any) -> bool:
    """Replace verify_logits_adjustments_are_noop, which asks a field of no object."""
    from sglang.srt.environ import envs

    if envs.SGLANG_SANITIZE_NAN_LOGITS.get():
        return False
    return sampling_info is None or is_plain_greedy(sampling_info)


@hook(
    f"{_DSPARK}.dspark_worker_v2.DSparkWorkerV2._sampling_graph_eligible",
    "AROUND",
    name="accept_dspark_graph",
)
def no_sampling_graph(
    original_fn: Callable[..., bool],
    self: Any,
    *,
    batch: Any,
    proposal_folded: bool,
    sampling_info: Any,
    simulate_bonus_sampling_info: Any,
) -> bool:
    """Around DSparkWorkerV2._sampling_graph_eligible: its coins are not ours."""
    return False


@hook(
    f"{_SPECULATIVE}.eagle_utils.eagle_sample",
    "AROUND",
    name="accept_eagle",
    relies_on=("sglang.kernels.ops.speculative.spec_tree.verify_tree_greedy_func",),
)
def accept_eagle(
    original_fn: Callable[..., Any],
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    uno_target_max_top_k: int | None = None,
    *,
    watermark_state: Any = None,
    watermark_full_mask: bool = True,
    **unknown: object,
) -> Any:
    """Around eagle_sample, for EAGLE, NEXTN and NGRAM.

    The host's greedy acceptance runs on stand-ins: logits with their largest entry
    at the chosen token and settings without adjustments. `logits_output` keeps the
    adjusted logits, from which logprobs are computed.
    """
    refuse_unknown("eagle_sample", unknown)
    info = batch.sampling_info
    idle = batch.forward_mode.is_idle()
    if not idle and not (is_plain_greedy(info) and grammar_mask is None):
        drafts = verify_input.draft_token.view(-1, verify_input.draft_token_num)
        logits = logits_output.next_token_logits
        chosen = choose(Block(logits, info, batch.seq_lens, drafts, grammar_mask))
        verify_input = copy.copy(verify_input)
        verify_input.draft_token = wrong_where_serial(drafts, chosen, info).reshape(-1)
        logits_output = copy.copy(logits_output)
        logits_output.next_token_logits = one_hot(chosen, logits)
        batch = copy.copy(batch)
        batch.sampling_info = dataclasses.replace(
            info,
            is_all_greedy=True,
            acc_additive_penalties=None,
            acc_scaling_penalties=None,
            logit_bias=None,
        )
        grammar_mask = None
    return original_fn(
        verify_input,
        batch,
        logits_output,
        grammar_mask,
        uno_target_max_top_k,
        watermark_state=watermark_state,
        watermark_full_mask=watermark_full_mask,
    )
