# SPDX-License-Identifier: Apache-2.0
"""Records as the commands write them, for the report and the cost model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_exact.bench.run import BenchRun, save
from sglang_exact.host import VERSION

EVIL = (
    "<script>document.title='owned'</script><img src=x onerror=alert(1)>\"'& "
    "![x](http://e.example/x.png) | `code`"
)
BASE_MS, SLOPE_MS = 14.0, 0.25


def spread(value: float) -> dict[str, Any]:
    return {
        "n": 3,
        "median": value,
        "mean": value,
        "low": value * 0.98,
        "high": value * 1.03,
    }


def exactness(compared: int, equal: int) -> dict[str, Any]:
    return {
        "compared": compared,
        "ids_equal": equal,
        "logprobs_compared": 0,
        "logprobs_equal": 0,
        "without_reference": 0,
        "first_difference": None,
    }


def server(name: str, **more: Any) -> dict[str, Any]:
    """One server of a provenance object; `more` overrides its fields."""
    exact = more.pop("exact", {"version": "0.1.0", "gpu": "NVIDIA H200"})
    fields = {"model_path": "Q", "dtype": "bfloat16", "load_format": "auto", **more}
    return {
        "name": name,
        "url": "http://127.0.0.1:1",
        "version": VERSION,
        "model_path": fields["model_path"],
        "attestation": exact,
        "speculative": {},
        "fields": fields,
        "launch_command": f"serve {EVIL}",
        "notes": [],
    }


def provenance(*servers: dict[str, Any]) -> dict[str, Any]:
    gpu = {"name": "NVIDIA H200", "driver_version": "580", "clocks.sm": "1980 MHz"}
    return {
        "servers": list(servers) or [server("plain"), server("spec")],
        "client": {"package": "sglang_exact 0.1.0"},
        "gpu": [gpu],
        "seeds": {"prompts": 42},
    }


def sweep(label: str = "", speed: float = 70.0, **more: Any) -> BenchRun:
    rows = []
    for length in (512, 4096):
        for name, plain, factor in (("plain", True, 1.0), ("spec", False, 2.5)):
            rows.append(
                {
                    "server": name,
                    "length": length,
                    "requests": 3,
                    "failed": 0,
                    "decode_tok_s": spread(speed * factor),
                    "ttft_ms": spread(100),
                    "plain": plain,
                    "acceptance": None if plain else 5.1,
                    "exactness": None if plain else {**exactness(3, 3), "what": "ids"},
                }
            )
    settings = {"aiperf": "0.13.0", "seed": 42, "plain": "plain"}
    return _run("sweep", label, more.pop("rows", rows), settings, **more)


def step_ms(width: int) -> float:
    """Step time of the made-up GPU."""
    return BASE_MS + SLOPE_MS * width


def leaderboard(widths: tuple[int, ...] = (2, 4, 8, 16), **more: Any) -> BenchRun:
    """Step times on a line, drafts kept with probability 0.85 each."""

    def row(name: str, drafts: int, kept: float | None, speed: float) -> dict[str, Any]:
        return {
            "configuration": name,
            "draft_length": drafts,
            "plain": kept is None,
            "runs": 3,
            "tokens": 100,
            "tok_s": spread(speed),
            "decode_tok_s": spread(speed),
            "ttft_s": spread(0.1),
            "speed_up": None if kept is None else speed / 70,
            "acceptance_length": None if kept is None else kept + 1,
            "accepted_per_verify": kept,
            "distinct_answers": 1,
            "exactness": exactness(3, 3),
        }

    rows = [row("plain", 0, None, 1000 / 13.0)]
    for width in widths:
        acceptance = (1 - 0.85**width) / 0.15
        speed = 1000 * acceptance / step_ms(width)
        rows.append(row("dflash2", width - 1, acceptance - 1, speed))
    return _run("leaderboard", "", rows, {"prompt_tokens": 64}, **more)


def accept(label: str = "", **more: Any) -> BenchRun:
    rows = []
    for flight in (1, 8):
        for name, plain, speed in (("plain", True, 70.0), ("spec", False, 300.0)):
            got = {"macro": 5.5, "micro": 5.3, "requests": 8}
            rows.append(
                {
                    "dataset": "gsm8k",
                    "title": "GSM8K",
                    "concurrency": flight,
                    "server": name,
                    "plain": plain,
                    "draft_tokens": None if plain else 8,
                    "requests": 8,
                    "failed": 0,
                    "errors": [],
                    "output_tokens": 1000,
                    "wall_s": 3.0,
                    "tok_s": speed * flight**0.8,
                    "speed_up": None if plain else speed / 70,
                    "latency_s": None,
                    "acceptance": None
                    if plain
                    else {**got, "tokens": 1000, "verify": 189},
                    "exactness": exactness(0, 0) if plain else exactness(8, 7),
                    "partial": False,
                }
            )
    return _run("accept", label, rows, {"datasets": []}, **more)


def memory(**more: Any) -> BenchRun:
    rows = []
    for name, plain in (("plain", True), ("spec", False)):
        rows.append(
            {
                "server": name,
                "plain": plain,
                "speculative": not plain,
                "draft_tokens": None if plain else 8,
                "weight_gib": 50.0,
                "kv_gib": 40.0 if plain else 34.0,
                "graph_gib": 1.2,
                "graphs": {},
                "free_at_start_gib": 20.0,
                "kv_tokens": 600000 if plain else 500000,
                "nvml": None,
                "not_named_gib": None,
                "settings": {},
            }
        )
    return _run("memory", "", rows, {"unit": "GiB"}, **more)


def _run(
    verb: str, label: str, rows: list[Any], settings: dict[str, Any], **more: Any
) -> BenchRun:
    made = BenchRun(
        verb=verb,
        label=label,
        complete=True,
        command=["sglang-exact", "bench", verb],
        settings=settings,
        provenance=provenance(),
        rows=rows,
    )
    for key, value in more.items():
        setattr(made, key, value)
    return made


def written(folder: Path, **runs: BenchRun) -> dict[str, Path]:
    """The runs as files, by name."""
    paths = {name: folder / f"{name}.json" for name in runs}
    for name, run in runs.items():
        save(run, paths[name])
    return paths
