# SPDX-License-Identifier: Apache-2.0
"""Step times for the cost model out of leaderboard, decode-table and accept records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_exact.bench import runs as report_runs
from sglang_exact.bench.cost_model.model import PLAIN, Limit, Step
from sglang_exact.bench.drive import CannotRun
from sglang_exact.bench.memory import measure as memory
from sglang_exact.bench.memory.measure import GIB, NoNvml
from sglang_exact.bench.runs import Loaded

VERBS = ("leaderboard", "decode-table", "accept")
WITH_PREFILL = "wall clock with prefill"
# What moves the size of the weights or the time it takes to read them.
_WEIGHTS = ("model_path", "revision", "dtype", "quantization", "tp_size", "GPU")


class Found(NamedTuple):
    """A step, the server it was measured on and what that was asked."""

    server: str
    load: str
    step: Step


def steps(loaded: Iterable[Loaded]) -> list[Found]:
    """Every step time in the records; rows that lack a figure are left out."""
    found = []
    for one in loaded:
        for row in one.run.rows:
            try:
                made = (
                    _READERS[one.run.verb](row, one) if one.run.verb in VERBS else None
                )
            except (KeyError, TypeError, AttributeError):
                made = None
            if made is not None and made.step.step_ms > 0:
                found.append(made)
    return found


def _leaderboard(row: dict[str, Any], one: Loaded) -> Found | None:
    speed = row["decode_tok_s"]
    kept = row["accepted_per_verify"]
    width = row["draft_length"] + 1
    # Accepted drafts and the token that the target adds: the prefill's is not in it.
    acceptance = 1.0 if row["plain"] else (None if kept is None else kept + 1)
    load = f"prompt of {one.run.settings.get('prompt_tokens', '?')} tokens"
    return _found(
        row["configuration"], load, width, acceptance, speed["median"], 1, one
    )


def _decode_table(row: dict[str, Any], one: Loaded) -> Found | None:
    acceptance: float | None = 1.0
    width = row["draft_tokens"] or PLAIN
    if width > PLAIN:
        got = row["acceptance"]
        acceptance = (got["tokens"] - got["requests"]) / got["verify"] if got else None
    load = f"prompt of {row['prompt_tokens']} tokens"
    speed = row["decode_tok_s"]["median"]
    return _found(row["server"], load, width, acceptance, speed, 1, one)


def _accept(row: dict[str, Any], one: Loaded) -> Found | None:
    width = row["draft_tokens"] or PLAIN
    got = row["acceptance"]
    acceptance = 1.0 if width == PLAIN else (got["micro"] if got else None)
    if row["partial"] or row["failed"]:
        return None
    flight = row["concurrency"]
    found = _found(
        row["server"], row["title"], width, acceptance, row["tok_s"], flight, one
    )
    if found is None:
        return None
    # Its speed is over wall time: nothing in the record tells prefill from decode.
    step = found.step._replace(source=f"{found.step.source}, {WITH_PREFILL}")
    return found._replace(step=step)


_READERS = {
    "leaderboard": _leaderboard,
    "decode-table": _decode_table,
    "accept": _accept,
}


def _found(
    server: str,
    load: str,
    width: int,
    acceptance: float | None,
    tok_s: float | None,
    in_flight: int,
    one: Loaded,
) -> Found | None:
    if acceptance is None or not tok_s:
        return None
    # tok/s = in_flight * acceptance / step.
    step_ms = 1000 * in_flight * acceptance / tok_s
    source = f"{one.name}, {server}"
    return Found(
        server, load, Step(width, step_ms, acceptance, tok_s, in_flight, source)
    )


def choose(
    found: Sequence[Found],
    *,
    servers: Sequence[str] = (),
    load: str | None = None,
    in_flight: int = 1,
) -> tuple[str, list[Step]]:
    """The load that is modelled and its steps.

    Without `load`, the one with most widths. Raises CannotRun where nothing is left,
    or where a width was measured on several servers.
    """
    unknown = sorted(set(servers) - {f.server for f in found})
    if unknown:
        raise CannotRun(
            f"found no steps of {', '.join(unknown)}; expected some of "
            f"{', '.join(sorted({f.server for f in found})) or 'no server at all'}"
        )
    kept = [
        f
        for f in found
        if f.step.in_flight == in_flight and (not servers or f.server in servers)
    ]
    loads: dict[str, set[int]] = {}
    for one in kept:
        if one.step.width > PLAIN:
            loads.setdefault(one.load, set()).add(one.step.width)
    if not loads or (load is not None and load not in loads):
        flights = sorted({f.step.in_flight for f in found})
        raise CannotRun(
            f"found no steps with drafts for {load or 'any load'} at {in_flight} in "
            f"flight; expected a {', '.join(VERBS)} record of a speculative server; "
            f"fix: choose with --load ({', '.join(sorted(loads)) or 'none'}) and "
            f"--in-flight ({', '.join(map(str, flights)) or 'none'})"
        )
    chosen = load or max(sorted(loads), key=lambda name: len(loads[name]))
    kept = [f for f in kept if f.load == chosen]
    _one_server_each(kept)
    return chosen, [f.step for f in kept]


def _one_server_each(kept: Sequence[Found]) -> None:
    by_width: dict[int, dict[str, None]] = {}
    for one in kept:
        by_width.setdefault(one.step.width, {})[one.server] = None
    twice = [
        f"width {width} on {', '.join(names)}"
        for width, names in sorted(by_width.items())
        if len(names) > 1
    ]
    if twice:
        raise CannotRun(
            f"found {'; '.join(twice)}; expected one server for each width, whose "
            "step times belong together; fix: choose with --use NAME"
        )


def check_setups(loaded: Sequence[Loaded]) -> None:
    """Raise CannotRun where the records are of different set-ups."""
    measured = [one for one in loaded if one.run.verb in VERBS]
    for one in loaded:
        if one.run.verb == "memory" and measured:
            _check_weights(measured[0], one)
    for other in measured[1:]:
        lines = report_runs.apart(
            report_runs.setup(measured[0].run), report_runs.setup(other.run)
        )
        if lines:
            raise CannotRun(
                f"found {measured[0].name} and {other.name} with different set-ups "
                f"({'; '.join(lines)}); expected runs whose step times belong together"
            )


def _check_weights(steps: Loaded, memory_: Loaded) -> None:
    """Raise CannotRun where the weights of a memory record are other ones."""
    one, other = report_runs.setup(steps.run), report_runs.setup(memory_.run)
    lines = [
        f"{key}: {one[key]} against {other[key]}"
        for key in _WEIGHTS
        if key in one and key in other and one[key] != other[key]
    ]
    if lines:
        raise CannotRun(
            f"found {steps.name} and {memory_.name} with different set-ups "
            f"({'; '.join(lines)}); expected the memory of the servers whose steps "
            "were measured; fix: leave it out and give --weight-gib"
        )


def _other_gpu(loaded: Sequence[Loaded], name: str) -> str:
    """Why NVML's GPU is not that of the records, "" if it may be."""
    known = {
        str(gpu.get("name"))
        for one in loaded
        for gpu in one.run.provenance.get("gpu") or ()
        if isinstance(gpu, dict)
    }
    if not known or name in known:
        return ""
    return (
        f"no weight-bandwidth limit: found {name} here, the records are of "
        f"{', '.join(sorted(known))}; give --bandwidth"
    )


