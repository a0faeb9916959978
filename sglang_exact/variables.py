# SPDX-License-Identifier: Apache-2.0
"""Which environment variables may be set, and to what.

`variables.json` has three tables. `settled`: the values under which the host computes
what was proven. `harmless`: any value, by reason. `refused`: what else is looked at, by
reason; names may end in `*`. A variable that the pinned host reads and no table lists
is refused as well, unless it has the host's own default.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterable, Mapping, MutableMapping
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from sglang_exact.host import compat
from sglang_exact.reasons import Reason

# Forced acceptance emits tokens nobody verified, except in this mode.
SIMULATED_LENGTH = "SGLANG_SIMULATE_ACC_LEN"
SIMULATED_MODE = "SGLANG_SIMULATE_ACC_TOKEN_MODE"
REHEARSAL = "SGLANG_EXACT_TEST_REHEARSAL"
OURS = "SGLANG_EXACT_"
# The host sets these itself while it resolves its arguments (serving_hook.py), so a
# program that does so before it loads plugins never set them.
FROM_FLAGS = {
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "pass --enable-deterministic-inference",
    "SGLANG_MAMBA_SSM_DTYPE": "pass --mamba-ssm-dtype float32",
    "SGLANG_ENABLE_TORCH_COMPILE": "drop --enable-torch-compile",
}
PTXAS = "TRITON_PTXAS_BLACKWELL_PATH"
"""The assembler of Triton's kernels from sm100 on. FlashInfer sets it on import, to one
of CUDA 13 that it finds in the path (flashinfer/triton/__init__.py)."""
UNLISTED = "a variable of the host that no table lists"
_BOOLEAN = {"true": ("1", "true", "yes", "y"), "false": ("0", "false", "no", "n")}


class Tables(NamedTuple):
    """The tables of `variables.json`."""

    settled: dict[str, list[str]]
    rehearsal: dict[str, list[str]]
    harmless: dict[str, list[str]]
    refused: dict[str, list[str]]


@lru_cache(maxsize=1)
def tables() -> Tables:
    """The tables, as they stand in the package."""
    file = resources.files("sglang_exact") / "variables.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return Tables(**found)


@lru_cache(maxsize=1)
def host_defaults() -> Mapping[str, tuple[str, ...]]:
    """Variable that the newest pinned host reads -> values that equal its default."""
    found: dict[str, list[str]] = {}
    pins = compat.load(compat.pinned_versions()[-1])
    for entry in pins.inventory.get("variables", ()) if pins else ():
        name, _, default = entry.partition(" = ")
        found.setdefault(name, []).append(_text(default))
    return {
        # Where places disagree about the default, only "unset" is one value for all.
        name: ("", *_BOOLEAN.get(texts[0], filter(None, texts[:1])))
        if len(set(texts)) == 1
        else ("",)
        for name, texts in found.items()
    }


def _text(default: str) -> str:
    """What the variable would hold to mean its default; "" where code decides."""
    try:
        value = ast.literal_eval(default)
    except (SyntaxError, ValueError):
        return ""
    return str(value).lower() if isinstance(value, str | int | float) else ""


@lru_cache(maxsize=1)
def own_ptxas() -> str | None:
    """The assembler that Triton's own release brings; None where it is not there."""
    spec = importlib.util.find_spec("triton")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder) / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
        if file.exists():
            return str(file)
    return None


def pin_ptxas(environ: MutableMapping[str, str]) -> None:
    """Name Triton's own assembler, which nothing then replaces; a given one is kept."""
    if not environ.get(PTXAS) and (found := own_ptxas()):
        environ[PTXAS] = found


def _group(name: str, groups: Mapping[str, Iterable[str]]) -> str | None:
    """The reason under which a table lists a name, if it does."""
    return next(
        (
            reason
            for reason, patterns in groups.items()
            if any(fnmatchcase(name, pattern) for pattern in patterns)
        ),
        None,
    )


def judged(name: str, rehearsal: bool = False) -> tuple[tuple[str, ...] | None, str]:
    """The values a variable may have (None: any), and why no other ones.

    The host renames SGL_* to SGLANG_* when it is imported, so both are judged alike.
    """
    found = tables()
    if rehearsal and name in found.rehearsal:
        return tuple(found.rehearsal[name]), ""
    if name.startswith("SGL_"):
        name = name.replace("SGL_", "SGLANG_", 1)
    if name in found.settled:
        return tuple(found.settled[name]), ""
    ours = name.startswith(OURS) and name not in host_defaults()
    if ours or _group(name, found.harmless):
        return None, ""
    refused = _group(name, found.refused)
    if refused is None and name not in host_defaults():
        return None, ""
    return host_defaults().get(name, ("",)), refused or UNLISTED


def reasons(environ: Mapping[str, str]) -> list[Reason]:
    """Reasons in the environment: variables that move bits, or may."""
    rehearsal = environ.get(REHEARSAL, "").strip() == "1"
    found = []
    for name in sorted(environ):
        allowed, why = judged(name, rehearsal)
        value = environ[name].strip().lower()
        if allowed is None or value in allowed:
            continue
        if name == PTXAS and environ[name] == own_ptxas():
            continue
        wanted = " or ".join(x or "unset" for x in allowed)
        found.append(
            Reason(
                # What no table settles may hold a password.
                f"{name} is set" if why else f"{name}={environ[name]}",
                f"{wanted} ({why})" if why else wanted,
                f"unset {name}"
                + (f", or {FROM_FLAGS[name]}" if name in FROM_FLAGS else ""),
            )
        )
    return found + _simulated(environ)


def _simulated(environ: Mapping[str, str]) -> list[Reason]:
    length = environ.get(SIMULATED_LENGTH, "").strip()
    mode = environ.get(SIMULATED_MODE, "").strip()
    if length in ("", "0", "-1") or (length == "1" and mode == "real-draft-token"):
        return []
    return [
        Reason(
            f"{SIMULATED_LENGTH}={length} with {SIMULATED_MODE}={mode or 'unset'}",
            "unset (forced acceptance commits drafts nobody verified)",
            f"unset {SIMULATED_LENGTH}",
        )
    ]
