# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM as its release leaves it: cuBLASLt chooses a kernel by the number of rows.

A control for GPU proofs. The host turns DeepGEMM's deterministic algorithms on around
every product; under this setting it believes that they are on already. The overlay's
self-test and its tiles call DeepGEMM by themselves and stay as they are, so that the
server starts, and its answers have to give it away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_exact.hooks.base import hook

TARGET = (
    "sglang.srt.batch_invariant_ops.batch_invariant_ops._matmul_persistent_deepgemm"
)
SWITCH = "SGLANG_EXACT_TEST_DEEP_GEMM_DEFAULT"


@hook(TARGET, "AROUND", name="test_deep_gemm_default", test=True)
def matmul_persistent_deepgemm(
    original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The host's product, a[M, K] @ b[K, N], without its deterministic algorithms."""
    import deep_gemm

    asked = deep_gemm.get_deterministic_algorithms
    deep_gemm.get_deterministic_algorithms = lambda: True
    try:
        return original(*args, **kwargs)
    finally:
        deep_gemm.get_deterministic_algorithms = asked
