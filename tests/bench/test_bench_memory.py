# SPDX-License-Identifier: Apache-2.0
"""Memory: what the host names, what NVML sees, what a drafter takes."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from bench_runs import against, record
from bench_server import BenchServer

from sglang_exact.bench.memory import measure as memory
from sglang_exact.bench.memory import tables as memory_tables
from sglang_exact.bench.memory.measure import NoNvml

PLAIN = {
    "weight": 50.25,
    "kvcache": 40.0,
    "startup_available": 12.5,
    "token_capacity": 655360,
    "graph": {"decode": 1.0, "prefill": 0.25},
}
SPEC = {**PLAIN, "kvcache": 34.0, "token_capacity": 557056, "graph": {"decode": 2.5}}


def server(
    usage: Any = PLAIN, *, speculative: bool = False, **info: Any
) -> BenchServer:
    state = {} if usage is None else {"memory_usage": usage}
    info = {"internal_states": [state], "mem_fraction_static": 0.85, **info}
    return BenchServer(speculative=speculative, info=info)


def run_memory(path: Path, servers: dict[str, BenchServer], *args: str) -> Any:
    code, out, err = against(
        servers, "memory", "--output-file", "run.json", *args, cwd=path
    )
    kept = path / "run.json"
    return code, out, err, record(kept) if kept.exists() else None


def test_plain_against_speculative(tmp_path: Path) -> None:
    servers = {"spec": server(SPEC, speculative=True), "plain": server()}
    code, out, err, run = run_memory(tmp_path, servers, "--markdown", "m.md")
    assert code == 0, err
    rows = {row["server"]: row for row in run["rows"]}
    assert rows["plain"]["weight_gib"] == 50.25 and rows["plain"]["graph_gib"] == 1.25
    assert rows["plain"]["plain"] and not rows["spec"]["plain"]
    (apart,) = memory_tables.overheads(run["rows"])
    assert (apart["kv_gib"], apart["kv_tokens"]) == (-6.0, 557056 - 655360)
    assert apart["kv_tokens_share"] == 0.85
    assert "85.0% of the tokens of plain" in out
    assert "spec - plain" in (tmp_path / "m.md").read_text()
    # Two servers at once: nobody can say whose memory NVML sees.
    assert rows["spec"]["nvml"] is None
    assert any("NVML is left out: with several" in note for note in run["notes"])


def test_one_after_the_other_in_one_record(tmp_path: Path) -> None:
    code, _, err, _ = run_memory(tmp_path, {"plain": server()})
    assert code == 0, err
    later = {"spec": server(SPEC, speculative=True, mem_fraction_static=0.8)}
    code, out, err, run = run_memory(tmp_path, later, "--resume")
    assert code == 0, err
    assert [r["server"] for r in run["rows"]] == ["plain", "spec"]
    assert [s["name"] for s in run["provenance"]["servers"]] == ["plain", "spec"]
    assert "spec differs from plain in mem_fraction_static: 0.8 against 0.85" in out


@pytest.mark.parametrize("usage", [None, "text", [1]])
def test_server_that_does_not_say(tmp_path: Path, usage: Any) -> None:
    servers = {"plain": server(), "odd": server(usage)}
    code, out, err, run = run_memory(tmp_path, servers)
    assert code == 2
    assert "server odd: found no memory_usage" in err and "fix:" in err
    assert [r["server"] for r in run["rows"]] == ["plain"] and not run["complete"]
    assert "50.25" in out


def test_odd_values_are_not_numbers(tmp_path: Path) -> None:
    odd = {"weight": "5", "kvcache": None, "graph": [1], "token_capacity": True}
    code, _, err, run = run_memory(tmp_path, {"plain": server(odd)})
    assert code == 0, err
    row = run["rows"][0]
    assert row["weight_gib"] is None and row["kv_gib"] is None
    assert row["kv_tokens"] is None and row["graphs"] == {}


def fake_nvml(
    monkeypatch: pytest.MonkeyPatch, count: int = 1, width: int = 6144
) -> None:
    """nvidia-ml-py with the figures of an H200."""

    class NVMLError(Exception):
        pass

    def bus(handle: int) -> int:
        if not width:
            raise NVMLError("Not Supported")
        return width

    info = types.SimpleNamespace(used=120 * memory.GIB, total=140 * memory.GIB)
    module = types.SimpleNamespace(
        __spec__=types.SimpleNamespace(name="pynvml"),
        NVMLError=NVMLError,
        NVML_CLOCK_MEM=2,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetMemoryInfo=lambda h: info,
        nvmlDeviceGetName=lambda h: b"NVIDIA H200",
        nvmlDeviceGetMaxClockInfo=lambda h, kind: 3201,
        nvmlDeviceGetMemoryBusWidth=bus,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)


def test_nvml_bandwidth_and_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch)
    found = memory.device(None)
    assert (found.name, found.used_gib, found.total_gib) == ("NVIDIA H200", 120, 140)
    # 2 transfers a clock, 3201 MHz, 6144 bits: the 4.9 TB/s of the part.
    assert found.bandwidth == 2 * 3201e6 * 6144 / 8
    fake_nvml(monkeypatch, count=2, width=0)
    assert memory.device(1).bandwidth is None
    with pytest.raises(NoNvml, match="--gpu-index"):
        memory.device(None)


def test_no_nvml_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises((NoNvml, ValueError)) as told:
        memory.devices()
    assert "pynvml" in str(told.value)


def test_draft_is_what_nobody_names(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch)
    gpu = memory.device(None)
    made = []
    for name, usage, used in (("plain", PLAIN, 100.0), ("spec", SPEC, 101.0)):
        info = types.SimpleNamespace(fields={}, speculative=lambda: True)
        served: Any = types.SimpleNamespace(name=name, info=info, draft_tokens=8)
        made.append(
            memory.row(served, usage, name == "plain", gpu._replace(used_gib=used))
        )
    plain, spec = made
    assert plain["not_named_gib"] == 100 - (50.25 + 40 + 1.25)
    (apart,) = memory_tables.overheads(made)
    assert apart["not_named_gib"] == pytest.approx(5.75)
    assert apart["draft_gib"] == pytest.approx(5.75 + 1.25)
    assert memory_tables.overheads([spec]) == []
    # Another plain server has no drafter, and is no base unless it is named as one.
    stock = {**plain, "server": "stock", "plain": False, "speculative": False}
    (apart,) = memory_tables.overheads([plain, stock])
    assert apart["draft_gib"] is None and apart["base"] == "plain"
    stock = {**stock, "plain": True, "not_named_gib": 2.0}
    both = [plain, stock, {**spec, "base": "stock"}]
    (apart,) = memory_tables.overheads(both)
    assert apart["base"] == "stock"
    assert apart["not_named_gib"] == pytest.approx(spec["not_named_gib"] - 2.0)


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:3", True),
        ("http://localhost", True),
        ("http://[::1]:3", True),
        ("http://10.0.0.1:3", False),
        ("http://gpu-box:3", False),
    ],
)
def test_whose_gpu_it_is(url: str, local: bool) -> None:
    assert memory.is_local(url) is local
