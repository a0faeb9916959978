# SPDX-License-Identifier: Apache-2.0
"""One flat row for a table of evidence; the fields are described in docs/verifying.md.

It holds no prompt, no answer, no address, no file path and nothing a server wrote
freely: fixed fields only, and of a model's path only the name.
"""

from __future__ import annotations

import hashlib
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import orjson

from sglang_exact.client import facts as server_facts
from sglang_exact.client.answer import ServerInfo
from sglang_exact.verify.arms import REFERENCE, TESTED
from sglang_exact.verify.model import VERIFIED, CheckResult
from sglang_exact.verify.summary import (
    Run,
    acceptance,
    counts,
    total_bound,
    verdict,
)

SCHEMA = "sglang-exact-evidence/1"
_SETTINGS = (
    *("repeats", "tokens", "num_prompts", "seed"),
    *("long_repeats", "max_prompt_tokens", "by_ids", "vocab_size"),
)
_ATTESTED = (
    *("version", "digest", "numerics", "gpu", "compute_capability"),
    *("stack", "python", "test_settings"),
)
_FIELDS = (
    *("version", "dtype", "quantization", "kv_cache_dtype", "context_length"),
    *("tp_size", "dp_size", "pp_size", "device", "accelerator", "load_format"),
    *("speculative_algorithm", "speculative_num_draft_tokens"),
    *("max_running_requests", "chunked_prefill_size"),
)


def evidence_row(run: Run) -> dict[str, Any]:
    """The row of a run. `complete` is true only for a run that ends in "verified"; a
    row of any other run says so and names the arms that are open."""
    tested, reference = run.server(TESTED), run.server(REFERENCE)
    compared, equal = counts(o for r in run.results for o in r.outcomes)
    word = verdict(run)
    apart = server_facts.mismatches(tested, reference) if tested and reference else []
    return {
        "schema": SCHEMA,
        "kind": "verify",
        "verdict": word,
        "complete": word == "verified",
        "open_arms": [r.name for r in run.results if r.state != VERIFIED],
        "date": run.finished,
        "tool_version": run.header.get("tool_version"),
        "suite": run.header.get("suite"),
        "arms_by_name": list(run.header.get("arms") or ()),
        "own_prompts": run.header.get("prompts") is not None,
        "settings": {key: run.header.get(key) for key in _SETTINGS},
        "compared": compared,
        "equal": equal,
        "tokens": sum(o.tokens for r in run.results for o in r.outcomes),
        "failure_bound": total_bound(run),
        "arms": {r.name: _arm(r) for r in run.results},
        "tested": _server(tested),
        "reference": _server(reference),
        "reference_recorded": run.header.get("reference") is not None,
        "set_ups_differ_in": [line.partition(":")[0] for line in apart],
    }


def _arm(result: CheckResult) -> dict[str, Any]:
    compared, equal = counts(result.outcomes)
    found = acceptance(result.outcomes) or {}
    return {
        "state": result.state,
        "compared": compared,
        "equal": equal,
        "tokens": sum(o.tokens for o in result.outcomes),
        "acceptance_macro": found.get("macro"),
        "acceptance_micro": found.get("micro"),
        "draft_tokens": found.get("draft_tokens"),
    }


def _server(info: ServerInfo | None) -> dict[str, Any] | None:
    if info is None:
        return None
    hooks = info.exact.get("hooks")
    return {
        "model": public_name(info.fields.get("model_path")),
        "draft_model": public_name(info.fields.get("speculative_draft_model_path")),
        **{key: info.fields.get(key) for key in _FIELDS},
        "exact": {key: info.exact.get(key) for key in _ATTESTED}
        if info.exact
        else None,
        "hooks": len(hooks) if isinstance(hooks, list) else None,
        "attestation_sha256": _digest(info.exact) if info.exact else None,
    }


def _digest(exact: dict[str, Any]) -> str:
    blob = orjson.dumps(exact, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(blob).hexdigest()


def public_name(path: object) -> str | None:
    """A model's name without where it lies: hub ids stay, folders become names."""
    if not isinstance(path, str) or not path:
        return None
    parts = PurePosixPath(PureWindowsPath(path).as_posix()).parts
    cached = [part for part in parts if part.startswith("models--")]
    if cached:
        return cached[-1].removeprefix("models--").replace("--", "/")
    local = path[0] in "/\\.~" or ":" in path or len(parts) > 2
    return parts[-1] if local else path
