# SPDX-License-Identifier: Apache-2.0
"""RMSNorm with a residual in two launches, the same two for every number of rows.

Why: in deterministic mode the host norms without a residual by a kernel of one program
    a row, and with one by some ten operators of torch (sglang/srt/layers/
    layernorm.py:535), of which only the mean is replaced by a row-invariant kernel.
    Each is launched for each of two norms a layer, in decode and in verify.
What: one sum of x and residual, rounded to their dtype, which is the new residual; then
    the host's row-invariant norm of that sum: squares added in blocks of 1024 columns,
    ascending, in float32. A row's bits do not depend on the other rows.
Scope: RMSNorm.forward_cuda with a residual in deterministic mode, target and draft. The
    layer alone decides, never its rows: norms of part of the row, of a float32 residual
    or rounded before the weight stay the host's. GDN hybrids norm by GemmaRMSNorm.
Retire when: the host's fused norm with a residual sums a row in one order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_exact.hooks.base import hook

if TYPE_CHECKING:
    import torch

_NORM = "sglang.srt.layers.layernorm.RMSNorm"
_OPS = "sglang.srt.batch_invariant_ops.batch_invariant_ops"


@hook(
    f"{_NORM}.forward_cuda",
    "AROUND",
    name="residual_norm",
    relies_on=(
        f"{_NORM}.__init__",
        f"{_NORM}.forward_native",
        f"{_OPS}.rms_norm",
        f"{_OPS}.rms_norm_batch_invariant",
    ),
)
def forward_cuda(
    original_fn: Callable[..., Any],
    self: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    """Around RMSNorm.forward_cuda: x, residual [M, N] -> normed, new residual [M, N].

    Neither argument is written to.
    """
    from sglang.srt.batch_invariant_ops import (
        is_batch_invariant_mode_enabled,
        rms_norm_batch_invariant,
    )

    own = (
        residual is not None
        and post_residual_addition is None
        and self.variance_size_override is None
        and self.override_orig_dtype is None
        and not (self.cast_x_before_out_mul or self.fp32_residual)
        and is_batch_invariant_mode_enabled()
    )
    if residual is None or not own or x.numel() == 0:
        return original_fn(self, x, residual, post_residual_addition, quant_linear)
    total = x + residual
    return rms_norm_batch_invariant(total, self.weight, self.variance_epsilon), total
