# SPDX-License-Identifier: Apache-2.0
"""Small-M linear layers with DeepGEMM's bits, at the speed of memory.

Why: in deterministic mode every bf16 linear layer goes through
    _matmul_persistent_deepgemm (sglang/srt/batch_invariant_ops/
    batch_invariant_ops.py:252). Its bits do not depend on M, but its tiles are made
    for large M: on sm120 it reads weights at about a third of the memory's speed.
    Plain decoding runs at M = bs and verify at M = bs * draft_tokens, on either side
    of any limit, so a faster kernel must keep DeepGEMM's bits and not only its own.
What: M up to the limit goes to one tile per (N, K): one fp32 accumulator, K in MMA
    steps of 16, ascending, one rounding to bf16; then bias as in the host. All else
    goes to DeepGEMM, which has the same order.
Scope: bf16 in and out, K-major weights, shapes whose bits were compared with
    DeepGEMM's on this very GPU at start-up (`self_test`, then `enable`). Decode,
    verify, draft and extend are treated alike: M and the weight alone decide.
Retire when: DeepGEMM's bf16 kernel reads weights at small M as fast as these tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_exact.hooks.base import Hook, refuse_unknown
from sglang_exact.reasons import Reason

if TYPE_CHECKING:
    import torch

__all__ = ["HOOK", "enable", "enabled", "linear_weights", "replacement", "self_test"]

Shape = tuple[int, int]

SELF_TEST_M = (1, 2, 3, 8, 16)
"""M of the tiles in the self-test: one row, odd, a verify block, a full tile."""

DEEP_GEMM_M = (17, 64)
"""M of DeepGEMM's rows: the first above the default limit, and a larger tile."""

_TARGET = (
    "sglang.srt.batch_invariant_ops.batch_invariant_ops._matmul_persistent_deepgemm"
)


class Enabled(NamedTuple):
    """Which (N, K) take tiles, and up to which M; nothing until `enable`."""

    shapes: frozenset[Shape] = frozenset()
    limit: int = 0


_enabled = Enabled()


def enable(shapes: Iterable[Shape], limit: int) -> None:
    """From now on use tiles for M <= `limit` at `shapes` too; they passed `self_test`.

    Call before CUDA graphs are captured, once per model (a draft adds its shapes to
    the target's). Raises ValueError if `limit` is not one that the kernel takes; 0
    turns the tiles off.
    """
    from sglang_exact_kernels.small_m_gemm import MAX_M

    global _enabled
    if not 0 <= limit <= MAX_M:
        raise ValueError(f"found a limit of M = {limit}, expected 0 to {MAX_M}")
    _enabled = Enabled(_enabled.shapes.union(shapes) if limit else frozenset(), limit)


def enabled() -> Enabled:
    """What is in force; for the attestation."""
    return _enabled


def replacement(
    original_fn: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    **unknown: object,
) -> torch.Tensor:
    """a[M, K] @ b[K, N] (+ bias[N]) -> [M, N]; b is the transpose of a K-major weight.

    The same bits as `original_fn` for every argument.
    """
    refuse_unknown("_matmul_persistent_deepgemm", unknown)
    if a.shape[0] > _enabled.limit or (b.shape[1], b.shape[0]) not in _enabled.shapes:
        return original_fn(a=a, b=b, out_dtype=out_dtype, bias=bias)
    from sglang_exact_kernels.small_m_gemm import small_m_gemm, unsupported_reasons

    w = b.t()
    if out_dtype != a.dtype or unsupported_reasons(a, w):
        return original_fn(a=a, b=b, out_dtype=out_dtype, bias=bias)
    out = small_m_gemm(a, w)
    if bias is not None:
        out += bias
    return out


def linear_weights(model: torch.nn.Module) -> dict[Shape, torch.Tensor]:
    """One weight per (N, K) among the model's matrices that tiles take, and gladly.

    Shapes where a sweep found DeepGEMM faster are left to it: the bits are the same.
    Embeddings are included: a tied one is the head, and a spare shape costs nothing.
    """

    from sglang_exact_kernels.small_m_gemm import unsupported_reasons
    from sglang_exact_kernels.tiles import prefers_deep_gemm

    found: dict[Shape, torch.Tensor] = {}
    for parameter in model.parameters():
        w = parameter.detach()
        if w.ndim != 2 or not w.is_cuda:
            continue
        n, k = w.shape
        if not prefers_deep_gemm(n, k, w.device) and not unsupported_reasons(w[:1], w):
            found.setdefault((n, k), w)
    return found


def _deep_gemm_rows(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
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


def _shape_reasons(w: torch.Tensor, a: torch.Tensor, limit: int) -> list[Reason]:
    """Compare the tile of w[N, K] with DeepGEMM's rows on a[64, K], as integers."""
    import torch

    from sglang_exact_kernels.small_m_gemm import small_m_gemm

    most = max(DEEP_GEMM_M)
    want = _deep_gemm_rows(a[:most].contiguous(), w).view(torch.int16)
    runs = [(f"DeepGEMM, M = {m}", m, _deep_gemm_rows) for m in DEEP_GEMM_M[:-1]]
    tiles = sorted({m for m in SELF_TEST_M if m < limit} | {limit})
    runs += [(f"tile, M = {m}", m, small_m_gemm) for m in tiles]
    parts = []
    for name, m, gemm in runs:
        got = gemm(a[:m].contiguous(), w).view(torch.int16)
        count = int((got != want[:m]).sum())
        if count:
            parts.append(f"{name}: {count} of {got.numel()}")
    if not parts:
        return []
    return [
        Reason(
            f"N = {w.shape[0]}, K = {w.shape[1]}: elements that are not those of "
            f"DeepGEMM at M = {most}: " + "; ".join(parts),
            "equal bits on this GPU",
            "set SGLANG_BATCH_INVARIANT_OPS_SMALL_M_TRITON=0 to leave tiles off; if "
            "DeepGEMM itself differs, install the pinned sgl-deep-gemm",
        )
    ]


def self_test(
    shapes: Iterable[Shape],
    device: torch.device,
    *,
    limit: int,
    weights: Mapping[Shape, torch.Tensor] | None = None,
) -> list[Reason]:
    """Why tiles may not be used on this GPU; empty if their bits are DeepGEMM's.

    Every (N, K) of `shapes` is run at M = 1, 2, 3, 8, 16 (as far as `limit` goes) and
    compared with DeepGEMM's rows at M = 17 and 64. `weights` holds the weights in use
    (see `linear_weights`); a shape that is not in it gets a random one, N(0, 1/K).
    Activations are random, N(0, 1), seed 0. Synchronises; run it before capture.
    """
    import torch

    reasons: list[Reason] = []
    if limit < 1:
        return reasons
    gen = torch.Generator(device).manual_seed(0)
    rows = max(*DEEP_GEMM_M, limit)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=gen)

    for n, k in dict.fromkeys(shapes):
        a = draw(rows, k)
        w = (weights or {}).get((n, k))
        reasons += _shape_reasons(draw(n, k) * k**-0.5 if w is None else w, a, limit)
    return reasons


HOOK = Hook(
    name="small_m_gemm",
    target=_TARGET,
    kind="AROUND",
    replacement=replacement,
    relies_on=(
        "sglang.srt.batch_invariant_ops.batch_invariant_ops.matmul_persistent",
        "sglang.srt.batch_invariant_ops.batch_invariant_ops.mm_batch_invariant",
        "sglang.srt.batch_invariant_ops.batch_invariant_ops.addmm_batch_invariant",
    ),
)
