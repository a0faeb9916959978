# SPDX-License-Identifier: Apache-2.0
"""Requests that cannot be exact get a 400; requests that need one token a step are
known by name.

Why: the host takes every field of a request and drops some of them in verify
    (dflash_utils.py:201 reads a penalty field that does not exist; eagle_utils.py:521
    never calls custom logit processors), serves hidden states of other shapes, and
    ends the scheduler on a custom processor that does not load
    (sampling_batch_info.py:256) or on positional_embed_overrides
    (scheduler.py:2232). Requests that generate nothing skip the sampler if all of a
    batch do, and none is speculative: their logprobs then depend on who else is there
    (tp_worker.py:727). EAGLE and MTP count drafts into the length at which prompts
    are cut (managers/utils.py:484). A model that can see is warmed up with an image
    (entrypoints/http_server.py:2393), and a server that refuses it ends.
What: before a request is queued every field is looked at. One that cannot keep its
    bits ends the request with status 400 and all reasons. The rest is in one of two
    groups: PARALLEL fields act on a row by itself; FOLLOWING ones depend on the tokens
    before it, and each row of a block gets what plain decoding has after the drafts
    before that row. A request with a custom logit processor has no draft accepted: one
    exact token per step, while its neighbours keep their speed. A greedy request
    (top_k 1) gets temperature 1, because the host divides by it only in mixed
    batches. Every batch takes the sampler. No prompt is cut to the context.
    /model_info says that no images and no audio are understood, as it is.
Scope: every request, plain and speculative.
Retire when: the host applies every field in verify as in decode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from sglang_exact.hooks.base import (
    HOST_SCHEDULER,
    MAIN,
    TOKENIZER_MANAGER,
    hook,
    refuse_unknown,
)
from sglang_exact.reasons import Reason

PARALLEL = frozenset(
    (
        *("max_new_tokens", "n", "ignore_eos", "stream_interval", "custom_params"),
        *("stop", "stop_token_ids", "stop_regex", "stop_strs", "stop_regex_strs"),
        *("stop_str_max_len", "stop_regex_max_len", "no_stop_trim"),
        *("temperature", "top_p", "top_k", "min_p", "sampling_seed", "logit_bias"),
        *("skip_special_tokens", "spaces_between_special_tokens"),
        *("is_normalized", "ebnf_full_assistant"),
    )
)
"""Sampling parameters that act on each row alone, or on emitted tokens afterwards."""

FOLLOWING = frozenset(
    (
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("min_new_tokens", "json_schema", "regex", "ebnf", "structural_tag"),
    )
)
"""Sampling parameters whose effect on a row depends on the tokens before it."""

REFUSED = frozenset(("beam_width", "watermark"))
"""Sampling parameters that end the request with status 400 when they are used."""

HEADLINE = "sglang_exact cannot serve this request exactly:"


def uses_penalties(req: Any) -> bool:
    """Whether a penalty or min_new_tokens changes this request's logits."""
    params = req.sampling_params
    return bool(
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
    )


def is_serial(req: Any) -> bool:
    """Whether no row but the first can be known: a processor is any Python at all."""
    return req.custom_logit_processor is not None


def needs_last_token(req: Any) -> bool:
    """Whether the next step's logits need the last token on the host."""
    return uses_penalties(req) or req.custom_logit_processor is not None


def request_reasons(req: Any) -> list[Reason]:
    """Every reason why a request cannot be served exactly; empty if it can."""
    params = req.sampling_params
    found = [
        (bool(req.return_hidden_states), "return_hidden_states", "leave it out"),
        (bool(req.return_sampling_mask), "return_sampling_mask", "leave it out"),
        (req.multimodal_inputs is not None, "image, video or audio data", "send text"),
        (req.input_embeds is not None, "input_embeds", "send input_ids or text"),
        (
            req.positional_embed_overrides is not None,
            "positional_embed_overrides",
            "send input_ids or text",
        ),
        (req.token_type_ids is not None, "token_type_ids", "leave it out"),
        # Read only if every request of the batch generates nothing.
        (
            req.token_indices_to_pool is not None,
            "token_indices_to_pool",
            "leave it out",
        ),
        (
            req.multi_item_delimiter_indices is not None,
            "multi_item_delimiter_indices",
            "send one request per item",
        ),
        (req.session is not None, "session_params", "send the whole prompt"),
        (req.lora_id is not None, "lora_path", "ask for the base model"),
        (params.watermark is not None, "watermark", "leave it out"),
        ((params.beam_width or 1) > 1, "beam_width", "leave it out"),
    ]
    reasons = [
        Reason(name, "ids and logprobs of one causal text sequence", fix)
        for given, name, fix in found
        if given
    ]
    reasons += _processor_reasons(req.custom_logit_processor)
    bias = params.logit_bias or {}
    wrong = sorted(token for token, value in bias.items() if not math.isfinite(value))
    if wrong:
        reasons.append(
            Reason(
                f"logit_bias that is not finite for {', '.join(map(str, wrong))}",
                "finite numbers",
                "use a large finite bias, such as -1e9",
            )
        )
    return reasons


