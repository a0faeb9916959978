# SPDX-License-Identifier: Apache-2.0
"""Scratch of the attention kernel: graphs keep the buffers they were captured with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_exact.hooks import decode_attention  # noqa: E402
from sglang_exact.hooks.base import Unsupported  # noqa: E402


def backend(graph_rows: int) -> Any:
    """A triton backend after init_cuda_graph_state for `graph_rows` rows."""
    heads, splits, dim = 2, 3, 4
    made = SimpleNamespace(
        num_head=heads, max_kv_splits=splits, v_head_dim=dim, device="cpu"
    )
    setattr(made, decode_attention._OWN, True)
    made.cuda_graph_attn_logits = torch.zeros(graph_rows, heads, splits, dim)
    decode_attention.allocate_scratch(None, made, graph_rows, graph_rows)
    return made


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_attention, "_refuse_in_capture", lambda rows: None)


def test_larger_eager_batches_leave_the_graphs_their_buffers() -> None:
    """A replay writes to the addresses of its capture; they must stay allocated."""
    made = backend(4)
    captured = [x.data_ptr() for x in decode_attention.scratch(made, 4, None)]
    for rows in (8, 16):
        acc, stat = decode_attention.scratch(made, rows, None)
        assert acc.shape[0] == stat.shape[0] == rows
        assert stat.data_ptr() != captured[1]
    again = [x.data_ptr() for x in decode_attention.scratch(made, 4, None)]
    assert again == captured


def test_an_eager_batch_before_capture_lends_graphs_nothing() -> None:
    """What an eager batch holds may be replaced, so graphs get their own."""
    made = backend(4)
    delattr(made, decode_attention._GRAPH_STAT)
    _, eager_stat = decode_attention.scratch(made, 8, None)
    decode_attention.allocate_scratch(None, made, 4, 4)
    _, stat = decode_attention.scratch(made, 4, None)
    assert stat.data_ptr() != eager_stat.data_ptr()


def test_capture_never_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: buffers that are too small are an error while graphs are captured."""

    def capturing(rows: int) -> None:
        raise Unsupported(str(rows))

    monkeypatch.setattr(decode_attention, "_refuse_in_capture", capturing)
    made = backend(4)
    decode_attention.scratch(made, 4, None)
    with pytest.raises(Unsupported):
        decode_attention.scratch(made, 5, None)
