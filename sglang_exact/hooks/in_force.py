# SPDX-License-Identifier: Apache-2.0
"""Whether a hook is in force, from the live object of the host."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from typing import Any

from sglang_exact.hooks.base import DIRECT, Hook
from sglang_exact.reasons import Reason


def _wrappers(function: Any) -> Iterator[Any]:
    """The function, then whatever it wraps, outermost first."""
    seen = 0
    while function is not None and seen < 32:
        yield function
        function = getattr(function, "__wrapped__", None)
        seen += 1


def resolve(target: str) -> Any:
    """Import the host object behind a dotted path, without binding methods."""
    parent, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(parent)
    found = vars(owner).get(name) if isinstance(owner, type) else getattr(owner, name)
    if found is None:
        found = getattr(owner, name)
    return getattr(found, "__func__", found)


def effect_reasons(hook: Hook) -> list[Reason]:
    """Reasons why the hook is not in force in this process.

    The registry's own log line says nothing about effect, so the live object is
    looked at: the replacement must be in its chain of wrappers.
    """
    try:
        live = resolve(hook.target)
    except (ImportError, AttributeError, ValueError) as error:
        return [
            Reason(
                f"hook {hook.name}: {hook.target} cannot be resolved ({error})",
                "the target of the pinned host",
                "install the pinned release (see `sglang-exact doctor`)",
            )
        ]
    if hook.kind == DIRECT:
        if hook.in_force is not None and hook.in_force(live):
            return []
        return [
            Reason(
                f"hook {hook.name} did not change {hook.target}",
                "the change in the live object",
                "remove other plugins that touch the same target, or reinstall",
            )
        ]
    for wrapper in _wrappers(live):
        for cell in getattr(wrapper, "__closure__", None) or ():
            if cell.cell_contents is hook.replacement:
                return []
    return [
        Reason(
            f"hook {hook.name} is not in force at {hook.target}",
            "the replacement in the live function",
            "remove other plugins that patch the same target, or reinstall",
        )
    ]
