# SPDX-License-Identifier: Apache-2.0
"""What a hook is, and how to see that it is in force."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from sglang_exact.reasons import Reason

# Processes in which a hook is registered.
MAIN = "main"
SCHEDULER = "scheduler"
# A kind of our own: the object is changed in place, outside the host's registry,
# which would turn a Triton kernel into a plain function.
DIRECT = "DIRECT"


class UnknownArgument(TypeError):
    """The host called a hooked function in a way this release was not built for."""


class Hook(NamedTuple):
    """One replacement in the host.

    `target` is a dotted path; `kind` is REPLACE, AROUND, BEFORE or AFTER as the
    host's registry defines them, or DIRECT: `replacement` is called once with the
    target and changes it in place, and `in_force` tells from the target whether the
    change is there. `relies_on` names more host code whose source is
    pinned because the hook's bits depend on it. `speculative` hooks matter only
    when a draft is verified; `test` hooks exist for tests alone.
    """

    name: str
    target: str
    kind: str
    replacement: Callable[..., Any]
    roles: tuple[str, ...] = (SCHEDULER,)
    relies_on: tuple[str, ...] = ()
    speculative: bool = False
    test: bool = False
    in_force: Callable[[Any], bool] | None = None


def refuse_unknown(where: str, unknown: dict[str, object]) -> None:
    """Raise UnknownArgument when a hook is handed keywords it does not know."""
    if unknown:
        raise UnknownArgument(
            f"{where}: found unknown arguments {sorted(unknown)}; expected the "
            "signature of the pinned host; fix: install the pinned release"
        )


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
