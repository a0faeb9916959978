# SPDX-License-Identifier: Apache-2.0
"""Start-up self-test on the device: our kernels against the kernels they must equal.

Runs in every rank after the target model is loaded and before KV pools and graph
capture. On the CPU (rehearsal) it does not run: the interpreter proves no bits.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any, NamedTuple

from sglang_exact import schemes, scope_families
from sglang_exact.reasons import Reason

_report: dict[str, Any] = {"ran": False}


def last_report() -> dict[str, Any]:
    """What the self-test of this process found; `ran` is False without a GPU."""
    return dict(_report)


class Result(NamedTuple):
    """Every mismatch, and the (N, K) whose small-M tiles have DeepGEMM's bits."""

    reasons: list[Reason]
    small_m_shapes: Collection[tuple[int, int]] = ()


def run(model_runner: Any, names: Collection[str], small_m: int) -> Result:
    """Compare kernels bit for bit on this device.

    `names`: the hooks of this rank; `small_m`: largest M of the small-M tiles.
    """
    if not str(model_runner.device).startswith("cuda"):
        return Result([])
    from sglang_exact.selftest import attention, gdn, prefix

    tests = {
        "gdn_verify": gdn.run,
        "prefix_snapshot": prefix.run,
        "decode_attention": attention.run,
        "prefill_attention": attention.run_prefill,
    }
    started = time.monotonic()
    reasons: list[Reason] = []
    family = scope_families.of(model_runner.model_config.hf_config)
    for name in family.self_tests:
        if name in names:
            reasons += tests[name](model_runner)
    reasons += _linear(model_runner)
    shapes: Collection[tuple[int, int]] = ()
    if small_m and "small_m_gemm" in names:
        found, shapes = _small_m(model_runner, small_m)
        reasons += found
    _report.update(
        ran=True,
        seconds=round(time.monotonic() - started, 2),
        mismatches=len(reasons),
    )
    return Result(reasons, shapes)


def _linear(model_runner: Any) -> list[Reason]:
    """Linear layers at the numbers of rows that this server will ask for."""
    import torch
    from sglang.srt.arg_groups.overrides import resolved_view

    from sglang_exact.selftest import deep_gemm, quantised

    cfg = resolved_view(model_runner.server_args)
    served = deep_gemm.served_rows(cfg, model_runner.model_config)
    _report["deep_gemm_rows"] = list(served)
    device = torch.device(model_runner.device, torch.cuda.current_device())
    found = deep_gemm.weights(model_runner.model)
    reasons = deep_gemm.run(found, served, device)
    scheme = schemes.of(model_runner.model_config.hf_config)
    if scheme:
        layers = quantised.layers(model_runner.model, scheme)
        _report["quantised_shapes"] = sorted(layers)
        reasons += quantised.run(layers, served, device)
    return reasons


def _small_m(model_runner: Any, limit: int) -> Result:
    """The small-M tiles at the shapes of this model, and the race stress."""
    import torch

    from sglang_exact.selftest import race, small_m

    weights = small_m.linear_weights(model_runner.model)
    device = torch.device(model_runner.device, torch.cuda.current_device())
    reasons = small_m.run(weights, device, limit=limit)
    reasons += race.run(weights, device, limit=limit)
    if reasons:
        return Result(reasons)
    _report["small_m_shapes"] = sorted(weights)
    return Result([], tuple(weights))