def _processor_reasons(serialized: str | None) -> list[Reason]:
    """The host loads a processor when it forms a batch, and ends if it cannot."""
    if serialized is None:
        return []
    import pickle

    from sglang.srt.sampling import sampling_batch_info
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    features = sampling_batch_info.get_exec().features
    if not features.enable_custom_logit_processor:
        # The host ignores it then, and nothing of a request is unpickled unasked.
        return []
    broken = (
        *(ValueError, TypeError, KeyError, ImportError, AttributeError, EOFError),
        pickle.UnpicklingError,
    )
    try:
        CustomLogitProcessor.from_str(serialized)
    except broken as error:
        return [
            Reason(
                f"a custom_logit_processor that does not load ({error})",
                "what CustomLogitProcessor.to_str() gives",
                "pickle a class of __main__, or install its module on the server",
            )
        ]
    return []


def text_of(reasons: Sequence[Reason]) -> str:
    """The message of the 400."""
    return "\n".join([HEADLINE, *(f"  - {reason}" for reason in reasons)])


def _strip(req: Any) -> None:
    """A refused request still runs one prefill: nothing that could fail goes along."""
    req.custom_logit_processor = None
    req.sampling_params.logit_bias = None
    req.lora_id = None
    req.token_indices_to_pool = None
    req.multi_item_delimiter_indices = None
    req.input_embeds = None
    req.return_hidden_states = False
    req.return_sampling_mask = False


@hook(
    f"{HOST_SCHEDULER}._add_request_to_queue",
    "BEFORE",
    name="requests_check",
    relies_on=(
        "sglang.srt.managers.schedule_batch.Req.set_finish_with_abort",
        f"{HOST_SCHEDULER}._handle_generate_request",
    ),
)
def check_request(self: Any, req: Any, is_retracted: bool = False) -> None:
    """Before Scheduler._add_request_to_queue: end it with a 400, or let it pass."""
    if is_retracted or req.to_finish is not None or req.finished():
        return
    reasons = request_reasons(req)
    if reasons:
        req.set_finish_with_abort(text_of(reasons))
        _strip(req)
        return
    if req.sampling_params.top_k <= 1:
        req.sampling_params.temperature = 1.0
    if req.sampling_params.max_new_tokens == 0 and req.logprob_start_len == -1:
        # The host does this without speculation alone (scheduler.py:3265).
        req.logprob_start_len = len(req.origin_input_ids)


def arrival_reasons(manager: Any, obj: Any, input_ids: Sequence[int]) -> list[Reason]:
    """Reasons against a request that must not reach the scheduler."""
    reasons = []
    if obj.positional_embed_overrides is not None:
        reasons.append(
            Reason("positional_embed_overrides", "token ids or text", "leave it out")
        )
    if obj.contains_mm_input():
        reasons.append(Reason("image, video or audio data", "text", "send text"))
    reasons += prompt_reasons(input_ids, manager.model_config.vocab_size)
    length = len(input_ids or ())
    total = length + (obj.sampling_params.get("max_new_tokens") or 0)
    limit = manager.context_len
    if manager.allow_auto_truncate and (length >= limit or total > limit):
        reasons.append(
            Reason(
                f"{total} tokens of prompt and max_new_tokens",
                f"at most {limit}, the context length (nothing is cut)",
                "send a shorter prompt or a smaller max_new_tokens",
            )
        )
    return reasons


def prompt_reasons(input_ids: Sequence[int] | None, vocab: int) -> list[Reason]:
    """A prompt without tokens, or with an id outside the vocabulary."""
    if not input_ids:
        return [Reason("a prompt of 0 tokens", "at least one", "send a prompt")]
    low, high = min(input_ids), max(input_ids)
    if low >= 0 and high < vocab:
        return []
    wrong = low if low < 0 else high
    return [
        Reason(
            f"input_ids with {wrong}",
            f"ids from 0 to {vocab - 1}",
            "tokenize with the model's own tokenizer",
        )
    ]


@hook(
    f"{TOKENIZER_MANAGER}._validate_one_request",
    "BEFORE",
    name="requests_arrive",
    roles=(MAIN,),
)
def check_arrival(self: Any, obj: Any, input_ids: Sequence[int]) -> None:
    """Before TokenizerManager._validate_one_request: the host turns it into a 400.

    Raises ValueError with every reason.
    """
    reasons = arrival_reasons(self, obj, input_ids)
    if reasons:
        raise ValueError(text_of(reasons))


@hook(
    f"{TOKENIZER_MANAGER}.init_model_config",
    "AFTER",
    name="requests_understood",
    roles=(MAIN,),
    relies_on=("sglang.srt.entrypoints.http_server._execute_server_warmup",),
)
def say_what_is_understood(result: None, self: Any) -> None:
    """After TokenizerManager.init_model_config: text, whatever the model could do."""
    self.model_config.is_image_understandable_model = False
    self.model_config.is_audio_understandable_model = False


@hook(
    f"{HOST_SCHEDULER}.run_batch",
    "BEFORE",
    name="requests_sampler",
    relies_on=("sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",),
)
def take_the_sampler(self: Any, batch: Any, pp_proxy_tensors: Any = None) -> None:
    """Before Scheduler.run_batch: a batch that generates nothing is like any other."""
    batch.is_prefill_only = False


@hook(
    "sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init",
    "AROUND",
    name="requests_beams",
)
def refuse_beams(
    original_fn: Callable[..., str | None],
    self: Any,
    req: Any,
    recv_req: Any,
    **unknown: object,
) -> str | None:
    """Around BeamCoordinator.validate_and_init, which the queue comes too late for."""
    refuse_unknown("BeamCoordinator.validate_and_init", unknown)
    return text_of(
        [Reason("beam_width", "one causal text sequence", "leave beam_width out")]
    )
