# SPDX-License-Identifier: Apache-2.0
"""Entry point of the host's plugin loader: settings, scope, hooks, gate.

Nothing is imported at module level that could fail: an import error here would be
logged by the host and forgotten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_exact.hooks.base import Hook
    from sglang_exact.reasons import Reason
    from sglang_exact.settings import Settings


def register() -> None:
    """Register the overlay's hooks in this process, or leave with SystemExit.

    Without SGLANG_EXACT_ENABLE=1 and without a test setting the host is untouched.
    """
    from sglang_exact.gate import FailClosed

    with FailClosed("registering sglang_exact"):
        _register()


def _register() -> None:
    import os

    from sglang_exact import gate, hooks, plugins, roles, scope, settings, variables
    from sglang_exact.hooks import registered
    from sglang_exact.host import compat

    config, reasons = settings.read(os.environ)
    if not reasons and not config.enable and not config.any_test:
        return
    reasons += hooks.name_reasons(config)
    if config.enable:
        variables.pin_ptxas(os.environ)
        reasons += scope.environment_reasons(os.environ)
        reasons += plugins.reasons(os.environ, config.allow_plugins)
        reasons += compat.setup_reasons(hooks.pinned_names(), config)
    if reasons:
        gate.exit_with(reasons)
    found = roles.current()
    if not found:
        return
    decision = hooks.decide(config, found)
    if reasons := gate.import_reasons(decision.hooks):
        gate.exit_with([*_gpu_reasons(config), *reasons])
    if config.enable and hooks.MAIN in found:
        gate.show_plainly()
    _apply(decision.hooks, config.allow_plugins)
    registered.write(decision)


def _gpu_reasons(config: Settings) -> list[Reason]:
    """No GPU, which may be why the host does not import, where torch can tell."""
    import sys

    from sglang_exact import scope

    torch = sys.modules.get("torch")
    if config.rehearsal or torch is None or torch.cuda.is_available():
        return []
    return scope.gpu_reasons(None)


def _apply(selected: tuple[Hook, ...], allowed: tuple[str, ...]) -> None:
    """Register the hooks, and check their effect once the host has applied them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_exact import gate
    from sglang_exact.hooks.base import DIRECT
    from sglang_exact.hooks.in_force import resolve

    direct = [hook for hook in selected if hook.kind == DIRECT]
    for hook in selected:
        if hook.kind != DIRECT:
            HookRegistry.register(hook.target, hook.replacement, HookType[hook.kind])
    apply_hooks = HookRegistry.apply_hooks

    def apply_and_check() -> None:
        apply_hooks()
        with gate.FailClosed("changing the host in place"):
            for hook in direct:
                hook.replacement(resolve(hook.target))
        gate.check_applied(selected, HookRegistry, allowed)

    HookRegistry.apply_hooks = staticmethod(apply_and_check)
