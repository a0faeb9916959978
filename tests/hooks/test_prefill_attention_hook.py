# SPDX-License-Identifier: Apache-2.0
"""Which prefill forwards run the overlay's kernel, and which stay with the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_exact.hooks import prefill_attention as hook  # noqa: E402
from sglang_exact.hooks.base import UnknownArgument  # noqa: E402
from sglang_exact_kernels import prefill_attention as module  # noqa: E402

BS, HEADS, DIM, TOKENS = 2, 2, 16, 7


def backend(**changes: Any) -> Any:
    """The target's backend; its index tensors are longer than the batch."""
    pool = SimpleNamespace(get_key_buffer=lambda i: "k", get_value_buffer=lambda i: "v")
    metadata = SimpleNamespace(
        max_extend_len=4,
        qo_indptr=torch.tensor([0, 3, 7, 7]),
        kv_indptr=torch.tensor([0, 5, 9, 0, 0]),
        kv_indices=torch.arange(9),
        custom_mask=None,
    )
    fields = {
        "is_draft_runner": False,
        "use_mla": False,
        "page_size": 1,
        "token_to_kv_pool": pool,
        "forward_metadata": metadata,
    }
    return SimpleNamespace(**(fields | changes))


def layer(**changes: Any) -> Any:
    fields = {
        "layer_id": 0,
        "tp_q_head_num": HEADS,
        "qk_head_dim": DIM,
        "v_head_dim": DIM,
        "scaling": 0.5,
        "sliding_window_size": -1,
        "xai_temperature_len": -1,
        "k_scale": None,
        "v_scale": None,
    }
    return SimpleNamespace(**(fields | changes))


def run(
    monkeypatch: pytest.MonkeyPatch,
    backend: Any,
    layer: Any,
    *,
    causal: bool = True,
    cap: float = 0.0,
    sinks: Any = None,
    mode: str = "EXTEND",
    **more: Any,
) -> Any:
    """The host's own result, or the arguments of the kernel."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        module,
        "prefill_attention",
        lambda q, k, v, o, **given: seen.update(given, kv=(k, v), q=q, o=o),
    )
    batch = SimpleNamespace(
        batch_size=BS,
        out_cache_loc=torch.arange(20, 27),
        forward_mode=SimpleNamespace(name=mode),
    )
    q = torch.zeros(TOKENS, HEADS * DIM)
    out = hook.prefill_rows(
        lambda *args, **kw: "host", backend, q, q, layer, batch, causal, cap, sinks,
        **more,
    )  # fmt: skip
    return seen if out is q else out


def test_extend_runs_the_kernel_on_the_batch_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = run(monkeypatch, backend(), layer())
    assert seen["kv"] == ("k", "v")
    assert seen["q"].shape == seen["o"].shape == (TOKENS, HEADS, DIM)
    assert seen["qo_indptr"].tolist() == [0, 3, 7]
    assert seen["kv_indptr"].tolist() == [0, 5, 9]
    assert seen["kv_indices"].tolist() == list(range(9))
    assert seen["out_cache_loc"].tolist() == list(range(20, 27))
    assert seen["max_extend_len"] == 4
    assert seen["sm_scale"] == 0.5


def test_draft_and_other_modes_stay_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, backend(is_draft_runner=True), layer()) == "host"
    for mode in ("MIXED", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "SPLIT_PREFILL"):
        assert run(monkeypatch, backend(), layer(), mode=mode) == "host"


@pytest.mark.parametrize(
    ("of_backend", "of_layer", "of_call"),
    [
        ({"use_mla": True}, {}, {}),
        ({"page_size": 64}, {}, {}),
        ({}, {"sliding_window_size": 128}, {}),
        ({}, {"k_scale": 1.0}, {}),
        ({}, {"xai_temperature_len": 1}, {}),
        ({}, {"qk_head_dim": 288}, {}),
        ({}, {}, {"cap": 30.0}),
        ({}, {}, {"causal": False}),
        ({}, {}, {"sinks": 1}),
        ({}, {}, {"score_mod": 1}),
    ],
)
def test_layers_that_stay_with_the_host(
    monkeypatch: pytest.MonkeyPatch,
    of_backend: dict[str, Any],
    of_layer: dict[str, Any],
    of_call: dict[str, Any],
) -> None:
    found = run(monkeypatch, backend(**of_backend), layer(**of_layer), **of_call)
    assert found == "host"


def test_a_custom_mask_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    masked = backend()
    masked.forward_metadata.custom_mask = torch.ones(3)
    with pytest.raises(hook.UnsupportedPrefill, match="custom mask"):
        run(monkeypatch, masked, layer())


def test_unknown_arguments_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownArgument, match="bias"):
        run(monkeypatch, backend(), layer(), bias=1)
