# SPDX-License-Identifier: Apache-2.0
"""What one run of aiperf wrote: speeds, acceptance, and every answer."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from sglang_exact.bench.drive import CannotRun

VERSION = "0.13.0"
"""The release whose options and export fields are known here."""
SUMMARY = "profile_export_aiperf.json"
RECORDS = "profile_export.jsonl"
RAW = "profile_export_raw.jsonl"
METRICS = "server_metrics_export.json"
OUTPUT = "aiperf-output.txt"
"""What the program printed; written here, not by aiperf."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One measured request.

    `prompt` is a hash of what was sent, by which two servers' replies are paired;
    `ids` is None where the endpoint does not stream them.
    """

    prompt: str
    ids: tuple[int, ...] | None
    text: str


@dataclass(slots=True)
class Result:
    """What the exports of one run say; speeds in tokens/s, times in ms.

    Attributes:
        decode_tok_s, ttft_ms, latency_ms: of each measured request, in order.
        output_tok_s: all output tokens over the run's time.
        requests, errors: answered and failed.
        isl, osl: mean tokens per request as the server counted them.
        prompt_tokens, output_tokens: the same of each measured request: a mean can
            hide one that ended early.
        verify_steps, tokens: of the run, from the server's counters; None without.
        replies: what was answered.
    """

    decode_tok_s: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    latency_ms: list[float] = field(default_factory=list)
    output_tok_s: float | None = None
    requests: int = 0
    errors: int = 0
    isl: float | None = None
    osl: float | None = None
    prompt_tokens: list[float] = field(default_factory=list)
    output_tokens: list[float] = field(default_factory=list)
    verify_steps: int | None = None
    tokens: int | None = None
    replies: list[Reply] = field(default_factory=list)


def read(folder: Path) -> Result:
    """Read the exports of one run.

    Raises CannotRun for a summary that lacks a field; a missing /metrics export is not
    an error, there is no acceptance then.
    """
    summary = _summary(folder / SUMMARY)
    rows = [row for row in _lines(folder / RECORDS) if _measured(row)]
    result = Result(
        decode_tok_s=_each(rows, "output_token_throughput_per_user"),
        ttft_ms=_each(rows, "time_to_first_token"),
        latency_ms=_each(rows, "request_latency"),
        output_tok_s=_average(summary, "output_token_throughput"),
        requests=int(_average(summary, "request_count") or 0),
        errors=sum(bool(row.get("error")) for row in rows),
        isl=_average(summary, "usage_prompt_tokens"),
        osl=_average(summary, "usage_completion_tokens"),
        prompt_tokens=_each(rows, "usage_prompt_tokens"),
        output_tokens=_each(rows, "usage_completion_tokens"),
        replies=[
            reply
            for row in _lines(folder / RAW)
            if _measured(row) and (reply := _reply(row)) is not None
        ],
    )
    result.verify_steps, result.tokens = _counters(folder / METRICS)
    return result


def _summary(path: Path) -> dict[str, Any]:
    try:
        found = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise CannotRun(
            f"{path}: found no readable export; expected what aiperf {VERSION} writes"
        ) from error
    needed = ("request_count", "output_token_throughput", "request_latency")
    missing = [n for n in needed if _average(found, n) is None]
    if missing:
        raise CannotRun(
            f"{path}: found no {', '.join(missing)}; expected the fields of aiperf "
            f"{VERSION}; fix: look into {path.parent / OUTPUT} for failed requests"
        )
    return dict(found)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSONL file; a last line that was cut is left out."""
    found = []
    try:
        raw = path.read_bytes().splitlines()
    except OSError:
        return []
    for line in raw:
        with contextlib.suppress(orjson.JSONDecodeError):
            row = orjson.loads(line)
            if isinstance(row, dict):
                found.append(row)
    return found


def _measured(row: Mapping[str, Any]) -> bool:
    meta = row.get("metadata")
    return isinstance(meta, dict) and meta.get("benchmark_phase") == "profiling"


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None


def _average(summary: Any, name: str) -> float | None:
    found = summary.get(name) if isinstance(summary, dict) else None
    return _number(found.get("avg")) if isinstance(found, dict) else None


def _each(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    values = []
    for row in rows:
        metrics = row.get("metrics")
        cell = metrics.get(name) if isinstance(metrics, dict) else None
        value = _number(cell.get("value")) if isinstance(cell, dict) else None
        if value is not None:
            values.append(value)
    return values


def _reply(row: Mapping[str, Any]) -> Reply | None:
    """Prompt hash, ids and text of one raw record; None where it has no answer."""
    payload = row.get("payload")
    if not isinstance(payload, dict) or row.get("status") != 200:
        return None
    asked = payload.get("prompt", payload.get("messages"))
    ids: list[int] = []
    texts: list[str] = []
    streams_ids = True
    for body in _packets(row):
        for choice in body.get("choices") or ():
            if not isinstance(choice, dict):
                continue
            delta = choice.get("delta")
            text = choice.get("text")
            if isinstance(delta, dict):
                # Reasoning models send their thoughts in a field of their own.
                parts = (delta.get("reasoning_content"), delta.get("content"))
                text = "".join(p for p in parts if isinstance(p, str))
            texts.append(text if isinstance(text, str) else "")
            found = choice.get("token_ids")
            if isinstance(found, list) and all(type(i) is int for i in found):
                ids += found
            elif texts[-1]:
                streams_ids = False
    if not texts:
        return None
    digest = hashlib.sha256(orjson.dumps(asked)).hexdigest()
    return Reply(digest, tuple(ids) if streams_ids and ids else None, "".join(texts))


def _packets(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    for response in row.get("responses") or ():
        packets = response.get("packets") if isinstance(response, dict) else None
        for packet in packets or ():
            value = packet.get("value") if isinstance(packet, dict) else None
            if isinstance(value, str) and value.startswith("{"):
                with contextlib.suppress(orjson.JSONDecodeError):
                    body = orjson.loads(value)
                    if isinstance(body, dict):
                        found.append(body)
    return found


def _counters(path: Path) -> tuple[int | None, int | None]:
    """(verify steps, generated tokens) of the measured phase, from /metrics."""
    try:
        metrics = orjson.loads(path.read_bytes())["metrics"]
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return None, None
    return (
        _total(metrics, "sglang:spec_verify_calls"),
        _total(metrics, "sglang:generation_tokens"),
    )


def _total(metrics: Any, name: str) -> int | None:
    found = metrics.get(name) if isinstance(metrics, dict) else None
    series = found.get("series") if isinstance(found, dict) else None
    values = []
    for one in series or ():
        stats = one.get("stats") if isinstance(one, dict) else None
        value = _number(stats.get("total")) if isinstance(stats, dict) else None
        if value is not None:
            values.append(value)
    return int(sum(values)) if values else None
