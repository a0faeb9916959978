# SPDX-License-Identifier: Apache-2.0
"""Prompts are cut on the GDN chunk grid, whoever else is being prefilled.

Why: the chunk kernels start a new 64-token chunk wherever a prefill step starts.
    With the triton backend the host cuts a prompt at whatever its neighbours left of
    the step's token budget (sglang/srt/managers/schedule_policy.py:586,863), so the
    chunks, and with them the bits, depend on who arrived when.
What: a cut prompt is cut at a multiple of the grid of its family (64) from its start.
    The state is carried in float32, so any such cuts give the bits of one long prefill.
    A prompt that would get less than one chunk waits for the next step.
Scope: PrefillAdder without data-parallel or context-parallel ranks.
Retire when: the host aligns cuts to the chunk grid in deterministic mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_exact import scope_families
from sglang_exact.hooks.base import HOST_SCHEDULER, Unsupported, hook

_POLICY = "sglang.srt.managers.schedule_policy"


@hook(
    f"{_POLICY}.mamba_prefill_chunk_grid",
    "REPLACE",
    name="prefill_grid",
    relies_on=(
        f"{_POLICY}.PrefillAdder.floor_chunked_tokens",
        f"{_POLICY}.PrefillAdder._select_prefill_admission",
        f"{HOST_SCHEDULER}.init_mamba_truncation_align",
        f"{HOST_SCHEDULER}.check_truncation_align_fits_chunk",
        "sglang.kernels.ops.attention.fla.chunk_delta_h.CHUNK_SIZE",
    ),
)
def mamba_prefill_chunk_grid() -> int:
    """In place of the host's: the grid a truncated prefill cut must land on."""
    from sglang.srt.runtime_context import process_model_config

    return scope_families.of(process_model_config().hf_config).grid


def _check_cut(req: Any, grid: int) -> None:
    end, total = req.extend_end, len(req.full_untruncated_fill_ids)
    if end != total and end % grid:
        raise Unsupported(
            f"request {req.rid}: found its prompt of {total} tokens cut at {end}; "
            f"expected a multiple of {grid}; fix: report this, or raise "
            "--chunked-prefill-size"
        )


@hook(
    f"{_POLICY}.PrefillAdder.add_one_req_ignore_eos",
    "AROUND",
    name="prefill_grid_ignore_eos",
)
def add_one_req_ignore_eos(original_fn: Callable[..., Any], self: Any, req: Any) -> Any:
    """Around the admission of ignore_eos requests: never cut off less than a chunk."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    budget = self.rem_chunk_tokens
    wanted = len(req.full_untruncated_fill_ids) - req.prefix_len
    if budget is not None and budget < min(wanted, self.mamba_chunk_grid):
        return AddReqResult.OTHER
    return original_fn(self, req)


@hook(f"{_POLICY}.PrefillAdder.add_one_req", "AFTER", name="prefill_grid_first")
def add_one_req(
    result: Any,
    self: Any,
    req: Any,
    has_chunked_req: bool,
    truncation_align_size: int | None,
) -> None:
    """After each first admission: see that the cut is on the grid."""
    for admitted in self.can_run_list[-1:]:
        _check_cut(admitted, self.mamba_chunk_grid)


@hook(f"{_POLICY}.PrefillAdder.add_chunked_req", "AROUND", name="prefill_grid_next")
def add_chunked_req(original_fn: Callable[..., Any], self: Any, req: Any) -> Any:
    """Around the next step of a cut prompt: at least one chunk, ending on the grid.

    shortest-prefill-first may leave it less, in favour of prompts that wait.
    """
    if self.chunked_req_limit is not None:
        self.chunked_req_limit = max(self.chunked_req_limit, self.mamba_chunk_grid)
    before = len(self.can_run_list)
    result = original_fn(self, req)
    for admitted in self.can_run_list[before:]:
        _check_cut(admitted, self.mamba_chunk_grid)
    return result
