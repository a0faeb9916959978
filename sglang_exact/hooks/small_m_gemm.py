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
    DeepGEMM's on this very GPU at start-up (`selftest.small_m`, then `enable`). Decode,
    verify, draft and extend are treated alike: M and the weight alone decide.
Retire when: DeepGEMM's bf16 kernel reads weights at small M as fast as these tiles.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_exact.hooks.base import hook, refuse_unknown

if TYPE_CHECKING:
    import torch

Shape = tuple[int, int]

_OPS = "sglang.srt.batch_invariant_ops.batch_invariant_ops"


class Enabled(NamedTuple):
    """Which (N, K) take tiles, and up to which M; nothing until `enable`."""

    shapes: frozenset[Shape] = frozenset()
    limit: int = 0


_enabled = Enabled()


def enable(shapes: Iterable[Shape], limit: int) -> None:
    """From now on use tiles for M <= `limit` at `shapes` too, which passed their test.

    Call before CUDA graphs are captured, once per model (a draft adds its shapes to
    the target's). Raises ValueError if `limit` is not one that the kernel takes; 0
    turns the tiles off.
    """
    from sglang_exact_kernels.small_m_gemm import MAX_M

    global _enabled
    if not 0 <= limit <= MAX_M:
        raise ValueError(f"found a limit of M = {limit}, expected 0 to {MAX_M}")
    _enabled = Enabled(_enabled.shapes.union(shapes) if limit else frozenset(), limit)


@hook(
    f"{_OPS}._matmul_persistent_deepgemm",
    "AROUND",
    name="small_m_gemm",
    relies_on=(
        f"{_OPS}.matmul_persistent",
        f"{_OPS}.mm_batch_invariant",
        f"{_OPS}.addmm_batch_invariant",
    ),
)
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
