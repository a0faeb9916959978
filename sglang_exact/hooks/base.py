# SPDX-License-Identifier: Apache-2.0
"""What a hook is, and how a function is declared one."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

# Processes in which a hook is registered.
MAIN = "main"
SCHEDULER = "scheduler"
# A kind of our own: the object is changed in place, outside the host's registry,
# which would turn a Triton kernel into a plain function.
DIRECT = "DIRECT"


# Classes of the host that many hooks change.
HOST_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"

Replacement = TypeVar("Replacement", bound=Callable[..., Any])


class UnknownArgument(TypeError):
    """The host called a hooked function in a way this release was not built for."""


class Unsupported(RuntimeError):
    """A step of the host whose bits could be others than plain decoding's."""


class Hook(NamedTuple):
    """One replacement in the host.

    `target` is a dotted path; `kind` is REPLACE, AROUND, BEFORE or AFTER as the
    host's registry defines them, or DIRECT: `replacement` is called once with the
    target and changes it in place, and `in_force` tells from the target whether the
    change is there. `relies_on` names more host code whose source is pinned because
    the hook's bits depend on it; `test` hooks exist for tests alone.
    """

    name: str
    target: str
    kind: str
    replacement: Callable[..., Any]
    roles: tuple[str, ...] = (SCHEDULER,)
    relies_on: tuple[str, ...] = ()
    test: bool = False
    in_force: Callable[[Any], bool] | None = None


_declared: dict[str, list[Hook]] = {}


def hook(
    target: str,
    kind: str,
    *,
    name: str,
    roles: tuple[str, ...] = (SCHEDULER,),
    relies_on: tuple[str, ...] = (),
    test: bool = False,
    in_force: Callable[[Any], bool] | None = None,
) -> Callable[[Replacement], Replacement]:
    """Declare the decorated function the replacement at `target`; see `Hook`.

    The function stays as it is. Of several decorators on one function the lowest is
    declared first.
    """

    def declare(replacement: Replacement) -> Replacement:
        given = Hook(name, target, kind, replacement, roles, relies_on, test, in_force)
        _declared.setdefault(replacement.__module__, []).append(given)
        return replacement

    return declare


def of(*modules: ModuleType) -> tuple[Hook, ...]:
    """The hooks that these modules declare, in the order of their definition."""
    return tuple(hook for module in modules for hook in _declared[module.__name__])


def refuse_unknown(where: str, unknown: dict[str, object]) -> None:
    """Raise UnknownArgument when a hook is handed keywords it does not know."""
    if unknown:
        raise UnknownArgument(
            f"{where}: found unknown arguments {sorted(unknown)}; expected the "
            "signature of the pinned host; fix: install the pinned release"
        )
