# SPDX-License-Identifier: Apache-2.0
"""Interpreted bfloat16 has torch's bits; without the mend it does not."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sglang_exact.rehearsal import interpreter
from sglang_exact.rehearsal.environment import REHEARSAL_VARIABLE, environment

CASES = Path(__file__).with_name("bf16_cases.py")

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton"
)


def _run(env: dict[str, str]) -> dict[str, bool]:
    ran = subprocess.run(
        [sys.executable, str(CASES)], env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    answer: dict[str, bool] = json.loads(ran.stdout.splitlines()[-1])
    return answer


@pytest.mark.host
@needs_triton
def test_mended_interpreter_has_torchs_bits() -> None:
    results = _run(environment())
    assert len(results) == 16
    assert [name for name, equal in results.items() if not equal] == []


@pytest.mark.host
@needs_triton
def test_control_without_the_mend_bits_differ() -> None:
    env = environment()
    del env[REHEARSAL_VARIABLE]
    results = _run(env)
    wrong = {name for name, equal in results.items() if not equal}
    assert {"add", "mul", "fma", "to_bfloat16", "sum", "dot"} <= wrong


def test_conversion_round_trips_and_rounds_to_even() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = interpreter.bf16_to_f32(bits)
    again = interpreter.f32_to_bf16(wide)
    number = ~np.isnan(wide)
    assert np.array_equal(again[number], bits[number])
    assert set(again[~number]) == {0x7FC0}
    halves = np.array([0x3F808000, 0x3F818000, 0x3F808001], dtype=np.uint32)
    rounded = interpreter.f32_to_bf16(halves.view(np.float32))
    assert rounded.tolist() == [0x3F80, 0x3F82, 0x3F81]


def test_conversion_equals_torch() -> None:
    torch = pytest.importorskip("torch")
    bits = np.random.RandomState(0).randint(0, 2**32, 200_000, dtype=np.uint32)
    wide = bits.view(np.float32)
    wide = wide[~np.isnan(wide)]
    ours = interpreter.f32_to_bf16(wide)
    theirs = torch.from_numpy(wide.copy()).bfloat16().view(torch.int16).numpy()
    assert np.array_equal(ours, theirs.view(np.uint16))
