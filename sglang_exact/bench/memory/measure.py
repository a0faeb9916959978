# SPDX-License-Identifier: Apache-2.0
"""Where GPU memory goes: weights, KV cache, graphs, and what a drafter takes.

The host's /server_info gives the target's weights, the KV pool and the CUDA graphs of
target and draft, and what was free when the server was ready. What it does not name
(draft weights, draft KV, recurrent states, activations) is the rest of what NVML says
is in use. With a fixed --mem-fraction-static a drafter also shows as a smaller KV
pool, in tokens. The host's "GB" are GiB (2**30 bytes); so are all figures here.
"""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.servers import Served
from sglang_exact.client.http import Lost, Refused
from sglang_exact.view.output import now

GIB = 2**30
INSTALL = "pip install nvidia-ml-py"
SETTINGS = ("mem_fraction_static", "max_running_requests", "context_length")
"""What moves the pools; two servers that differ here do not show a drafter's cost."""


class Device(NamedTuple):
    """One GPU as NVML describes it: GiB, and bytes per second from its maximum memory
    clock."""

    place: int
    name: str
    used_gib: float
    total_gib: float
    bandwidth: float | None


class NoNvml(RuntimeError):
    """NVML cannot be asked; the text says why and what to do."""


def devices() -> list[Device]:
    """The GPUs of this machine.

    Bandwidth is 2 * memory clock * bus width / 8: two transfers per clock, NVML gives
    MHz and bits.

    Raises NoNvml without the package or the driver.
    """
    if importlib.util.find_spec("pynvml") is None:
        raise NoNvml(
            f"found no pynvml, expected it for what the driver says; fix: {INSTALL}"
        )
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoNvml(f"found no NVML driver here ({error}); expected a GPU") from error
    try:
        return [_device(nvml, i) for i in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise NoNvml(f"NVML does not answer ({error})") from error
    finally:
        nvml.nvmlShutdown()


def _device(nvml: Any, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    name = nvml.nvmlDeviceGetName(handle)
    name = name.decode() if isinstance(name, bytes) else str(name)
    try:
        clock = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)
        width = nvml.nvmlDeviceGetMemoryBusWidth(handle)
        bandwidth: float | None = 2 * clock * 1e6 * width / 8
    except nvml.NVMLError:
        bandwidth = None
    return Device(index, name, memory.used / GIB, memory.total / GIB, bandwidth)


def device(index: int | None) -> Device:
    """The GPU with this index, the only one for None. Raises NoNvml."""
    found = devices()
    if index is None and len(found) == 1:
        return found[0]
    chosen = [d for d in found if d.place == index]
    if not chosen:
        raise NoNvml(
            f"found GPUs {[d.place for d in found]}, expected "
            f"{'one' if index is None else index}; fix: choose with --gpu-index"
        )
    return chosen[0]


def is_local(url: str) -> bool:
    """Whether the server is on this machine, as far as its address says."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def usage(served: Served) -> dict[str, Any]:
    """The memory_usage object of the server's first rank.

    Raises CannotRun for a server that does not report it.
    """
    try:
        body = await served.client.get_json("/server_info")
    except (Lost, Refused) as error:
        raise CannotRun(f"server {served.name}: {error}") from error
    states = body.get("internal_states") if isinstance(body, dict) else None
    first = states[0] if isinstance(states, list) and states else None
    found = first.get("memory_usage") if isinstance(first, dict) else None
    if not isinstance(found, dict):
        raise CannotRun(
            f"server {served.name}: found no memory_usage in /server_info; expected "
            "it in internal_states[0]; fix: serve with the pinned SGLang"
        )
    return found


def row(
    served: Served,
    found: Mapping[str, Any],
    plain: bool,
    gpu: Device | None,
    base: str | None = None,
) -> dict[str, Any]:
    """One server's memory in GiB; None where a figure is not known.

    `gpu` is its GPU while no other server is on it, else None. `base` names the plain
    server that it is compared with, where there are several.
    """
    graph = found.get("graph")
    graphs = {
        str(phase)[:40]: value
        for phase, raw in (graph.items() if isinstance(graph, dict) else ())
        if (value := _number(raw))
    }
    weight, kv = _number(found.get("weight")), _number(found.get("kvcache"))
    named = [value for value in (weight, kv, sum(graphs.values())) if value is not None]
    return {
        "server": served.name,
        "plain": plain,
        "base": base,
        "speculative": served.info.speculative(),
        "draft_tokens": served.draft_tokens,
        "weight_gib": weight,
        "kv_gib": kv,
        "graph_gib": sum(graphs.values()),
        "graphs": graphs,
        "free_at_start_gib": _number(found.get("startup_available")),
        "kv_tokens": _count(found.get("token_capacity")),
        "nvml": gpu._asdict() if gpu else None,
        "not_named_gib": gpu.used_gib - sum(named) if gpu else None,
        "settings": {k: served.info.fields.get(k) for k in SETTINGS},
        "measured": now(),
    }


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None


def _count(value: Any) -> int | None:
    return value if type(value) is int else None
