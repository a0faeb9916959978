# SPDX-License-Identifier: Apache-2.0
"""What every rank reports about itself, and whether all ranks say the same.

The record travels over the host's init pipe to the launcher and from there into
/server_info under the key `sglang_exact`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from sglang_exact import __version__, plugins, schemes, scope_families, served
from sglang_exact.hooks.base import SCHEDULER
from sglang_exact.hooks.registered import Decision
from sglang_exact.host import compat
from sglang_exact.host import files as host_files
from sglang_exact.host import source as host
from sglang_exact.reasons import Reason
from sglang_exact.settings import Settings

KEY = "sglang_exact"
BITWISE = "bitwise"
UNVERIFIED = "unverified"
# Facts that legitimately differ between ranks, as paths into the record.
_PER_RANK = (("rank",), ("self_test", "seconds"))


def digest() -> str:
    """sha256 over what a server runs of the overlay: source, pins and tables."""
    package, kernels = (
        Path(str(resources.files(name))) for name in ("sglang_exact", served.KERNELS)
    )
    return served.digest(package, kernels)


def host_fingerprint(names: Iterable[str]) -> str:
    """sha256 over signature and source of host objects, as this process finds them.

    A name that the host lacks counts as missing.
    """
    total, names = hashlib.sha256(), sorted(names)
    pins = compat.load(host.version("sglang") or "")
    sure = compat.certain(pins, names) if pins else {}
    for name in names:
        try:
            found = str(tuple(sure.get(name) or host.fingerprint(name)))
        except host.TargetMissing:
            found = "missing"
        total.update(f"{name}\0{found}\0".encode())
    return total.hexdigest()


def files_fingerprint() -> str | None:
    """sha256 over the host's pinned files, as this process finds them."""
    package = host.root()
    pins = host_files.pinned(host.version("sglang") or "")
    return host_files.fingerprint(pins, package) if package and pins else None


def numerics(settings: Settings, device: str, pinned: bool) -> str:
    """`bitwise` only where the bits were proven: pinned host, all hooks, a GPU.

    `pinned`: every target and kernel of the host has the source of its pin, and every
    package below it the version of its pin. A rehearsal checks no GPU.
    """
    changed = settings.disabled_hooks or settings.deep_gemm_default
    changed = changed or settings.rehearsal
    if not pinned or changed or not device.startswith("cuda"):
        return UNVERIFIED
    return BITWISE


def runtime_facts(scheduler: Any) -> dict[str, Any]:
    """Facts of this rank that only the running scheduler knows."""
    from sglang.srt.runtime_context import get_parallel

    runner, parallel = scheduler.tp_worker.model_runner, get_parallel()
    device = str(runner.device)
    config = runner.model_config.hf_config
    scheme = schemes.of(config)
    family = scope_families.find(list(getattr(config, "architectures", None) or []))
    graphs = runner.prefill_cuda_graph_runner
    facts: dict[str, Any] = {
        "rank": int(parallel.tp_rank),
        "tp_size": int(parallel.tp_size),
        "device": device,
        "context_length": int(runner.model_config.context_len),
        "dtype": str(runner.dtype).removeprefix("torch."),
        # How weights are quantised, one of `schemes`; None for bfloat16.
        "scheme": scheme.name if scheme else None,
        "family": family.name if family else None,
        # Rows of each prefill graph, as captured; empty without them.
        "prefill_graphs": list(getattr(graphs, "capture_num_tokens", ())),
        # Whether GDN's layers are in them, or break them: the bits are the same.
        "prefill_graphs_hold_gdn": bool(
            getattr(graphs, "use_captured_attn_metadata", False)
        ),
        "gpu": None,
        "compute_capability": None,
    }
    if device.startswith("cuda"):
        import torch

        facts["gpu"] = torch.cuda.get_device_name()
        facts["compute_capability"] = list(torch.cuda.get_device_capability())
    return facts


