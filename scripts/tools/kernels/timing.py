# SPDX-License-Identifier: Apache-2.0
"""Timing and a time budget for bench_kernels.py and its parts."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton

STEADY_MS = 40.0


class Budget:
    """Seconds that may pass; what did not fit is kept in `left_out`."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.left_out: list[str] = []

    def allows(self, what: str) -> bool:
        if time.monotonic() < self._end:
            return True
        self.left_out.append(what)
        return False


def _wall_us(launch: Callable[[], Any]) -> float:
    started = time.perf_counter()
    launch()
    return (time.perf_counter() - started) * 1e6


def time_us(launch: Callable[[], Any], device: str, rep_ms: int = 20) -> float:
    """Median microseconds of one graph replay of `launch`, L2 flushed in between.

    Without a GPU: the interpreter's wall time, which only shows that it runs.
    """
    if device == "cpu":
        return _wall_us(launch)
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    bench = triton.testing.do_bench
    return float(bench(graph.replay, warmup=5, rep=rep_ms, return_mode="median")) * 1e3


def time_steady_us(launch: Callable[[], Any], device: str) -> float:
    """Median microseconds of `launch` run back to back, three times at least.

    For launches that take milliseconds: neither graph nor L2 flush would show.
    """
    if device == "cpu":
        return _wall_us(launch)
    launch()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < STEADY_MS and len(times) < 50):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2] * 1e3


def show(entry: dict[str, Any]) -> None:
    cells = []
    for name, value in entry.items():
        text = f"{value:.4g}" if isinstance(value, float) else f"{value}"
        cells.append(f"{name}={text}")
    print("  ".join(cells), flush=True)


def versions(device: str) -> dict[str, str]:
    """What ran, for the report."""
    on_gpu = device == "cuda"
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else "none (interpreted)",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(sys.argv),
    }
