# SPDX-License-Identifier: Apache-2.0
"""Other plugins of the host in this environment, and what they hooked.

A plugin may change any function of the host, so each is named in the attestation, and
refused unless SGLANG_EXACT_ALLOW_PLUGINS names it; then numerics are `unverified`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from sglang_exact.reasons import Reason

if TYPE_CHECKING:
    from sglang_exact.hooks.base import Hook

GROUP = "sglang.srt.plugins"
NAME = "sglang_exact"
VALUE = "sglang_exact.plugin:register"
PLATFORMS = "sglang.srt.platforms"
UNKNOWN = "code outside any plugin"
# What the host's own dependency for gRPC registers in every installation: flags of its
# parser, and nothing else while gRPC is off, which is refused.
GRPC = {
    "smg-servicer": "smg_grpc_servicer.sglang.plugin:register",
    "smg-zmq": "smg_grpc_servicer.sglang.zmq_plugin:register",
}
GRPC_TARGET = "sglang.srt.server_args.ServerArgs.add_cli_args"


def _listed(text: str) -> set[str]:
    return {item.strip() for item in text.split(",") if item.strip()}


def others(environ: Mapping[str, str]) -> dict[str, str]:
    """Plugins that the host's loader would run beside ours: name -> what it runs.

    The host runs the last of two with one name, so a second `sglang_exact` counts.
    """
    only = _listed(environ.get("SGLANG_PLUGINS", ""))
    platform = environ.get("SGLANG_PLATFORM", "")
    found = {}
    for group in (GROUP, PLATFORMS):
        for entry in metadata.entry_points(group=group):
            known = {NAME: VALUE, **GRPC}.get(entry.name)
            ours = group == GROUP and known == entry.value
            chosen = group == PLATFORMS and entry.name == platform
            if not ours and (chosen or not only or entry.name in only):
                found[entry.name] = entry.value
    return found


def foreign_hooks(hooks: Iterable[Hook], registry: Any) -> list[tuple[str, str]]:
    """Hooks that the host's registry holds beside `hooks` and the host's own.

    Returns:
        Target as it was registered, and the plugin that did it or UNKNOWN; sorted.
    """
    ours = {id(hook.replacement) for hook in hooks}
    found = {
        (target, source.plugin_name if source else UNKNOWN)
        for target, entries in registry._hooks.items()
        for _, replacement, source in entries
        if id(replacement) not in ours
    }
    return sorted(x for x in found if x[1] not in GRPC or x[0] != GRPC_TARGET)


def names(environ: Mapping[str, str], hooks: Iterable[Hook]) -> list[str]:
    """Every plugin of this process beside the one with `hooks`, sorted."""
    registry = sys.modules.get("sglang.srt.plugins.hook_registry")
    foreign = foreign_hooks(hooks, registry.HookRegistry) if registry else []
    return sorted({*others(environ), *(name for _, name in foreign)})


def reasons(environ: Mapping[str, str], allowed: Iterable[str]) -> list[Reason]:
    """Reasons in the plugins that the host would load."""
    allowed = set(allowed)
    return [
        Reason(
            f"another plugin: {name} ({value})",
            "no plugin that was not proven with the overlay",
            f"export SGLANG_PLUGINS={NAME}, or serve without the promise under "
            f"--exact-allow-plugin {name}",
        )
        for name, value in sorted(others(environ).items())
        if name not in allowed
    ]