def record(
    decided: Decision, facts: dict[str, Any], self_test: dict[str, Any]
) -> dict[str, Any]:
    """The attestation of a rank; JSON types only.

    Args:
        decided: what the rank registered.
        facts: of `runtime_facts`.
        self_test: what the self-test reported.
    """
    settings, names = decided.settings, list(decided.pinned_names)
    pinned = not [*compat.reasons(names), *compat.loaded_reasons()]
    other = [reason.found for reason in compat.stack_reasons()]
    beside = plugins.names(os.environ, decided.known)
    scheme = schemes.BY_NAME.get(facts.get("scheme") or "")
    proven = pinned and not other and not beside and (not scheme or scheme.proved)
    # Attention alone: not compared on a GPU, and seen to differ on the CPU engine.
    proven = proven and facts.get("family") in (None, scope_families.FAMILIES[0].name)
    return {
        "version": __version__,
        "numerics": numerics(settings, facts["device"], proven),
        "promise": (
            "same token ids and logprobs as plain decode under this overlay, same GPU "
            "model, dtype and tensor-parallel size"
        ),
        "host_version": host.version("sglang"),
        "host_pinned": pinned,
        "host_fingerprint": host_fingerprint(names),
        "host_files": files_fingerprint(),
        "plugins": beside,
        "roles": list(decided.roles) if settings.enable else [],
        "hooks": [hook.name for hook in decided.of(SCHEDULER)],
        "digest": digest(),
        "stack": host.stack_versions(),
        "not_pinned": other,
        "python": ".".join(map(str, sys.version_info[:3])),
        "small_m": settings.small_m,
        "self_test": self_test,
        "sampling": "greedy and seeded are exact; without a seed, seed 42",
        "test_settings": settings.test_settings(),
        **facts,
    }


def log_line(found: dict[str, Any]) -> str:
    """The one line per process that the log carries."""
    pinned = "pinned" if found["host_pinned"] else "NOT pinned"
    packages = ", ".join(found["not_pinned"])
    other = f", NOT pinned: {packages}" if packages else ""
    tests = (
        f", TEST SETTINGS {found['test_settings']}" if found["test_settings"] else ""
    )
    beside = f", PLUGINS {found['plugins']}" if found["plugins"] else ""
    return (
        f"sglang_exact {found['version']}: {found['numerics']}, "
        f"{len(found['hooks'])} hooks, host {found['host_version']} ({pinned}), "
        f"digest {found['digest'][:12]}{other}{beside}{tests}"
    )


def publish_metrics(found: dict[str, Any]) -> None:
    """A gauge `sglang_exact:numerics_bitwise` (1 or 0) where metrics are on."""
    from sglang.srt.runtime_context import get_observability

    if not get_observability().enable_metrics:
        return
    from prometheus_client import Gauge

    gauge = Gauge(
        "sglang_exact:numerics_bitwise",
        "1 when this rank serves the bits of plain decode",
        ["version", "host_version"],
        multiprocess_mode="mostrecent",
    )
    gauge.labels(found["version"], str(found["host_version"])).set(
        1 if found["numerics"] == BITWISE else 0
    )


def rank_reasons(records: list[dict[str, Any] | None]) -> list[Reason]:
    """Reasons why the ranks do not attest one and the same overlay."""
    missing = [i for i, item in enumerate(records) if item is None]
    if missing or not records:
        return [
            Reason(
                f"no attestation from rank(s) {missing or 'any'}",
                "every rank loads the plugin",
                "unset SGLANG_PLUGINS or add sglang_exact to it, and look for plugin "
                "errors in the log above",
            )
        ]
    views = [_shared(record) for record in records if record is not None]
    return [
        Reason(
            f"rank {i} attests something else than rank 0: "
            + "; ".join(_differences(views[0], view)),
            "one version, one set of hooks, one GPU model on every rank",
            "start all ranks from one environment, on equal GPUs",
        )
        for i, view in enumerate(views)
        if view != views[0]
    ]


def _shared(record: dict[str, Any]) -> dict[str, Any]:
    """The record without what may differ between ranks, through JSON."""
    view = copy.deepcopy(record)
    for *parents, last in _PER_RANK:
        place = view
        for name in parents:
            place = place.get(name) or {}
        place.pop(last, None)
    shared: dict[str, Any] = json.loads(json.dumps(view))
    return shared


def _differences(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """`name A, not B` for every fact in which `other` (A) is not `first` (B)."""
    return [
        f"{name} {other.get(name)!r}, not {first.get(name)!r}"
        for name in sorted(first.keys() | other.keys())
        if other.get(name) != first.get(name)
    ]
