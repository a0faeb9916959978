# SPDX-License-Identifier: Apache-2.0
"""What one decode or verify step costs, read from a trace of the host's profiler.

POST /start_profile makes the host write a Chrome trace (torch.profiler). Counted per
step: calls that make the host wait, calls that allocate device memory, code that is
loaded or compiled, graph launches, kernels and where GPU time goes.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

WAITS = frozenset(
    {
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaEventSynchronize",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
    }
)
ALLOCATIONS = frozenset(
    {"cudaMalloc", "cudaMallocAsync", "cudaFree", "cudaHostAlloc", "cuMemAlloc_v2"}
)
LOADS = frozenset(
    {"cuModuleLoadData", "cuModuleLoadDataEx", "cuLibraryLoadData", "cuModuleLoad"}
)
_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})


class Steps(NamedTuple):
    """A trace in numbers; counts and microseconds are per step.

    Attributes:
        steps: how many steps the trace holds.
        span_us: first kernel to last, per step.
        busy_us: union of the times in which a kernel, copy or fill ran.
        waits, allocations, loads: calls of each name that occurred.
        graph_launches, kernels: how many.
        top: (kernel name, microseconds, launches), costliest first.
    """

    steps: int
    span_us: float
    busy_us: float
    waits: dict[str, float]
    allocations: dict[str, float]
    loads: dict[str, float]
    graph_launches: float
    kernels: float
    top: list[tuple[str, float, float]]

    def record(self) -> dict[str, Any]:
        """As JSON types."""
        return self._asdict()


def read_events(path: str | Path) -> list[Mapping[str, Any]]:
    """The events of a trace file, gzipped or not.

    Raises:
        ValueError: the file is no Chrome trace.
        OSError: it cannot be read.
    """
    raw = Path(path).read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    # The host's kernel names may hold bytes that are no UTF-8.
    found = json.loads(raw.decode("utf-8", "replace"), strict=False)
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list):
        raise ValueError(
            f"{path}: found no traceEvents, expected a Chrome trace. Fix: give the "
            "file that the host's profiler wrote."
        )
    return [event for event in events if isinstance(event, dict)]


def _per_step(counts: Counter[str], names: Iterable[str], steps: int) -> dict[str, Any]:
    return {n: round(counts[n] / steps, 3) for n in sorted(names) if counts[n]}


def _busy(spans: list[tuple[float, float]]) -> float:
    """Length of the union of (start, end) intervals."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def summarise(events: Iterable[Mapping[str, Any]], steps: int, top: int = 15) -> Steps:
    """Numbers per step of a trace over `steps` steps.

    Args:
        events: of `read_events`.
        steps: decode or verify steps in the trace, 1 or more.
        top: how many kernels to name.

    Raises:
        ValueError: no steps, or no GPU activity in the trace.
    """
    if steps < 1:
        raise ValueError(f"found {steps} steps, expected 1 or more")
    calls: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    time_us: defaultdict[str, float] = defaultdict(float)
    spans: list[tuple[float, float]] = []
    for event in events:
        category, name = event.get("cat"), str(event.get("name"))
        if category in _RUNTIME:
            calls[name] += 1
        elif category in _GPU:
            start, length = float(event["ts"]), float(event.get("dur", 0.0))
            spans.append((start, start + length))
            if category == "kernel":
                launches[name] += 1
                time_us[name] += length
    if not spans:
        raise ValueError(
            "found no GPU activity in the trace, expected kernels. Fix: profile with "
            "activities CPU and GPU while requests run."
        )
    first, last = min(s for s, _ in spans), max(e for _, e in spans)
    return Steps(
        steps,
        round((last - first) / steps, 1),
        round(_busy(spans) / steps, 1),
        _per_step(calls, WAITS, steps),
        _per_step(calls, ALLOCATIONS, steps),
        _per_step(calls, LOADS, steps),
        round(calls["cudaGraphLaunch"] / steps, 2),
        round(sum(launches.values()) / steps, 1),
        [
            (name[:120], round(us / steps, 1), round(launches[name] / steps, 2))
            for name, us in sorted(time_us.items(), key=lambda x: -x[1])[:top]
        ],
    )
