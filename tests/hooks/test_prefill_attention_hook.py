# SPDX-License-Identifier: Apache-2.0
"""Which prefill forwards run the overlay's kernel, and which stay with the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from attention_layer import attention_layer

torch = pytest.importorskip("torch")

from sglang_exact.hooks import prefill_attention as hook  # noqa: E402
from sglang_exact.hooks.base import UnknownArgument, Unsupported  # noqa: E402
from sglang_exact_kernels import prefill_attention as module  # noqa: E402

BS, HEADS, DIM, TOKENS = 2, 2, 16, 7
K = torch.zeros(1, HEADS, DIM)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def any_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose kernels work on a copy if head_dim is a power of 2."""
    monkeypatch.setattr(
        module, "copies", lambda device, dim, v_dim: dim == v_dim in (16, 32)
    )


def backend(**changes: Any) -> Any:
    """The target's backend; its index tensors are longer than the batch."""
    pool = SimpleNamespace(get_key_buffer=lambda i: K, get_value_buffer=lambda i: "v")
    metadata = SimpleNamespace(
        max_extend_len=4,
        # int64, as the host makes it outside of graphs.
        qo_indptr=torch.tensor([0, 3, 7, 7]),
        kv_indptr=torch.tensor([0, 5, 9, 0, 0]),
        kv_indices=torch.arange(9),
        custom_mask=None,
    )
    fields = {
        "is_draft_runner": False,
        "use_mla": False,
        "page_size": 1,
        "max_context_len": 8,
        "token_to_kv_pool": pool,
        "forward_metadata": metadata,
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
    assert seen["kv"][0] is K and seen["kv"][1] == "v"
    assert seen["q"].shape == seen["o"].shape == (TOKENS, HEADS, DIM)
    assert seen["qo_indptr"].tolist() == [0, 3, 7]
    assert seen["qo_indptr"].dtype == torch.int32
    assert seen["kv_indptr"].tolist() == [0, 5, 9]
    assert seen["kv_indices"].tolist() == list(range(9))
    assert seen["out_cache_loc"].tolist() == list(range(20, 27))
    assert seen["max_extend_len"] == 4
    assert seen["sm_scale"] == 0.5
    assert seen["dense"] is None


def test_the_kernel_takes_what_the_hook_hands_over() -> None:
    """The host's dtypes and slices, by the kernel itself."""
    made = backend()
    k = torch.zeros(27, HEADS, DIM, dtype=torch.float16, device=DEVICE)
    made.token_to_kv_pool = SimpleNamespace(
        get_key_buffer=lambda i: k, get_value_buffer=lambda i: k + 1
    )
    held = made.forward_metadata
    held.qo_indptr = held.qo_indptr.to(DEVICE)
    held.kv_indptr = held.kv_indptr.to(DEVICE, torch.int32)
    held.kv_indices = held.kv_indices.to(DEVICE)
    batch = SimpleNamespace(
        batch_size=BS,
        out_cache_loc=torch.arange(20, 27, device=DEVICE),
        forward_mode=SimpleNamespace(name="EXTEND"),
    )
    q = torch.zeros(TOKENS, HEADS * DIM, dtype=k.dtype, device=DEVICE)
    out = torch.zeros_like(q)
    hook.prefill_rows(_no_host, made, q, out, layer(), batch, True, 0.0, None)
    assert bool((out == 1).all())


def _no_host(*given: Any, **more: Any) -> None:
    raise AssertionError("found a call of the host's kernel")


def test_long_steps_get_one_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the step's keys; allocated by the first prefill, for the longest context."""
    monkeypatch.setattr(module, "GATHER_KEYS", 16)
    monkeypatch.setattr(hook, "_STEP_KEYS", 12)
    monkeypatch.setattr(hook, "_STEP_REQUESTS", 2)
    made = backend()
    assert run(monkeypatch, made, layer())["dense"] is getattr(made, hook._DENSE)
    held = getattr(made, hook._DENSE)
    assert held.shape == (2, HEADS, 8 + 12 + 2 * 64, DIM)
    assert hook.dense_scratch(made, K, DIM, 15, 1) is None
    assert hook.dense_scratch(made, K, DIM, 20, 2) is held
    assert hook.dense_scratch(made, K, DIM, 21, 2) is None
    assert hook.dense_scratch(made, K, DIM, 20, 3) is None
    assert getattr(made, hook._DENSE) is held


def test_heads_or_gpus_without_a_copy_get_none() -> None:
    made = backend()
    assert hook.dense_scratch(made, torch.zeros(1, 2, 40), 40, 10**5, 1) is None
    assert not hasattr(made, hook._DENSE)


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
    with pytest.raises(Unsupported, match="custom mask"):
        run(monkeypatch, masked, layer())


def test_unknown_arguments_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownArgument, match="bias"):
        run(monkeypatch, backend(), layer(), bias=1)
