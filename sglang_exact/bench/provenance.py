# SPDX-License-Identifier: Apache-2.0
"""What a number was measured with: servers, client, GPU, command; no secrets."""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sglang_exact
from sglang_exact.client import machine as machine_facts
from sglang_exact.client.answer import ServerInfo
from sglang_exact.client.facts import ATTESTED, VOLATILE
from sglang_exact.client.http import Client, redact_url
from sglang_exact.client.wire import clean

HIDDEN = "***"
_SECRET_FLAG = re.compile(r"--?([a-z0-9_]+[-_])*(key|token|secret|password)", re.I)
_SECRET_VARIABLE = re.compile(r"(.*?\w*(?:KEY|TOKEN|SECRET|PASSWORD)=).*", re.S)

# What the driver says of a GPU at the time of the question; clocks in MHz.
GPU_FIELDS = (
    "index",
    "name",
    "uuid",
    "driver_version",
    "memory.total",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
    "temperature.gpu",
)


def scrub_words(words: Sequence[str]) -> list[str]:
    """A command line without the values of keys, tokens, passwords and URL logins.

    A word that is a command line itself, such as a launch template, is scrubbed too.
    """
    shown: list[str] = []
    hide = False
    for word in words:
        shown.append(HIDDEN if hide else _scrub_word(word))
        hide = not hide and _SECRET_FLAG.fullmatch(word) is not None
    return shown


def _scrub_word(word: str) -> str:
    if re.search(r"\s", word.strip()):
        return scrub_text(word)
    name, equals, value = word.partition("=")
    if equals and _SECRET_FLAG.fullmatch(name):
        return f"{name}={HIDDEN}"
    variable = _SECRET_VARIABLE.fullmatch(word)
    if variable is not None:
        return variable[1] + HIDDEN
    # A login or a query: an address may carry its key in either.
    if "://" in value and "://" not in name and re.search("[@?]", value):
        return f"{name}={redact_url(value)}"
    if "://" in word and re.search("[@?]", word):
        return redact_url(word)
    return word


def scrub_text(line: str) -> str:
    """The same for a command line in one string."""
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    return shlex.join(scrub_words(words))


async def server(
    client: Client, info: ServerInfo, launch: Any = None
) -> dict[str, Any]:
    """What one server says it is.

    `info` is what `client.facts.inspect` found; `launch` the launch command of
    /server_info, asked for here when it is not given.
    """
    if launch is None:
        body = await client.get_json("/server_info")
        launch = body.get("launch_command") if isinstance(body, dict) else None
    fields = dict(info.fields)
    speculative = {
        key: fields.pop(key) for key in sorted(fields) if key.startswith("speculative")
    }
    return {
        "name": info.label,
        "url": info.url,
        "version": fields.get("version"),
        "model_path": fields.get("model_path"),
        "attestation": info.exact or None,
        "speculative": speculative,
        "fields": fields,
        "launch_command": _launch(client, launch),
        "notes": list(info.notes),
    }


def _launch(client: Client, launch: Any) -> str | None:
    if isinstance(launch, list):
        launch = shlex.join(str(word) for word in launch)
    if not isinstance(launch, str):
        return None
    return clean(client.scrub(scrub_text(launch)), 4000)


def client_facts() -> dict[str, str]:
    """The program that measures, and the machine it runs on."""
    return {
        "package": f"sglang_exact {sglang_exact.__version__}",
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def gpus(index: int | None = None) -> list[dict[str, str]]:
    """The GPUs of this machine as the driver's tool (NVML) names them; else empty.

    They are the server's only where the server runs on the same machine. `index` is
    of the one GPU in use; None names all of them.
    """
    return machine_facts.query(GPU_FIELDS, index)


def set_up(server: Mapping[str, Any], leave_out: Iterable[str] = ()) -> dict[str, Any]:
    """What has to be the same for two figures of one server to stand in one column.

    `server` is what `server` above gives, also out of a record; `leave_out` names
    fields that may differ.
    """
    fields = {**(server.get("fields") or {}), **(server.get("speculative") or {})}
    exact = server.get("attestation") or {}
    fields |= {f"sglang_exact.{k}": exact[k] for k in ATTESTED if k in exact}
    left = {*VOLATILE, *leave_out}
    return {key: value for key, value in fields.items() if key not in left}


def apart(
    before: Mapping[str, Any], now: Mapping[str, Any], leave_out: Iterable[str] = ()
) -> list[str]:
    """What one server says of its set-up that it did not say before."""
    leave_out = tuple(leave_out)
    old, new = set_up(before, leave_out), set_up(now, leave_out)
    return [
        f"{key}: {clean(old.get(key), 80)} before, {clean(new.get(key), 80)} now"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]


def moved(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The GPUs of two provenance objects where they are known and differ, else ""."""
    old, new = machine(before), machine(now)
    if not old or not new or old == new:
        return ""
    return f"found {', '.join(old)} before and {', '.join(new)} now"


def machine(known: Mapping[str, Any]) -> list[str]:
    """Name and driver of every GPU in a provenance object."""
    rows = known.get("gpu")
    return sorted(
        f"{row.get('name')} (driver {row.get('driver_version')})"
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, dict)
    )


def collect(
    servers: Sequence[dict[str, Any]],
    seeds: dict[str, int] | None = None,
    gpu_index: int | None = None,
) -> dict[str, Any]:
    """The provenance object of a record; `gpu_index` as in `gpus`."""
    return {
        "servers": list(servers),
        "client": client_facts(),
        "gpu": gpus(gpu_index),
        "seeds": dict(seeds or {}),
    }
