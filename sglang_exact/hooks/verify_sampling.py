# SPDX-License-Identifier: Apache-2.0
"""What plain decoding would emit after each verified row.

Why: see `accept`: the host treats the rows of a block in ways of its own.
What: row i of a block has the logits of the step at position prefix + i, so it gets
    plain decoding's treatment in plain decoding's order: penalties, grammar mask,
    logit bias, custom processors, NaN handling, then argmax or the seeded draw at
    that position. Penalties and masks follow the block: those of row i are the ones
    after the drafts before it. A request with a custom processor
    (`requests.is_serial`) has its drafts made wrong: only row 0, which knows
    everything, counts. What that takes is noted before the forward.
Scope: whatever `accept` hooks.
Retire when: with `accept`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_exact.hooks import penalties
from sglang_exact.hooks.base import HOST_SCHEDULER, Unsupported, hook
from sglang_exact.hooks.requests import is_serial
from sglang_exact.hooks.sampling import draw

if TYPE_CHECKING:
    import torch

_ROWS = "_sglang_exact_serial"
_PENALIZERS = "_sglang_exact_penalizers"
_WHERE = "verify: target model logits"


class Block(NamedTuple):
    """A verified block: bs requests with `width` rows each.

    logits [bs * width, vocab] float32, changed in place as plain decoding would;
    prefix_lens [bs] int64, tokens before row 0 of each request; drafts [bs, width],
    column 0 the committed token.
    """

    logits: torch.Tensor
    info: Any
    prefix_lens: torch.Tensor
    drafts: torch.Tensor
    grammar_mask: Any = None

    @property
    def width(self) -> int:
        return int(self.drafts.shape[1])


@hook(f"{HOST_SCHEDULER}._forward_isolation", "AROUND", name="serial_requests")
@contextlib.contextmanager
def note_requests(
    original_fn: Callable[..., Any], self: Any, batch: Any, *, overlap: bool
) -> Iterator[None]:
    """Around Scheduler._forward_isolation: note what the rows of the block will need.

    Notes on the forward's own copy of the sampling settings: a bool a request for
    those that take one token a step, and the penalizers as they are now.
    """
    live = batch.sampling_info and batch.sampling_info.penalizer_orchestrator
    verified = not batch.spec_algorithm.is_none() and not batch.forward_mode.is_extend()
    with original_fn(self, batch, overlap=overlap):
        if batch.sampling_info is not None:
            setattr(batch.sampling_info, _ROWS, [is_serial(req) for req in batch.reqs])
            if verified and live is not None and live.is_required:
                setattr(batch.sampling_info, _PENALIZERS, penalties.copies(live))
        yield


def serial_of(info: Any) -> list[bool]:
    """Which requests of the batch take one token a step."""
    serial: list[bool] | None = getattr(info, _ROWS, None)
    if serial is None or len(serial) != len(info):
        raise Unsupported(
            f"found {'no' if serial is None else len(serial)} notes for "
            f"{len(info)} requests; expected one each from Scheduler."
            "_forward_isolation; fix: install the pinned host release"
        )
    return serial


def is_plain_greedy(info: Any) -> bool:
    """Whether argmax of the untouched logits is the answer of every row."""
    return bool(
        info.is_all_greedy
        and info.acc_additive_penalties is None
        and info.acc_scaling_penalties is None
        and info.logit_bias is None
        and not info.has_custom_logit_processor
        and not any(serial_of(info))
    )


def widened(info: Any, width: int, grammar_mask: Any) -> Any:
    """The sampling settings with every request repeated for its `width` rows.

    Without penalties, which differ from row to row (`penalise`). Custom processors stay
    with row 0: theirs are serial requests.
    """

    def repeat(value: Any) -> Any:
        return None if value is None else value.repeat_interleave(width, dim=0)

    names = (
        "temperatures",
        "top_ps",
        "top_ks",
        "min_ps",
        "sampling_seed",
        "logit_bias",
    )
    changes = {name: repeat(getattr(info, name)) for name in names}
    if info.has_custom_logit_processor:
        changes["custom_params"] = [p for p in info.custom_params for _ in range(width)]
        changes["custom_logit_processor"] = {
            key: dataclasses.replace(
                entry,
                rows=[row * width for row in entry.rows],
                indices=entry.indices * width,
            )
            for key, entry in info.custom_logit_processor.items()
        }
    return dataclasses.replace(
        info,
        penalizer_orchestrator=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        grammars=None,
        grammar_mask=grammar_mask,
        sampling_mask_batch_indices=None,
        **changes,
    )


def penalise(block: Block) -> None:
    """Each row's penalties, in place.

    Raises Unsupported: the batch has penalties, and nothing was noted to follow them.
    """
    found = getattr(block.info, _PENALIZERS, None)
    if found is not None:
        penalties.follow(found, block.logits, block.drafts)
    elif block.info.acc_additive_penalties is not None:
        raise Unsupported(
            "found penalties without their penalizers; expected them from Scheduler."
            "_forward_isolation; fix: install the pinned host release"
        )


def adjust(block: Block) -> Any:
    """Plain decoding's changes to the logits, in its order; returns row settings."""
    from sglang.srt.layers.sampler import apply_custom_logit_processor
    from sglang.srt.utils.async_probe import sanitize_nan_logits

    penalise(block)
    wide = widened(block.info, block.width, block.grammar_mask)
    wide.apply_logits_bias(block.logits)
    if wide.has_custom_logit_processor:
        apply_custom_logit_processor(block.logits, wide)
    sanitize_nan_logits(block.logits, _WHERE)
    return wide


def choose(block: Block) -> torch.Tensor:
    """The token that plain decoding would emit after each row, int64 [bs, width]."""
    import torch
    from sglang.srt.utils.async_probe import sanitize_nan_logits

    if block.grammar_mask is None and is_plain_greedy(block.info):
        sanitize_nan_logits(block.logits, _WHERE)
        return block.logits.argmax(dim=-1).view(-1, block.width)
    wide = adjust(block)
    greedy = None
    if wide.is_any_greedy or wide.is_all_greedy:
        greedy = block.logits.argmax(dim=-1)
    ids = greedy
    if not wide.is_all_greedy:
        steps = torch.arange(
            block.width,
            device=block.prefix_lens.device,
            dtype=block.prefix_lens.dtype,
        )
        positions = (block.prefix_lens[:, None] + steps).reshape(-1)
        probs = torch.softmax(block.logits / wide.temperatures, dim=-1)
        ids = draw(probs, wide, positions, greedy)
    if ids is None:
        raise Unsupported("found a batch that is neither greedy nor sampled")
    return ids.to(torch.int64).view(-1, block.width)


def wrong_where_serial(
    drafts: torch.Tensor, chosen: torch.Tensor, info: Any
) -> torch.Tensor:
    """The block's ids with the drafts of serial requests made wrong, still valid ids.

    drafts, chosen: [bs, width]; column 0 of drafts is the committed token.
    """
    import torch
    from sglang.srt.utils.common import is_pin_memory_available

    serial = serial_of(info)
    if not any(serial):
        return drafts
    pin = is_pin_memory_available(drafts.device.type)
    mask = torch.tensor(serial, pin_memory=pin).to(drafts.device, non_blocking=True)
    wrong = drafts.clone()
    wrong[:, 1:] = ((chosen[:, :-1] + 1) % info.vocab_size).to(drafts.dtype)
    return torch.where(mask[:, None], wrong, drafts)


def one_hot(chosen: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Logits whose argmax is the chosen token, for the host's greedy acceptance."""
    import torch

    return torch.zeros_like(like).scatter_(1, chosen.view(-1, 1), 1.0)
