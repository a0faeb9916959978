# SPDX-License-Identifier: Apache-2.0
"""One tile for the GDN prefill kernel that the host autotunes.

Why: chunk_gated_delta_rule_fwd_kkt_solve_kernel is timed at first use over
    BK {32, 64} x num_warps {1, 2, 4} (sglang/kernels/ops/attention/fla/
    chunk_fwd.py:30). BK cuts the sum over the head dimension, so two processes that
    pick different tiles compute different prompts.
What: the kernel keeps one of the host's own configurations; nothing is timed.
Scope: GDN prefill, every process that computes.
Retire when: the host pins the tile in deterministic mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_exact.hooks.base import DIRECT, hook

BLOCK_K = 64
"""Two steps over a head dimension of 128."""
NUM_WARPS = 2


def _autotuner(kernel: Any) -> Any:
    """The Autotuner below a kernel's heuristics.

    Raises LookupError when there is none.
    """
    for layer in _layers(kernel):
        if hasattr(layer, "configs"):
            return layer
    raise LookupError(
        f"found no autotuner below {type(kernel).__name__}; expected "
        "@triton.autotune; fix: install the pinned host release"
    )


def _layers(kernel: Any) -> Iterator[Any]:
    while kernel is not None:
        yield kernel
        kernel = getattr(kernel, "fn", None)


def _is_ours(config: Any) -> bool:
    return bool(config.kwargs == {"BK": BLOCK_K} and config.num_warps == NUM_WARPS)


def is_pinned(kernel: Any) -> bool:
    """Whether the kernel has our configuration and no other."""
    configs = _autotuner(kernel).configs
    return len(configs) == 1 and _is_ours(configs[0])


@hook(
    "sglang.kernels.ops.attention.fla.chunk_fwd."
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel",
    DIRECT,
    name="autotune",
    relies_on=(
        "sglang.kernels.ops.attention.fla.chunk.chunk_gated_delta_rule_fwd",
        "sglang.kernels.ops.attention.fla.chunk_delta_h."
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        "sglang.kernels.ops.attention.fla.chunk_delta_h.chunk_gated_delta_rule_fwd_h",
        "sglang.kernels.ops.attention.fla.chunk_o.chunk_fwd_kernel_o",
        "sglang.kernels.ops.attention.fla.cumsum.chunk_local_cumsum_scalar_kernel",
        "sglang.kernels.ops.attention.fla.l2norm.l2norm_fwd",
        "sglang.kernels.ops.attention.fla.wy_fast.recompute_w_u_fwd_kernel",
    ),
    in_force=is_pinned,
)
def pin(kernel: Any) -> None:
    """Leave the kernel one configuration.

    Raises LookupError when the host does not offer it.
    """
    tuner = _autotuner(kernel)
    ours = [config for config in tuner.configs if _is_ours(config)]
    if len(ours) != 1:
        raise LookupError(
            f"found configurations {[str(c) for c in tuner.configs]}; expected one "
            f"with BK={BLOCK_K}, num_warps={NUM_WARPS}; fix: install the pinned host "
            "release"
        )
    tuner.configs = ours
    tuner.cache.clear()
