# SPDX-License-Identifier: Apache-2.0
"""Kernel tests run on the GPU if there is one, else in Triton's interpreter.

TRITON_INTERPRET acts when kernels are decorated, so it is set before triton is
imported. The interpreter proves indexing, masks and wiring; only tests marked gpu
prove bits.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "found triton imported without its interpreter, expected tests/kernels to "
            "come first; run them alone or set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    from sglang_exact.rehearsal.interpreter import mend

    mend(triton)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")
