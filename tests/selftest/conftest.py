# SPDX-License-Identifier: Apache-2.0
"""The same interpreter as the kernel tests."""

from __future__ import annotations

import torch

if not torch.cuda.is_available():
    import triton

    from sglang_exact.rehearsal.interpreter import mend

    mend(triton)
