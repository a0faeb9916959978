# SPDX-License-Identifier: Apache-2.0
"""Read docker/compose.yaml as `docker compose` would, without it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker" / "compose.yaml"
EXAMPLE = ROOT / "docker" / ".env.example"
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def variables() -> dict[str, set[str]]:
    """Every variable of the file with its defaults."""
    found: dict[str, set[str]] = {}
    for name, default in VARIABLE.findall(COMPOSE.read_text()):
        found.setdefault(name, set()).add(default)
    return found


def load(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The file with its variables replaced and its merges done."""
    yaml = pytest.importorskip("yaml")
    given = environ or {}

    def text(value: Any) -> Any:
        if isinstance(value, str):
            return VARIABLE.sub(lambda m: given.get(m[1]) or m[2], value)
        if isinstance(value, list):
            return [text(item) for item in value]
        if isinstance(value, dict):
            return {key: text(item) for key, item in value.items()}
        return value

    loaded: dict[str, Any] = text(yaml.safe_load(COMPOSE.read_text()))
    return loaded


def flags(service: str, environ: Mapping[str, str] | None = None) -> list[str]:
    """The flags of the server that a service starts."""
    command: list[str] = load(environ)["services"][service]["command"]
    if "--" in command:
        return command[command.index("--") + 1 :]
    assert command[:3] == ["python3", "-m", "sglang_exact.launch_server"]
    return command[3:]


def pairs(given: list[str]) -> dict[str, str]:
    """Flags with one value each, as a dictionary."""
    assert len(given) % 2 == 0
    assert all(name.startswith("--") for name in given[::2])
    return dict(zip(given[::2], given[1::2], strict=True))
