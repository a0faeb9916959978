# SPDX-License-Identifier: Apache-2.0
"""The start-up self-tests agree with themselves here, and can fail."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_exact.selftest import attention as selftest_attention
from sglang_exact.selftest import gdn as selftest_gdn
from sglang_exact.selftest import prefix as selftest_prefix
from sglang_exact_kernels import decode_attention

TINY = selftest_gdn.Shape(2, 4, 32, 32)


@pytest.mark.host
def test_gdn_compares_equal_with_the_hosts_decode_kernel() -> None:
    assert selftest_gdn.compare(TINY, 2, 3, 1, "cpu") == []


@pytest.mark.host
def test_gdn_names_a_planted_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    real = selftest_gdn._step_by_step

    def off_by_one_bit(*args: Any) -> Any:
        out, states = real(*args)
        states.view(torch.int32).flatten()[7] ^= 1
        return out, states

    monkeypatch.setattr(selftest_gdn, "_step_by_step", off_by_one_bit)
    found = selftest_gdn.compare(TINY, 1, 2, 1, "cpu")
    assert len(found) == len(selftest_gdn.GATE_RANGES)
    assert all(text.startswith("state: 1 of ") for text in found)


def test_attention_rows_equal_single_rows() -> None:
    assert selftest_attention.compare(4, 2, 32, 2, 1, "cpu") == []


def test_attention_rows_cross_into_the_long_splits() -> None:
    longest = max(selftest_attention.GPU_PREFIX_LENGTHS)
    edge = decode_attention._TIERS.end_1
    assert longest < edge < longest + 8
    assert selftest_attention.compare(2, 1, 32, 8, 1, "cpu", (1, longest)) == []


def test_attention_names_a_planted_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_exact_kernels import decode_attention as module

    real = module.decode_attention

    def leaky(q: Any, k: Any, v: Any, out: Any, **given: Any) -> None:
        real(q, k, v, out, **given)
        if given.get("out_cache_loc") is not None:
            out.view(torch.int16)[3, 0, 0] ^= 1

    monkeypatch.setattr(module, "decode_attention", leaky)
    found = selftest_attention.compare(4, 2, 32, 2, 1, "cpu")
    assert found == ["1 elements of draft position 1 after 1 tokens"]


ALIGNED = ((64,), (128, 512))
"""Cuts that leave rows their place in a tile: numpy's products depend on it."""


def test_prefill_keeps_its_bits_when_cut() -> None:
    assert selftest_attention.compare_prefill(4, 2, 32, 1, "cpu", ALIGNED) == []


def test_prefill_names_a_planted_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_exact_kernels import prefill_attention as module

    real = module.prefill_attention

    def leaky(q: Any, k: Any, v: Any, out: Any, **given: Any) -> None:
        real(q, k, v, out, **given)
        if len(given["kv_indptr"]) == 3:
            out.view(torch.int16)[-1, 0, 0] ^= 1

    monkeypatch.setattr(module, "prefill_attention", leaky)
    found = selftest_attention.compare_prefill(4, 2, 32, 1, "cpu", ALIGNED[:1])
    text = "1 elements of tokens 64 to 900, cut at (64,)"
    assert found == [text, f"{text}, keys copied"]


def test_prefill_names_a_copy_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_exact_kernels import prefill_attention as module

    real = module.prefill_attention

    def leaky(q: Any, k: Any, v: Any, out: Any, **given: Any) -> None:
        real(q, k, v, out, **given)
        if given["dense"] is not None:
            out.view(torch.int16)[-1, 0, 0] ^= 1

    monkeypatch.setattr(module, "prefill_attention", leaky)
    found = selftest_attention.compare_prefill(4, 2, 32, 1, "cpu", ())
    assert found == ["1 elements of tokens 0 to 900, cut at (), keys copied"]


@pytest.mark.host
@pytest.mark.parametrize("tokens", [None, 4])
def test_a_model_without_gdn_layers_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tokens: int | None
) -> None:
    """Attention alone: no AttributeError in shape_of; plain decoding asks nothing."""
    from sglang.srt import runtime_context

    spec = SimpleNamespace(speculative_num_draft_tokens=tokens)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
    config = SimpleNamespace(hf_text_config=SimpleNamespace(num_attention_heads=4))
    runner = SimpleNamespace(device="cpu", model_config=config)
    found = selftest_gdn.run(runner)
    assert len(found) == (1 if tokens else 0)
    for reason in found:
        assert "a model without linear_num_key_heads, " in reason.found


@pytest.fixture
def fla_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLA enters the device of its tensors around a launch."""
    null = contextlib.nullcontext
    monkeypatch.setattr(torch.cpu, "device", lambda i=None: null(), raising=False)


@pytest.mark.host
@pytest.mark.usefixtures("fla_on_the_cpu")
def test_prefix_goes_on_from_a_kept_state() -> None:
    assert selftest_prefix.compare(TINY, 2, 1, "cpu") == []


@pytest.mark.host
@pytest.mark.usefixtures("fla_on_the_cpu")
def test_prefix_names_a_state_rounded_as_the_host_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = selftest_prefix._prefill

    def rounded(*args: Any, **given: Any) -> Any:
        outputs, kept = real(*args, **given)
        return outputs, None if kept is None else kept.bfloat16().float()

    monkeypatch.setattr(selftest_prefix, "_prefill", rounded)
    found = selftest_prefix.compare(TINY, 2, 1, "cpu")
    assert [text.partition(":")[0] for text in found] == [
        "kept state against that of a prompt cut there",
        "output of the rest of the prompt",
        "state after the rest of the prompt",
    ]
