# SPDX-License-Identifier: Apache-2.0
"""Stands in for aiperf 0.13.0: takes its options, asks the server, writes its exports.

The fields are those of a real run. STAND_IN chooses what goes wrong:
fail-at=N (exit status 1 at that length), no-summary, hang, cut-record, one-failed,
no-metrics, text-only, version=X, short-one (the last answer lacks a token).
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import urllib.request
from pathlib import Path


def options(words: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word
            found.setdefault(name, [])
        else:
            found[name].append(word)
    return found


def ask(url: str, prompt: list[int], length: int, key: str | None) -> dict:
    body = {
        "input_ids": prompt,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": length,
            "min_new_tokens": length,
            "ignore_eos": True,
        },
    }
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(
        url + "/generate", json.dumps(body).encode(), headers
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=300) as answer:
        return json.loads(answer.read())


def raw_record(phase: str, prompt: list[int], ids: list[int], with_ids: bool) -> dict:
    choices = [{"index": 0, "text": f"t{i} ", "token_ids": [i]} for i in ids]
    if not with_ids:
        choices = [{"index": 0, "text": f"t{i} "} for i in ids]
    responses = [
        {
            "perf_ns": 1,
            "packets": [{"name": "data", "value": json.dumps({"choices": [c]})}],
        }
        for c in choices
    ]
    usage = {"choices": [], "usage": {"completion_tokens": len(ids)}}
    last = [{"name": "data", "value": json.dumps(usage)}]
    done = [{"name": "data", "value": "[DONE]"}]
    responses += [{"perf_ns": 2, "packets": last}, {"perf_ns": 3, "packets": done}]
    return {
        "metadata": {"benchmark_phase": phase, "session_num": 0},
        "status": 200,
        "responses": responses,
        "payload": {"prompt": " ".join(map(str, prompt)), "stream": True},
    }


def main() -> int:
    wrong = os.environ.get("STAND_IN", "")
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write((wrong.partition("version=")[2] or "0.13.0") + "\n")
        return 0
    given = options(sys.argv[2:])
    extra = given["--extra-inputs"]
    length = int(given["--isl"][0])
    folder = Path(given["--artifact-dir"][0])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "options.json").write_text(json.dumps(sys.argv[1:]))
    (folder / "environment.json").write_text(json.dumps(dict(os.environ)))
    if wrong == "hang":
        (folder / "pid").write_text(str(os.getpid()))
        time.sleep(600)
    if wrong == f"fail-at={length}":
        sys.stdout.write("failed: \x1b[31mno such model\x1b[0m\n")
        return 1
    seed = int(given["--random-seed"][0])
    rng = random.Random(f"{seed}-{length}")
    warmups = int(given.get("--warmup-request-count", ["0"])[0])
    total = warmups + int(given["--request-count"][0])
    key = given.get("--api-key", [None])[0]
    records, raws, speeds = [], [], []
    verify = tokens = 0
    began = time.monotonic()
    for number in range(total):
        prompt = [rng.randrange(3, 500) for _ in range(length)]
        started = time.monotonic()
        answer = ask(given["--url"][0], prompt, length, key)
        seconds = time.monotonic() - started
        ids, meta = answer["output_ids"], answer["meta_info"]
        phase = "warmup" if number < warmups else "profiling"
        with_ids = "return_token_ids:true" in extra and wrong != "text-only"
        raws.append(raw_record(phase, prompt, ids, with_ids))
        metrics = {
            "output_token_throughput_per_user": (length - 1) / seconds,
            "time_to_first_token": 1000 * seconds / length,
            "request_latency": 1000 * seconds,
            "usage_prompt_tokens": length,
            "usage_completion_tokens": len(ids)
            - (wrong == "short-one" and number == total - 1),
        }
        row = {
            "metadata": {"benchmark_phase": phase},
            "metrics": {n: {"value": v, "unit": "x"} for n, v in metrics.items()},
        }
        if phase == "profiling":
            verify += meta.get("spec_verify_ct", 0)
            tokens += len(ids)
            speeds.append(metrics)
        records.append(row)
    if wrong == "one-failed":
        lost = {"metadata": {"benchmark_phase": "profiling"}, "error": {"code": 500}}
        records.append(lost)
    write(folder, records, raws, wrong)
    count = total - warmups
    wall = time.monotonic() - began
    summary = {
        "schema_version": "1.4",
        "aiperf_version": "0.13.0",
        "request_count": {"unit": "requests", "avg": float(count)},
        "output_token_throughput": {"unit": "tokens/sec", "avg": tokens / wall},
        "request_latency": {"unit": "ms", "avg": speeds[0]["request_latency"]},
        "usage_prompt_tokens": {"unit": "tokens", "avg": float(length)},
        "usage_completion_tokens": {"unit": "tokens", "avg": tokens / count},
    }
    if wrong != "no-summary":
        (folder / "profile_export_aiperf.json").write_text(json.dumps(summary))
    series = {
        "sglang:generation_tokens": [{"stats": {"total": float(tokens)}}],
        "sglang:spec_verify_calls": [{"stats": {"total": float(verify)}}],
    }
    if wrong != "no-metrics":
        body = {"metrics": {n: {"series": s} for n, s in series.items()}}
        (folder / "server_metrics_export.json").write_text(json.dumps(body))
    return 0


def write(folder: Path, records: list[dict], raws: list[dict], wrong: str) -> None:
    for name, rows in (
        ("profile_export.jsonl", records),
        ("profile_export_raw.jsonl", raws),
    ):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if wrong == "cut-record":
            text = text[:-20]
        (folder / name).write_text(text)


if __name__ == "__main__":
    sys.exit(main())
