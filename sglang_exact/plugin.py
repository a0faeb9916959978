# SPDX-License-Identifier: Apache-2.0
"""Entry point of the host's plugin loader: settings, scope, hooks, gate.

Nothing is imported at module level that could fail: an import error here would be
logged by the host and forgotten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_exact.hooks.base import Hook

loaded_roles: tuple[str, ...] | None = None
"""Roles under which this process registered the overlay, or None while it is off."""


def register() -> None:
    """Register the overlay's hooks in this process, or leave with SystemExit.

    Without SGLANG_EXACT_ENABLE=1 and without a test setting the host is untouched.
    """
    from sglang_exact.gate import FailClosed

    with FailClosed("registering sglang_exact"):
        _register()


def _register() -> None:
    import os

    from sglang_exact import compat, gate, hooks, roles, scope, settings

    global loaded_roles
    config, reasons = settings.read(os.environ)
    if not reasons and not config.enable and not config.any_test:
        return
    reasons += hooks.name_reasons(config)
    if config.enable:
        reasons += scope.environment_reasons(os.environ)
        if not config.allow_unpinned_host:
            reasons += compat.reasons(hooks.pinned_names())
    if reasons:
        gate.exit_with(reasons)
    found = roles.current()
    if not found:
        return
    if config.enable and hooks.MAIN in found:
        gate.show_plainly()
    _apply(hooks.select(config, *found))
    loaded_roles = found if config.enable else None


def _apply(selected: list[Hook]) -> None:
    """Register the hooks, and check their effect once the host has applied them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_exact import gate
    from sglang_exact.hooks.base import DIRECT, resolve

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
        gate.check_applied(selected, HookRegistry)

    HookRegistry.apply_hooks = staticmethod(apply_and_check)
