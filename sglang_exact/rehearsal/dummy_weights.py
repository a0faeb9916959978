# SPDX-License-Identifier: Apache-2.0
"""Random weights with a model's spread, seeded by parameter name, for dummy loading.

The host's dummy weights are uniform within 0.001: every layer is close to zero and a
difference in one of them cannot be seen in the logits. These keep activations of
order one through all layers. Each tensor has its own seed, so two servers of the same
model on the same kind of device load the same bits. The values differ between CPU and
GPU, whose generators do.
"""

from __future__ import annotations

import math
import os
import zlib
from typing import Any

TARGET = "sglang.srt.model_loader.weight_utils.initialize_dummy_weights"
TYPE = "REPLACE"
SWITCH = "SGLANG_EXACT_TEST_DUMMY_WEIGHTS"


def enabled() -> bool:
    """Whether this process was asked for realistic dummy weights."""
    return os.environ.get(SWITCH) == "1"


def seed_of(name: str, seed: int) -> int:
    """Seed of one parameter: crc32 of its name, moved by the model's seed."""
    return (zlib.crc32(name.encode()) + 7919 * (seed - 1234)) & 0x7FFFFFFF


def initialize_dummy_weights(
    model: Any, low: float = -1e-3, high: float = 1e-3, seed: int = 1234
) -> None:
    """Fill every floating-point parameter of `model` in place, on its device.

    Args:
        model: a `torch.nn.Module` of the host; parameters of any shape and device.
        low, high: unused; kept because the host passes parameters by these names.
        seed: of the model.

    Raises:
        ValueError: a parameter has fewer than 16 bits (quantized models).
    """
    import torch

    draft = "draft" in type(model).__name__.lower()
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if not torch.is_floating_point(parameter):
                continue
            if torch.finfo(parameter.dtype).bits < 16:
                raise ValueError(
                    f"{name}: found {parameter.dtype}, expected 16 bits or more. Fix: "
                    f"unset {SWITCH} for quantized models."
                )
            generator = torch.Generator(device=parameter.device)
            generator.manual_seed(seed_of(name, seed))
            _fill(name, parameter, generator, draft)


def _fill(name: str, parameter: Any, generator: Any, draft: bool) -> None:
    if name.endswith("A_log"):
        parameter.uniform_(1.0, 16.0, generator=generator).log_()
    elif name.endswith("dt_bias"):
        parameter.uniform_(-4.0, 1.0, generator=generator)
    elif "norm" in name and parameter.dim() == 1:
        parameter.uniform_(-0.2, 0.2, generator=generator)
        # Targets of the family scale by 1 + weight, except inside the delta net;
        # DFLASH drafts scale by the weight.
        if draft or name.endswith("linear_attn.norm.weight"):
            parameter.add_(1.0)
    elif parameter.dim() >= 2:
        # Fan-in: the last dimension, also of conv1d, whose weight is [C, 1, width].
        std = 1.0 / math.sqrt(parameter.shape[-1])
        if "embed_tokens" in name:
            std = 1.0
        elif "lm_head" in name:
            std *= 2.0
        parameter.normal_(0.0, std, generator=generator)
    else:
        parameter.uniform_(-0.1, 0.1, generator=generator)


replacement = initialize_dummy_weights