def limit(
    loaded: Sequence[Loaded],
    bandwidth_gb_s: float | None,
    weight_gib: float | None,
    gpu_index: int | None,
) -> tuple[Limit | None, str]:
    """The weight-bandwidth limit, or why there is none.

    Bandwidth in 1e9 bytes per second, weights in GiB; what is not given comes from
    NVML and from a memory record.
    """
    bandwidth, source = None, ""
    if bandwidth_gb_s is not None:
        bandwidth, source = bandwidth_gb_s * 1e9, f"{bandwidth_gb_s:g} GB/s as given"
    else:
        try:
            gpu = memory.device(gpu_index)
        except NoNvml as error:
            return None, f"no weight-bandwidth limit: {error}; or give --bandwidth"
        if gpu.bandwidth is None:
            return None, "no weight-bandwidth limit: NVML gives no clock; --bandwidth"
        other = _other_gpu(loaded, gpu.name)
        if other:
            return None, other
        bandwidth = gpu.bandwidth
        source = (
            f"{bandwidth / 1e9:,.0f} GB/s, 2 * memory clock * bus width / 8 of "
            f"{gpu.name}"
        )
    if weight_gib is None:
        weight_gib = _weights(loaded)
        source += ", weights of the memory record"
    if not weight_gib:
        return None, (
            "no weight-bandwidth limit: the size of the weights is not known; give "
            "--weight-gib or a memory record"
        )
    return Limit(bandwidth, weight_gib * GIB, source), ""


def _weights(loaded: Sequence[Loaded]) -> float | None:
    for one in loaded:
        for row in one.run.rows if one.run.verb == "memory" else ():
            if isinstance(row.get("weight_gib"), int | float):
                return float(row["weight_gib"])
    return None


def read(paths: Sequence[Path]) -> list[Loaded]:
    """The records. Raises CannotRun with every one that cannot be read."""
    loaded, problems = report_runs.load_all(paths)
    if problems:
        raise CannotRun("; ".join(problems))
    return loaded
