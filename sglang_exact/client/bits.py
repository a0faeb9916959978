# SPDX-License-Identifier: Apache-2.0
"""float32 bit patterns of the numbers in a JSON answer.

The host computes logprobs in float32 and writes them as JSON numbers that read back
exactly, so the bits of the server's value are recovered by rounding to float32.
"""

from __future__ import annotations

import math
import struct

SIGN = 0x80000000


def float32_bits(value: float | None) -> int | None:
    """Bits of `value` as float32, or None where it is not a finite float32.

    The host's JSON writer turns NaN and infinities into null, so null, NaN and
    infinity are one and the same thing here: a value that proves nothing.
    """
    if value is None or not math.isfinite(value):
        return None
    try:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    except OverflowError:
        return None


def bits_to_float(bits: int) -> float:
    """The float32 value of a bit pattern."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def ulp_distance(left: int, right: int) -> int:
    """How many float32 values lie between two bit patterns; 0.0 and -0.0 are 0 apart.

    Used to describe a difference, never to forgive one.
    """
    return abs(_ordered(left) - _ordered(right))


def _ordered(bits: int) -> int:
    return SIGN - bits if bits & SIGN else bits


def show(bits: int | None) -> str:
    """A logprob for people: decimal value and the exact bits, or "not finite"."""
    if bits is None:
        return "not finite"
    return f"{bits_to_float(bits):.7g} (0x{bits:08x})"
