# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's rows at the largest served numbers of rows, as integers.

Its tiles are chosen by M, and the promise needs the same bits for a row at every M:
one request alone, every request of a step with its drafts, each prefill graph, and a
whole prefill step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sglang_exact.reasons import Reason

if TYPE_CHECKING:
    import torch

Shape = tuple[int, int]
"""(N, K) of a weight."""

REFERENCE_M = 64
"""Rows of the reference; every M holds these rows again and again."""

FIRST_M = 17
"""The first M above the default limit of the small-M tiles."""

LARGEST_OUTPUT = 2**30
"""Elements of the largest output that is made: the head is never asked for a whole
prefill step's rows."""


def served_rows(cfg: Any, model_config: Any) -> tuple[int, ...]:
    """Numbers of rows to compare: decode or verify at its fullest, each prefill graph,
    and a prefill step.

    `cfg` is the resolved view of ServerArgs, `model_config` the host's ModelConfig.
    """
    from sglang_exact import scope_model

    drafts = int(cfg.speculative_num_draft_tokens or 1)
    if not cfg.speculative_algorithm:
        drafts = 1
    decode = scope_model.most_requests(cfg) * drafts
    prefill = scope_model.largest_step(cfg, model_config)
    graphs = scope_model.prefill_buckets(cfg)
    return tuple(sorted({FIRST_M, REFERENCE_M, decode, *graphs, prefill}))


def weights(model: torch.nn.Module) -> dict[Shape, torch.Tensor]:
    """One bfloat16 weight per (N, K) that the host hands to DeepGEMM.

    The conditions are the host's (batch_invariant_ops.py, matmul_persistent). A vision
    tower is left out: no request reaches it.
    """
    import torch

    found: dict[Shape, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        w = parameter.detach()
        if w.ndim != 2 or w.dtype != torch.bfloat16 or "visual" in name.split("."):
            continue
        n, k = w.shape
        if w.is_contiguous() and n >= 16 and n % 8 == 0 and k % 8 == 0:
            found.setdefault((n, k), w)
    return found


def rows(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """a[M, K] @ w[N, K]^T by DeepGEMM as the host calls it."""
    import deep_gemm
    import torch

    out = torch.empty((a.shape[0], w.shape[0]), device=a.device, dtype=a.dtype)
    before = deep_gemm.get_deterministic_algorithms()
    deep_gemm.use_deterministic_algorithms(True)
    try:
        deep_gemm.bf16_gemm_nt(a, w, out)
    finally:
        deep_gemm.use_deterministic_algorithms(before)
    return out


def run(
    found: Mapping[Shape, torch.Tensor], served: Iterable[int], device: torch.device
) -> list[Reason]:
    """Compare each weight's rows at every M of `served` with those at M = 64.

    Activations are N(0, 1), seed 0. Synchronises; run it before capture.
    """
    import torch

    gen = torch.Generator(device).manual_seed(0)
    reasons = []
    for (n, k), w in found.items():
        a = torch.randn(
            (REFERENCE_M, k), device=device, dtype=torch.bfloat16, generator=gen
        )
        want = rows(a, w).view(torch.int16)
        wrong = [
            f"M = {m}: {count} of {m * n}"
            for m in dict.fromkeys(min(m, max(LARGEST_OUTPUT // n, 1)) for m in served)
            if (count := _different(a, w, m, want))
        ]
        if wrong:
            reasons.append(
                Reason(
                    f"N = {n}, K = {k}: elements of DeepGEMM that are not those at "
                    f"M = {REFERENCE_M}: " + "; ".join(wrong),
                    "equal bits for a row at every number of rows",
                    "install the pinned sgl-deep-gemm",
                )
            )
    return reasons


def _different(a: torch.Tensor, w: torch.Tensor, m: int, want: torch.Tensor) -> int:
    """How many of the m x N elements differ, with the rows of `a` over and over."""
    import torch

    times = -(-m // REFERENCE_M)
    many = a.repeat(times, 1)[:m].contiguous()
    got = rows(many, w).view(torch.int16)
    return sum(
        int((part != want[: part.shape[0]]).sum()) for part in got.split(REFERENCE_M)
    )
