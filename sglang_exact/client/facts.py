# SPDX-License-Identifier: Apache-2.0
"""What a server is: the fields of /server_info that bear on its bits."""

from __future__ import annotations

import hashlib
from math import isfinite
from typing import Any

import orjson

from sglang_exact.client.answer import ServerInfo
from sglang_exact.client.http import Client, Lost, Refused
from sglang_exact.client.wire import MAX_ID, clean

# A closed list: /server_info also holds the API key and the launch command.
FIELDS = (
    "version",
    "model_path",
    "served_model_name",
    "revision",
    "load_format",
    "skip_tokenizer_init",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "context_length",
    "device",
    "tp_size",
    "dp_size",
    "pp_size",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "linear_attn_backend",
    "mamba_ssm_dtype",
    "sampling_backend",
    "enable_deterministic_inference",
    "disable_radix_cache",
    "disable_cuda_graph",
    "disable_overlap_schedule",
    "enable_mixed_chunk",
    "chunked_prefill_size",
    "page_size",
    "max_running_requests",
    "max_total_num_tokens",
    "max_req_input_len",
    "mem_fraction_static",
    "random_seed",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
)
# Not always the same after a plain restart: from free memory, or drawn at random.
VOLATILE = (
    *("random_seed", "max_total_num_tokens", "max_req_input_len"),
    *("max_running_requests", "mem_fraction_static"),
)
ATTESTED = (
    *("version", "numerics", "digest", "hooks", "not_pinned", "test_settings"),
    "scheme",
)
# Two servers that differ here are not covered by one promise.
SAME = (
    "model_path",
    "revision",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "tp_size",
    "dp_size",
    "pp_size",
    "device",
    "accelerator",
    "version",
)


async def inspect(client: Client, label: str, vocab_size: int | None) -> ServerInfo:
    """Ask a server what it is.

    `vocab_size` overrides what the server says. Raises Lost if it cannot be reached and
    Refused if it wants another API key; a server without /server_info is described as
    such, not refused.
    """
    notes: list[str] = []
    body = await client.get_json("/server_info")
    if not isinstance(body, dict):
        body = await client.get_json("/get_server_info")
    if not isinstance(body, dict):
        body = {}
        notes.append("no usable /server_info: the set-up of this server is not known")
    model = await client.get_json("/model_info")
    if isinstance(model, dict):
        for key in ("model_path", "served_model_name", "load_format"):
            body.setdefault(key, model.get(key))
    fields = {key: _plain(body[key], client) for key in FIELDS if key in body}
    accelerator = await _accelerator(client)
    if accelerator:
        fields["accelerator"] = accelerator
    running = _effective_running(body)
    if running is not None:
        fields["max_running_requests"] = running
    exact = body.get("sglang_exact")
    exact = _plain(exact, client) if isinstance(exact, dict) else {}
    if vocab_size is None:
        vocab_size = _vocab(body, exact) or await client.vocab_size()
    return ServerInfo(
        label, client.url, fields, exact, vocab_size, identity(body), tuple(notes)
    )


async def _accelerator(client: Client) -> str | None:
    """The GPU's name, which the host tells with its load, None if it does not."""
    try:
        body = await client.get_json("/v1/loads")
    except (Lost, Refused):
        return None
    found = body.get("accelerator") if isinstance(body, dict) else None
    return clean(client.scrub(found), 80) if isinstance(found, str) else None


def identity(body: dict[str, Any]) -> str:
    """Hash of what changes when the server process is started again."""
    exact = body.get("sglang_exact")
    parts = [
        body.get("startup_time"),
        body.get("launch_command"),
        body.get("random_seed"),
        exact.get("started_at") if isinstance(exact, dict) else None,
        exact.get("pid") if isinstance(exact, dict) else None,
    ]
    blob = repr(parts).encode("utf-8", "replace")
    return hashlib.sha256(blob).hexdigest()[:16]


async def current_identity(client: Client) -> str | None:
    """The identity now, None if the server cannot say."""
    try:
        body = await client.get_json("/server_info")
    except (Lost, Refused):
        return None
    return identity(body) if isinstance(body, dict) else None


