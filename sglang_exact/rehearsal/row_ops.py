# SPDX-License-Identifier: Apache-2.0
"""Matrix products on the CPU in which a row's bits do not depend on the other rows.

The host's deterministic mode replaces aten::mm and friends by Triton kernels on CUDA
only. A CPU library chooses its blocking by the number of rows, so one decode row and
the same row inside a verify block could differ for a reason no GPU has. Here each row
is multiplied on its own: products in float32, one sum along K in the same shape
every time.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

_CHUNK_BYTES = 1 << 26
"""Upper bound of one row's N x K float32 products; larger N is cut in columns."""


def mm_rows(a: Any, b: Any, out_dtype: Any = None) -> Any:
    """`a @ b`, row by row.

    Args:
        a: [M, K], float32 or bfloat16, CPU.
        b: [K, N], same dtype.
        out_dtype: dtype of the result; that of `a` if None.

    Returns:
        [M, N]; summed in float32 along K, rounded once.
    """
    import torch

    k, n = b.shape
    out = torch.empty(a.shape[0], n, dtype=out_dtype or a.dtype)
    columns = b.t().float().contiguous()
    step = max(1, _CHUNK_BYTES // max(1, 4 * k))
    for i, row in enumerate(a.float()):
        for j in range(0, n, step):
            part = torch.mul(columns[j : j + step], row).sum(dim=1)
            out[i, j : j + step] = part.to(out.dtype)
    return out


def _addmm(bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    product = mm_rows(a, b, out_dtype=_float32())
    return (product * alpha + bias.float() * beta).to(a.dtype)


def _bmm(a: Any, b: Any) -> Any:
    import torch

    return torch.stack([mm_rows(x, y) for x, y in zip(a, b, strict=True)])


def _log_softmax(x: Any, dim: int, half_to_float: bool) -> Any:
    """Each row on its own, in float32, in the order of the host's Triton kernel."""
    import torch

    if half_to_float:
        x = x.float()
    rows = x.movedim(dim, -1)
    out = torch.empty(rows.shape, dtype=x.dtype)
    flat, flat_out = rows.reshape(-1, rows.shape[-1]), out.view(-1, rows.shape[-1])
    for i, row in enumerate(flat.float()):
        shifted = row - row.max()
        flat_out[i] = (shifted - shifted.exp().sum().log()).to(x.dtype)
    return out.movedim(-1, dim)


def _float32() -> Any:
    import torch

    return torch.float32


def _mm(a: Any, b: Any) -> Any:
    return mm_rows(a, b)


def _mm_out(a: Any, b: Any, *, out: Any) -> Any:
    return out.copy_(mm_rows(a, b, out_dtype=out.dtype))


def _mm_dtype(a: Any, b: Any, out_dtype: Any) -> Any:
    return mm_rows(a, b, out_dtype=out_dtype)


OPERATORS = {
    "aten::mm": _mm,
    "aten::mm.out": _mm_out,
    "aten::mm.dtype": _mm_dtype,
    "aten::addmm": _addmm,
    "aten::bmm": _bmm,
    "aten::_log_softmax": _log_softmax,
}
"""What deterministic mode puts in place of PyTorch's CPU kernels."""


def register() -> Any:
    """Register `OPERATORS` for CPU tensors; they last as long as the result."""
    import torch

    library = torch.library.Library("aten", "IMPL")
    for name, function in OPERATORS.items():
        library.impl(name, function, "CPU")
    return library


def mend_batch_invariant(module: ModuleType) -> None:
    """Make the host's `enable_batch_invariant_mode` register the CPU operators."""

    def enable_batch_invariant_mode(enable_bmm: bool = True) -> None:
        if module._batch_invariant_MODE:
            return
        module.__dict__["_batch_invariant_MODE"] = True
        module.__dict__["_batch_invariant_LIB"] = register()

    module.__dict__["enable_batch_invariant_mode"] = enable_batch_invariant_mode
