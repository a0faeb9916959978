# SPDX-License-Identifier: Apache-2.0
"""Per-step numbers of a profiler trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tools.proof import trace


def event(cat: str, name: str, ts: float, dur: float) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


def step(at: float) -> list[dict[str, object]]:
    return [
        event("cuda_runtime", "cudaGraphLaunch", at, 2),
        event("kernel", "gemm", at + 5, 10),
        event("kernel", "norm", at + 12, 6),
        event("gpu_memcpy", "Memcpy DtoH", at + 20, 1),
        event("cuda_runtime", "cudaEventSynchronize", at + 4, 20),
    ]


def test_counts_are_per_step() -> None:
    found = trace.summarise([*step(0), *step(100)], 2)
    assert found.graph_launches == 1
    assert found.kernels == 2
    assert found.waits == {"cudaEventSynchronize": 1.0}
    assert found.allocations == {} and found.loads == {}
    # 5 to 18 and 20 to 21; from 5 to 121 over two steps.
    assert found.busy_us == 14.0
    assert found.span_us == 58.0
    assert found.top == [("gemm", 10.0, 1.0), ("norm", 6.0, 1.0)]


def test_an_allocation_and_a_compilation_show() -> None:
    extra = [
        event("cuda_runtime", "cudaMalloc", 1, 1),
        event("cuda_driver", "cuModuleLoadData", 2, 1),
    ]
    found = trace.summarise([*step(0), *extra], 1)
    assert found.allocations == {"cudaMalloc": 1.0}
    assert found.loads == {"cuModuleLoadData": 1.0}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_reads_plain_and_gzipped(tmp_path: Path, pack: type) -> None:
    path = tmp_path / "x.trace.json"
    path.write_bytes(pack(json.dumps({"traceEvents": step(0)}).encode()))
    assert trace.summarise(trace.read_events(path), 1).kernels == 2


def test_other_files_and_empty_traces_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match="expected a Chrome trace"):
        trace.read_events(path)
    with pytest.raises(ValueError, match="no GPU activity"):
        trace.summarise([], 1)
    with pytest.raises(ValueError, match="1 or more"):
        trace.summarise(step(0), 0)