def _set_up(info: ServerInfo) -> dict[str, Any]:
    rows = {k: v for k, v in info.fields.items() if k not in VOLATILE}
    return rows | {f"sglang_exact.{k}": info.exact.get(k) for k in ATTESTED}


def set_up_digest(info: ServerInfo) -> str:
    """Hash of the set-up alone: equal before and after a plain restart."""
    blob = orjson.dumps(_set_up(info), option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(blob).hexdigest()[:16]


def changes(before: ServerInfo, after: ServerInfo) -> list[str]:
    """What a server says about its set-up that it did not say before."""
    old, new = _set_up(before), _set_up(after)
    return [
        f"{key}: {old.get(key)!r} before, {new.get(key)!r} now"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
        # Told by an endpoint of its own, which a busy server may not answer.
        and not (key == "accelerator" and None in (old.get(key), new.get(key)))
    ]


def hooks_off(info: ServerInfo) -> str | None:
    """Why a server's own attestation rules out "verified", in one text, or None.

    With a hook off it is not the release that makes the promise, and answers that are
    equal all the same say nothing about the release.
    """
    tests = info.exact.get("test_settings")
    tests = tests if isinstance(tests, dict) else {}
    reasons = []
    if tests.get("deep_gemm_default"):
        reasons.append(
            f"the {info.label} server attests that DeepGEMM's deterministic algorithms "
            "are off: unset SGLANG_EXACT_TEST_DEEP_GEMM_DEFAULT there"
        )
    if off := tests.get("disabled_hooks"):
        shown = ", ".join(map(str, off)) if isinstance(off, list) else str(off)
        reasons.append(
            f"the {info.label} server attests that hooks are off ({clean(shown)}): "
            "unset SGLANG_EXACT_TEST_DISABLE_HOOKS there"
        )
    return "; ".join(reasons) or None


def mismatches(tested: ServerInfo, reference: ServerInfo) -> list[str]:
    """Set-up differences that put the two servers outside one promise."""
    found = [
        f"{key}: {tested.fields[key]!r} against {reference.fields[key]!r}"
        for key in SAME
        if key in tested.fields
        and key in reference.fields
        and tested.fields[key] != reference.fields[key]
    ]
    if tested.exact or reference.exact:
        for key in ("version", "numerics"):
            sides = (tested.exact.get(key), reference.exact.get(key))
            if sides[0] != sides[1]:
                found.append(f"sglang_exact.{key}: {sides[0]!r} against {sides[1]!r}")
    return found


def _plain(value: Any, client: Client, depth: int = 4) -> Any:
    """Server values as bounded JSON; the API key is cut out of strings."""
    if value is None or isinstance(value, bool | float):
        # NaN differs from itself, and null in the record would look like a change.
        odd = isinstance(value, float) and not isfinite(value)
        return str(value) if odd else value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else clean(value)
    if isinstance(value, str):
        return clean(client.scrub(value), 400)
    if depth and isinstance(value, list):
        return [_plain(item, client, depth - 1) for item in value[:200]]
    if depth and isinstance(value, dict):
        return {
            clean(client.scrub(str(key)), 80): _plain(item, client, depth - 1)
            for key, item in list(value.items())[:200]
            if "key" not in str(key).lower()
        }
    return "..." if isinstance(value, list | dict) else clean(value)


def _vocab(body: dict[str, Any], exact: dict[str, Any]) -> int | None:
    for value in (exact.get("vocab_size"), body.get("vocab_size")):
        if type(value) is int and 8 <= value < 2**31:
            return value
    return None


def _effective_running(body: dict[str, Any]) -> int | None:
    states = body.get("internal_states")
    if not isinstance(states, list):
        return None
    found = [
        state["effective_max_running_requests_per_dp"]
        for state in states
        if isinstance(state, dict)
        and type(state.get("effective_max_running_requests_per_dp")) is int
    ]
    return min(sum(found), MAX_ID) if found else None
