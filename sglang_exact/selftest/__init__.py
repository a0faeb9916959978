# SPDX-License-Identifier: Apache-2.0
"""Start-up self-test on the device: our kernels against the kernels they must equal.

Runs in every rank after the target model is loaded and before KV pools and graph
capture. On the CPU (rehearsal) it does not run: the interpreter proves no bits.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from sglang_exact.reasons import Reason

_report: dict[str, Any] = {"ran": False}


def last_report() -> dict[str, Any]:
    """What the self-test of this process found; `ran` is False without a GPU."""
    return dict(_report)


def run(model_runner: Any, names: Collection[str], small_m: int) -> list[Reason]:
    """Compare kernels bit for bit on this device; returns reasons on a mismatch.

    `names`: the hooks of this rank; `small_m`: largest M of the small-M tiles.
    """
    if not str(model_runner.device).startswith("cuda"):
        return []
    from sglang_exact.selftest import attention, gdn

    started = time.monotonic()
    reasons: list[Reason] = []
    if "gdn_verify" in names:
        reasons += gdn.run(model_runner)
    if "decode_attention" in names:
        reasons += attention.run(model_runner)
    if "prefill_attention" in names:
        reasons += attention.run_prefill(model_runner)
    reasons += _deep_gemm(model_runner)
    if "small_m_gemm" in names:
        reasons += _small_m(model_runner, small_m)
    _report.update(
        ran=True,
        seconds=round(time.monotonic() - started, 2),
        mismatches=len(reasons),
    )
    return reasons


def _deep_gemm(model_runner: Any) -> list[Reason]:
    """DeepGEMM at the numbers of rows that this server will ask for."""
    import torch
    from sglang.srt.arg_groups.overrides import resolved_view

    from sglang_exact.selftest import deep_gemm

    cfg = resolved_view(model_runner.server_args)
    served = deep_gemm.served_rows(cfg, model_runner.model_config)
    _report["deep_gemm_rows"] = list(served)
    device = torch.device(model_runner.device, torch.cuda.current_device())
    found = deep_gemm.weights(model_runner.model)
    return deep_gemm.run(found, served, device)


def _small_m(model_runner: Any, limit: int) -> list[Reason]:
    """Turn the small-M tiles on for the shapes of this model that pass their test."""
    import torch

    from sglang_exact.hooks import small_m_gemm
    from sglang_exact.selftest import race

    if not limit:
        return []
    weights = small_m_gemm.linear_weights(model_runner.model)
    device = torch.device(model_runner.device, torch.cuda.current_device())
    reasons = small_m_gemm.self_test(weights, device, limit=limit, weights=weights)
    reasons += race.run(weights, device, limit=limit)
    if not reasons:
        small_m_gemm.enable(weights, limit)
        _report["small_m_shapes"] = sorted(weights)
    return reasons
