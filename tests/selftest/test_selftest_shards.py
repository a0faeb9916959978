# SPDX-License-Identifier: Apache-2.0
"""The start-up self-tests look at the shapes that one of several ranks serves."""

from __future__ import annotations

import pytest
import warm

from sglang_exact.selftest import attention as selftest_attention
from sglang_exact.selftest import gdn as selftest_gdn

SHAPES_OF_RANKS = """
from types import SimpleNamespace
from sglang.srt import runtime_context
from sglang_exact.selftest import attention as selftest_attention
from sglang_exact.selftest import gdn as selftest_gdn

seen = []
selftest_attention.compare = lambda *shape: seen.append(shape[:3]) or []
selftest_attention.compare_prefill = lambda *given: []
text = SimpleNamespace(
    linear_num_key_heads=16, linear_num_value_heads=48,
    linear_key_head_dim=128, linear_value_head_dim=128,
)
config = SimpleNamespace(
    hf_text_config=text, head_dim=256, get_max_num_attention_heads=lambda: 24,
    get_num_kv_heads=lambda ranks: 4 // ranks,
)
runner = SimpleNamespace(model_config=config, device="cpu")
runtime_context.get_spec = lambda: SimpleNamespace(speculative_num_draft_tokens=8)
for ranks in (1, 2):
    layout = SimpleNamespace(attn_tp_size=ranks, tp_size=ranks)
    runtime_context.get_parallel = lambda layout=layout: layout
    selftest_attention.run(runner)
    print(tuple(selftest_gdn.shape_of(runner)), seen.pop())
"""


@pytest.mark.host
def test_heads_are_those_of_one_rank() -> None:
    """Half the heads of every kind at two ranks; the head's width stays."""
    from sglang_exact.rehearsal.environment import environment

    ran = warm.run(["-c", SHAPES_OF_RANKS], env=environment())
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines() == [
        "(16, 48, 128, 128) (24, 4, 256)",
        "(8, 24, 128, 128) (12, 2, 256)",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [2, 8, 16])
def test_gdn_of_one_of_two_ranks(steps: int) -> None:
    """The 27B's 16 key and 48 value heads, halved."""
    shape = selftest_gdn.Shape(8, 24, 128, 128)
    for bs in (1, 3, 8):
        assert selftest_gdn.compare(shape, bs, steps, bs, "cuda") == []


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [2, 8, 16])
def test_attention_of_one_of_two_ranks(steps: int) -> None:
    """The 27B's 24 query and 4 key heads, halved."""
    assert selftest_attention.compare(12, 2, 256, steps, 1, "cuda") == []
