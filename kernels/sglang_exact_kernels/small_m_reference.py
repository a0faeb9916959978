# SPDX-License-Identifier: Apache-2.0
"""References of the small-M GEMM: the promised reduction order, and the exact value."""

from __future__ import annotations

import torch

from sglang_exact_kernels.small_m_gemm import K_STEP

__all__ = ["small_m_gemm_exact", "small_m_gemm_reference"]


def small_m_gemm_reference(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A[M, K] @ W[N, K]^T in the kernel's order: K steps of 16, ascending, fp32.

    Inside a step the 16 products are summed exactly and the sum is added to the
    accumulator with one rounding to nearest. The tensor core's rounding inside a step
    is its own, so on a device this is a reference of order and not of bits; there
    DeepGEMM is the reference of bits.
    """
    acc = torch.zeros(a.shape[0], w.shape[0], dtype=torch.float32, device=a.device)
    for k in range(0, a.shape[1], K_STEP):
        step = a[:, k : k + K_STEP].double() @ w[:, k : k + K_STEP].double().t()
        acc = (acc.double() + step).float()
    return acc.to(torch.bfloat16)


def small_m_gemm_exact(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A[M, K] @ W[N, K]^T in fp64: bf16 products are exact, the sum nearly so."""
    return a.double() @ w.double().t()
