# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM at the largest served numbers of rows: which, of what, and what is found."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_exact.selftest import deep_gemm as selftest  # noqa: E402

SERVED = (17, 64, 384, 768)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("running", "algorithm", "tokens", "want"),
    [
        (48, "DFLASH", 8, (17, 64, 384, 8192)),
        (48, "NGRAM", 16, (17, 64, 768, 8192)),
        (8, None, None, (8, 17, 64, 8192)),
        # Left over from flags that count only with a drafter.
        (8, None, 16, (8, 17, 64, 8192)),
        (None, None, None, (17, 64, 256, 8192)),
    ],
)
def test_served_rows(
    running: int | None, algorithm: str | None, tokens: int | None, want: Any
) -> None:
    cfg = SimpleNamespace(
        max_running_requests=running,
        speculative_algorithm=algorithm,
        speculative_num_draft_tokens=tokens,
        chunked_prefill_size=8192,
        max_prefill_tokens=16384,
        cuda_graph_config=SimpleNamespace(
            prefill=SimpleNamespace(backend="disabled", bs=[4, 512])
        ),
    )
    assert selftest.served_rows(cfg, SimpleNamespace(context_len=4096)) == want
    cfg.cuda_graph_config.prefill.backend = "breakable"
    with_graphs = selftest.served_rows(cfg, SimpleNamespace(context_len=4096))
    assert with_graphs == tuple(sorted({*want, 4, 512}))
    cfg.chunked_prefill_size = -1
    assert selftest.served_rows(cfg, SimpleNamespace(context_len=4096))[-1] == 16384


def rows(limit: int) -> Callable[..., Any]:
    """A product whose rows from M = `limit` on are summed in another order."""

    def gemm(a: Any, w: Any) -> Any:
        gemm.asked.append(a.shape[0])  # type: ignore[attr-defined]
        if a.shape[0] < limit:
            return (a.float() @ w.float().t()).bfloat16()
        half = a.shape[1] // 2
        parts = [(a[:, s].float() @ w[:, s].float().t()).bfloat16() for s in
                 (slice(half), slice(half, None))]  # fmt: skip
        return parts[0] + parts[1]

    gemm.asked = []  # type: ignore[attr-defined]
    return gemm


@pytest.mark.parametrize("limit", [10**9, 768, 384, 65])
def test_other_rows_are_named(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Another split from some M on is found there and at no smaller M."""
    gemm = rows(limit)
    monkeypatch.setattr(selftest, "rows", gemm)
    torch.manual_seed(0)
    found = {(48, 256): torch.randn(48, 256).bfloat16()}
    reasons = selftest.run(found, SERVED, CPU)
    assert gemm.asked == [64, *SERVED]  # type: ignore[attr-defined]
    if limit > max(SERVED):
        assert reasons == []
        return
    (reason,) = reasons
    for m in SERVED:
        assert (f"M = {m}: " in reason.found.partition("M = 64: ")[2]) is (m >= limit)


def test_the_head_is_asked_for_no_more_than_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gemm = rows(10**9)
    monkeypatch.setattr(selftest, "rows", gemm)
    monkeypatch.setattr(selftest, "LARGEST_OUTPUT", 48 * 100)
    found = {(48, 256): torch.randn(48, 256).bfloat16()}
    assert selftest.run(found, SERVED, CPU) == []
    assert gemm.asked == [64, 17, 64, 100]  # type: ignore[attr-defined]


def test_weights_that_the_host_hands_over() -> None:
    def weight(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.nn.Parameter(torch.zeros(shape, dtype=dtype))

    model = torch.nn.Module()
    model.a = weight(32, 64)
    model.again = weight(32, 64)
    model.b = weight(16, 8)
    model.narrow = weight(8, 64)
    model.odd = weight(20, 64)
    model.short = weight(32, 12)
    model.full = weight(32, 128, dtype=torch.float32)
    model.row = weight(64)
    model.visual = torch.nn.Module()
    model.visual.a = weight(64, 64)
    assert set(selftest.weights(model)) == {(32, 64), (16, 8)}
