# SPDX-License-Identifier: Apache-2.0
"""The model whose shapes bench_kernels.py times: the 27B's, on one GPU.

Its parts read these names when they run, so that a test may put a small model here.
"""

from __future__ import annotations

import torch

Q_HEADS, KV_HEADS, DIM = 24, 4, 256
GDN_HEADS, GDN_V_HEADS, GDN_DIM = 16, 48, 128
T = 8
"""Draft tokens of a verify block."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOST_CONTEXT = 135_168
HOST_SPLIT = 256
"""The host's split tile in deterministic mode; it unrolls over HOST_CONTEXT."""
