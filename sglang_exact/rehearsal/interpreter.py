# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter with bfloat16 that rounds, and with a driver that is none.

Triton 3.8.0's interpreter keeps bfloat16 as uint16 and computes on the bit patterns
(dot, arithmetic, sum, fma); float32 to bfloat16 truncates. Here every bfloat16
operation is done in float32 (fma in float64) and rounded to nearest, ties to even, as
the hardware does. Order of operations is the kernel's; the order inside one reduction
or dot is numpy's, so bits are not those of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

_NAN_BF16 = 0x7FC0
"""What a NaN becomes; torch itself gives several patterns, by code path."""


_MENDED_OPERATIONS = (
    "cast_impl", "create_fp_to_fp", "binary_op", "unary_op", "ternary_op",
    "create_fma", "create_dot",
)  # fmt: skip

_MENDED_FUNCTIONS = ("_patch_lang", "_implicit_cvt", "_get_np_dtype")


def bf16_to_f32(bits: Any) -> Any:
    """float32 array of the same shape from an array of bfloat16 bits (uint16)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: Any) -> Any:
    """bfloat16 bits (uint16) of float32 values, to nearest, ties to even."""
    values = np.ascontiguousarray(values, dtype=np.float32).reshape(np.shape(values))
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(_NAN_BF16), rounded)


class NoDriver:
    """As much of a Triton driver as import-time probes and autotuning ask for."""

    def get_benchmarker(self) -> Callable[..., list[float]]:
        # Equal times: the first configuration of a kernel wins, always.
        return lambda fn, quantiles=None, **kwargs: [0.0, 0.0, 0.0]

    def get_current_target(self) -> Any:
        # FLA catches this and chooses its "cpu" settings.
        raise RuntimeError("found no GPU: kernels are interpreted in a rehearsal")

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        import torch

        return torch.cpu

    def get_empty_cache_for_benchmark(self) -> Any:
        import torch

        return torch.empty(1)

    def clear_cache(self, cache: Any) -> None:
        pass


def _mend_casts(interp: ModuleType, tl: ModuleType) -> None:
    builder, handle = interp.InterpreterBuilder, interp.TensorHandle
    plain_cast, plain_fp_to_fp = builder.cast_impl, builder.create_fp_to_fp
    truncate = interp._ir.ROUNDING_MODE.RTZ

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, wanted = src.dtype.scalar, dst_type.scalar
        if source == wanted:
            return src
        if source == tl.bfloat16:
            src = handle(bf16_to_f32(src.data), tl.float32)
            source = tl.float32
        if wanted == tl.bfloat16:
            return handle(f32_to_bf16(src.data.astype(np.float32)), tl.bfloat16)
        return src if source == wanted else plain_cast(self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        pair = (src.dtype.scalar, dst_type.scalar)
        if rounding_mode != truncate and pair == (tl.float32, tl.bfloat16):
            return handle(f32_to_bf16(src.data), tl.bfloat16)
        return plain_fp_to_fp(self, src, dst_type, rounding_mode)

    def get_bf16(self: Any, value: float) -> Any:
        return handle(f32_to_bf16(np.array([value], dtype=np.float32)), tl.bfloat16)

    builder.cast_impl = cast_impl
    builder.create_fp_to_fp = create_fp_to_fp
    builder.get_bf16 = get_bf16


def _mend_arithmetic(interp: ModuleType, tl: ModuleType) -> None:
    builder, handle = interp.InterpreterBuilder, interp.TensorHandle
    plain_binary, plain_unary = builder.binary_op, builder.unary_op
    plain_ternary, plain_fma = builder.ternary_op, builder.create_fma

    def is_bf16(x: Any) -> bool:
        return bool(x.dtype.scalar == tl.bfloat16)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if not (is_bf16(lhs) and is_bf16(rhs)):
            return plain_binary(self, lhs, rhs, op)
        out = op(bf16_to_f32(lhs.data), bf16_to_f32(rhs.data))
        if out.dtype == bool:
            return handle(out, tl.int1)
        return handle(f32_to_bf16(out), tl.bfloat16)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        if not is_bf16(arg):
            return plain_unary(self, arg, op)
        return handle(f32_to_bf16(op(bf16_to_f32(arg.data))), tl.bfloat16)

    def ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        # A select moves bits and needs no mending; a clamp compares values.
        if op is np.where or not is_bf16(lhs):
            return plain_ternary(self, lhs, rhs, other, op)
        out = op(*(bf16_to_f32(x.data) for x in (lhs, rhs, other)))
        return handle(f32_to_bf16(out), tl.bfloat16)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not is_bf16(x):
            return plain_fma(self, x, y, z)
        # float64 holds product and sum exactly enough; then one rounding through
        # float32, as the widening hardware instruction does.
        wide = [bf16_to_f32(v.data).astype(np.float64) for v in (x, y, z)]
        return handle(f32_to_bf16(wide[0] * wide[1] + wide[2]), tl.bfloat16)

    builder.binary_op, builder.unary_op = binary_op, unary_op
    builder.ternary_op, builder.create_fma = ternary_op, create_fma


def _mend_dot(interp: ModuleType, tl: ModuleType) -> None:
    builder, handle = interp.InterpreterBuilder, interp.TensorHandle
    plain_dot = builder.create_dot

    def widened(x: Any) -> Any:
        if x.dtype.scalar == tl.bfloat16:
            return handle(bf16_to_f32(x.data), tl.float32)
        return x

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, acc: Any) -> Any:
        out = plain_dot(self, widened(a), widened(b), widened(d), precision, acc)
        if d.dtype.scalar == tl.bfloat16:
            return handle(f32_to_bf16(out.data), tl.bfloat16)
        return out

    builder.create_dot = create_dot


def _mend_reductions(interp: ModuleType, tl: ModuleType) -> None:
    """Sums, extrema and scans over values; Triton sums bfloat16 in float32."""

    def over_values(plain: Callable[..., Any]) -> Callable[..., Any]:
        def mended(self: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
            first = input[0] if isinstance(input, tuple) else input
            if first.dtype.scalar != tl.bfloat16:
                return plain(self, input, *args, **kwargs)
            wide = self.to_tensor(bf16_to_f32(first.handle.data), tl.float32)
            out = plain(self, wide, *args, **kwargs)
            if isinstance(out, (list, tuple)):
                return type(out)(narrow(self, x) for x in out)
            return narrow(self, out)

        return mended

    def narrow(self: Any, x: Any) -> Any:
        if x.dtype.scalar != tl.float32:
            return x
        return bits_tensor(self, f32_to_bf16(x.handle.data))

    def bits_tensor(self: Any, bits: Any) -> Any:
        if bits.shape == (1,):
            return self.to_tensor(bits[0], tl.bfloat16)
        return self.to_tensor(bits, tl.bfloat16)

    for cls, names in (
        (interp.ReduceOps, ("sum", "min_max")),
        (interp.ScanOps, ("cumsum", "cumprod")),
    ):
        for name in names:
            setattr(cls, name, over_values(getattr(cls, name)))


def _patch_language_for_good(interp: ModuleType, tl: ModuleType) -> None:
    """Put interpreted functions into `triton.language` once instead of per launch.

    The interpreter patches and restores the module around every launch, which costs
    more than most kernels here, and misses aliases such as `exp = tl.exp`, taken when
    a module is imported.
    """
    interp._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


def mend(triton: ModuleType) -> None:
    """Mend the interpreter of an imported `triton`. Idempotent.

    Raises:
        RuntimeError: Triton was imported to compile, or its interpreter lacks a
            method that is mended.
    """
    import triton.language as tl
    from triton.runtime import driver, interpreter

    from sglang_exact.rehearsal import executor

    if isinstance(driver._active, NoDriver):
        return
    if not triton.knobs.runtime.interpret:
        raise RuntimeError(
            "found TRITON_INTERPRET unset, expected 1. Fix: start the process with "
            "sglang_exact.rehearsal.environment.environment()."
        )
    wanted = [
        *((interpreter.InterpreterBuilder, name) for name in _MENDED_OPERATIONS),
        *((interpreter.ReduceOps, name) for name in ("sum", "min_max")),
        *((interpreter.ScanOps, name) for name in ("cumsum", "cumprod")),
        *((interpreter, name) for name in _MENDED_FUNCTIONS),
        (tl.core, "validate_block_shape"),
    ]
    missing = [f"{o.__name__}.{name}" for o, name in wanted if not hasattr(o, name)]
    if missing:
        raise RuntimeError(
            f"triton {triton.__version__}: found no {', '.join(missing)}, expected the "
            "interpreter of 3.8.0. Fix: pip install --no-deps triton==3.8.0."
        )
    _mend_casts(interpreter, tl)
    _mend_arithmetic(interpreter, tl)
    _mend_dot(interpreter, tl)
    _mend_reductions(interpreter, tl)
    _patch_language_for_good(interpreter, tl)
    executor.install(interpreter, tl.core)
    driver.set_active(NoDriver())
