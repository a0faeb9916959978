# SPDX-License-Identifier: Apache-2.0
"""The one place that refuses.

The host's plugin loader logs every Exception and goes on, so a refusal inside it
is a SystemExit; where the host reports errors itself it is `Refused`.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NoReturn

from sglang_exact import plugins
from sglang_exact.hooks.base import DIRECT, Hook
from sglang_exact.hooks.in_force import effect_reasons
from sglang_exact.host import source as host
from sglang_exact.reasons import Reason, Refused, message

logger = logging.getLogger(__name__)
EXIT_STATUS = 3


def exit_with(reasons: Iterable[Reason]) -> NoReturn:
    """Print every reason once and leave the process with EXIT_STATUS."""
    print(message(reasons), file=sys.stderr, flush=True)  # noqa: T201
    raise SystemExit(EXIT_STATUS)


def leave(refusal: Refused, *, tell_parent: bool = False) -> NoReturn:
    """Stop what this process started, print the refusal last, and end at once.

    The ordinary way out waits for ever: the host's message sockets hold what no rank
    will read any more. `tell_parent`: end the process that started this one as well,
    by the host's own signal; without our hooks it would wait in the same way.
    """
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid(), include_parent=False)
    sys.stdout.flush()
    print(refusal, file=sys.stderr, flush=True)  # noqa: T201
    if tell_parent:
        os.kill(os.getppid(), signal.SIGQUIT)
    os._exit(EXIT_STATUS)


def refuse(reasons: Iterable[Reason]) -> NoReturn:
    """Raise Refused; a child process of another program leaves with EXIT_STATUS.

    There multiprocessing would print a traceback and wait for ever for the ranks.
    """
    refusal = Refused(reasons)
    if multiprocessing.parent_process() is not None:
        leave(refusal)
    raise refusal


def show_plainly() -> None:
    """Let a Refused that ends this process print its message without a traceback."""
    before = sys.excepthook

    def show(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Refused):
            before(kind, error, trace)
        elif hasattr(sys, "ps1") or sys.flags.interactive:
            print(error, file=sys.stderr, flush=True)  # noqa: T201
        else:
            leave(error)

    sys.excepthook = show


class FailClosed:
    """Context that turns any Exception into a SystemExit with one message.

    The host's loader would log the exception and serve without the overlay.
    """

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> FailClosed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or not isinstance(error, Exception):
            return
        logger.error("%s failed", self.what, exc_info=(type(error), error, trace))
        exit_with(
            [
                Reason(
                    f"{self.what} raised {type(error).__name__}: {error}",
                    "no error",
                    "see the traceback above; reinstall sglang-exact or report it",
                )
            ]
        )


def import_reason(module: str, error: BaseException) -> Reason:
    """The reason why a module of the host does not import, in one line."""
    why = " ".join(f"{type(error).__name__}: {error}".split())
    return Reason(
        f"SGLang's {module} does not import ({why})",
        "a host that imports",
        "repair or install what the error names, in the version that SGLang requires; "
        f"then try python -c 'import {module}'",
    )


def import_reasons(hooks: Iterable[Hook]) -> list[Reason]:
    """The first hook's module that does not import; what follows would follow from it.

    The host would log a traceback for every hook, and lose the error on the way. A
    name that is missing in a module is left to `check_applied`.
    """
    for target in sorted(hook.target for hook in hooks):
        try:
            names = len(host.module_file(target)[1])
        except host.TargetMissing:
            continue
        module = target.rsplit(".", names)[0]
        try:
            importlib.import_module(module)
        except (ImportError, OSError, RuntimeError, AttributeError, ValueError) as e:
            return [import_reason(module, e)]
    return []


def foreign_reasons(
    hooks: Iterable[Hook], registry: Any, allowed: Iterable[str] = ()
) -> list[Reason]:
    """Reasons where another plugin hooks the host.

    One of the `allowed` ones may, but never a target of ours, its class or what it
    relies on.
    """
    hooks, allowed = list(hooks), set(allowed)
    targets = {name for hook in hooks for name in (hook.target, *hook.relies_on)}
    reasons = []
    for target, name in plugins.foreign_hooks(hooks, registry):
        normal = target.replace(":", ".")
        touches = any(normal in (t, t.rpartition(".")[0]) for t in targets)
        if touches or name not in allowed:
            what = "on this target" if touches else "that was not allowed by name"
            reasons.append(
                Reason(
                    f"another plugin hooks {target} ({name})",
                    f"no other plugin {what}",
                    "set SGLANG_PLUGINS=sglang_exact",
                )
            )
    return reasons


def check_applied(
    hooks: Iterable[Hook], registry: Any, allowed: Iterable[str] = ()
) -> None:
    """After the host applied its hooks: leave unless every one of ours is in force."""
    hooks = list(hooks)
    reasons = foreign_reasons(hooks, registry, allowed)
    for hook in hooks:
        if hook.kind != DIRECT and hook.target not in registry._patched:
            reasons.append(
                Reason(
                    f"hook {hook.name}: the host did not apply it to {hook.target}",
                    "an applied hook (the host logs the error above)",
                    "install the pinned release (see `sglang-exact doctor`)",
                )
            )
        else:
            reasons += effect_reasons(hook)
    if reasons:
        exit_with(reasons)
