# SPDX-License-Identifier: Apache-2.0
"""Kernel tests run on the GPU if there is one, else in Triton's interpreter.

TRITON_INTERPRET acts when kernels are decorated; tests/conftest.py sets it before
triton is imported. The interpreter proves indexing, masks and wiring; only tests marked
gpu prove bits.
"""

from __future__ import annotations

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "found no GPU and TRITON_INTERPRET unset, expected tests/conftest.py to "
            "set it to 1; unset TRITON_INTERPRET=0"
        )
    import triton

    from sglang_exact.rehearsal.interpreter import mend

    mend(triton)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")
