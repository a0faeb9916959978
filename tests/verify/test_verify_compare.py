# SPDX-License-Identifier: Apache-2.0
"""The comparison forgives nothing but the order of exact ties."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_exact.client.answer import Sample
from sglang_exact.client.bits import bits_to_float, float32_bits, ulp_distance
from sglang_exact.client.wire import sort_top
from sglang_exact.verify.compare import compare, differences, top_equal


def bits(value: float) -> int:
    found = float32_bits(value)
    assert found is not None
    return found


def top(*pairs: tuple[float, int]) -> tuple[tuple[int | None, int], ...]:
    return sort_top([(bits(value), token) for value, token in pairs])


SAMPLE = Sample(
    ids=(4, 9, 2),
    logprobs=(bits(-0.5), bits(-1.5), bits(-0.25)),
    top=(
        top((-0.5, 4), (-0.75, 3)),
        top((-1.5, 9), (-1.5, 8), (-2.5, 1)),
        top((-0.25, 2)),
    ),
    finish="length:3",
    prompt_tokens=5,
)


def test_equal() -> None:
    assert compare(SAMPLE, replace(SAMPLE)) is None


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bits_survive_json(value: float) -> None:
    found = float32_bits(float(repr(value)))
    assert found == struct.unpack("<I", struct.pack("<f", value))[0]
    assert math.copysign(1, bits_to_float(found)) == math.copysign(1, value)


def test_signed_zeros_differ() -> None:
    zero = replace(SAMPLE, logprobs=(bits(0.0), *SAMPLE.logprobs[1:]))
    minus = replace(SAMPLE, logprobs=(bits(-0.0), *SAMPLE.logprobs[1:]))
    found = compare(zero, minus)
    assert found is not None and found.what == ("logprobs",)
    assert found.ulps == 0


def test_one_bit_differs() -> None:
    assert SAMPLE.logprobs[1] is not None
    values = (SAMPLE.logprobs[0], SAMPLE.logprobs[1] + 1, SAMPLE.logprobs[2])
    found = compare(replace(SAMPLE, logprobs=values), SAMPLE)
    assert found is not None
    assert (found.position, found.ulps, found.id_position) == (1, 1, None)
    assert found.max_abs > 0
    assert differences(replace(SAMPLE, logprobs=values), SAMPLE)[0] == 0


@pytest.mark.parametrize(
    ("changes", "what", "position"),
    [
        ({"ids": (4, 8, 2)}, "ids", 1),
        ({"ids": (4, 9), "logprobs": SAMPLE.logprobs[:2]}, "length", 2),
        ({"finish": "stop:2"}, "finish reason", None),
        ({"prompt_tokens": 6}, "prompt length", None),
        ({"top": (top((-0.5, 4), (-0.8, 3)), *SAMPLE.top[1:])}, "top-k", 0),
        ({"top": (top((-0.5, 5), (-0.75, 3)), *SAMPLE.top[1:])}, "top-k", 0),
        ({"logprobs": (None, *SAMPLE.logprobs[1:])}, "not finite", 0),
    ],
)
def test_every_field_counts(changes: dict, what: str, position: int | None) -> None:
    found = compare(replace(SAMPLE, **changes), SAMPLE)
    assert found is not None
    assert what in found.what
    assert found.position == position


def test_after_another_token_numbers_say_nothing() -> None:
    other = replace(
        SAMPLE, ids=(4, 8, 2), logprobs=(SAMPLE.logprobs[0], bits(-9.0), bits(-9.0))
    )
    found = compare(other, SAMPLE)
    assert found is not None and found.what == ("ids",)
    assert found.top2_gap == 0.0


def test_tie_order_is_free_and_the_cut_is_too() -> None:
    assert top_equal(top((-1.0, 8), (-1.0, 9)), top((-1.0, 9), (-1.0, 8)))
    assert top_equal(top((-1.0, 1), (-2.0, 8)), top((-1.0, 1), (-2.0, 9)))
    assert not top_equal(top((-1.0, 1), (-2.0, 8)), top((-1.0, 2), (-2.0, 8)))
    assert not top_equal(top((-1.0, 1)), top((-1.0, 1), (-2.0, 8)))


def test_ulp_distance_crosses_zero() -> None:
    assert ulp_distance(bits(0.0), bits(-0.0)) == 0
    smallest = float(struct.unpack("<f", struct.pack("<I", 1))[0])
    assert ulp_distance(bits(smallest), bits(-smallest)) == 2
