# SPDX-License-Identifier: Apache-2.0
"""Which verify forwards run the attention kernel, and which are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from attention_layer import attention_layer

torch = pytest.importorskip("torch")

from sglang_exact.hooks import attention_verify, decode_attention  # noqa: E402
from sglang_exact.hooks.base import Unsupported  # noqa: E402

BS, STEPS, HEADS, DIM = 2, 3, 2, 4


def backend(**changes: Any) -> Any:
    """The target's backend; a CUDA graph pads kv_indptr and out_cache_loc."""
    pool = SimpleNamespace(get_key_buffer=lambda i: "k", get_value_buffer=lambda i: "v")
    metadata = SimpleNamespace(
        max_extend_len=STEPS,
        kv_indptr=torch.tensor([0, 5, 9, 0, 0]),
        kv_indices=torch.arange(9),
    )
    fields = {
        "is_draft_runner": False,
        "topk": 1,
        "page_size": 1,
        "token_to_kv_pool": pool,
        "forward_metadata": metadata,
        decode_attention._OWN: True,
    }
    return SimpleNamespace(**(fields | changes))


def layer(**changes: Any) -> Any:
    return attention_layer(HEADS, DIM, **changes)


def run(
    monkeypatch: pytest.MonkeyPatch,
    backend: Any,
    layer: Any,
    *,
    causal: bool = True,
    cap: float = 0.0,
    sinks: Any = None,
    verify: bool = True,
) -> Any:
    """The host's own result, or the arguments of the attention kernel."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        decode_attention,
        "attend",
        lambda backend, kv, q, o, **given: seen.update(given, kv=kv, q=q, o=o),
    )
    batch = SimpleNamespace(
        batch_size=BS,
        out_cache_loc=torch.arange(20, 20 + BS * STEPS + 4),
        forward_mode=SimpleNamespace(is_target_verify=lambda: verify),
    )
    q = torch.zeros(BS * STEPS, HEADS * DIM)
    out = attention_verify.verify_rows(
        lambda *args, **kw: "host", backend, q, q, layer, batch, causal, cap, sinks
    )
    return seen if out is q else out


def test_verify_runs_the_kernel_on_the_batch_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = run(monkeypatch, backend(), layer())
    assert seen["kv"] == ("k", "v")
    assert seen["q"].shape == seen["o"].shape == (BS * STEPS, HEADS, DIM)
    assert seen["num_draft_tokens"] == STEPS
    assert seen["kv_indptr"].tolist() == [0, 5, 9]
    assert seen["out_cache_loc"].tolist() == list(range(20, 20 + BS * STEPS))


def test_draft_and_extend_stay_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, backend(is_draft_runner=True), layer()) == "host"
    assert run(monkeypatch, backend(), layer(), verify=False) == "host"


@pytest.mark.parametrize(
    ("of_backend", "of_layer", "of_call", "word"),
    [
        ({decode_attention._OWN: False}, {}, {}, "hook decode_attention"),
        ({"topk": 4}, {}, {}, "topk 4"),
        ({"page_size": 64}, {}, {}, "page size 64"),
        ({}, {"sliding_window_size": 128}, {}, "sliding window"),
        ({}, {"k_scale": 1.0}, {}, "scaled KV cache"),
        ({}, {"xai_temperature_len": 1}, {}, "soft cap"),
        ({}, {}, {"cap": 30.0}, "soft cap"),
        ({}, {}, {"causal": False}, "bidirectional"),
        ({}, {}, {"sinks": 1}, "sinks"),
    ],
)
def test_what_cannot_have_decodes_bits_raises(
    monkeypatch: pytest.MonkeyPatch,
    of_backend: dict[str, Any],
    of_layer: dict[str, Any],
    of_call: dict[str, Any],
    word: str,
) -> None:
    with pytest.raises(Unsupported, match=word):
        run(monkeypatch, backend(**of_backend), layer(**of_layer), **of_call)
