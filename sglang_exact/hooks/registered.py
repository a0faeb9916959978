# SPDX-License-Identifier: Apache-2.0
"""What `plugin.register` decided for this process, for everything that asks later.

The environment is read once a process: what is attested is what was registered, not
what a second reading of the environment would register.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_exact.hooks.base import Hook
from sglang_exact.settings import Settings


class Decision(NamedTuple):
    """One process under the overlay.

    `hooks` are those registered here, `known` every hook that is ours, registered or
    not; `pinned_names` are the dotted paths whose source is pinned, sorted.
    """

    settings: Settings
    roles: tuple[str, ...]
    hooks: tuple[Hook, ...]
    known: tuple[Hook, ...]
    pinned_names: tuple[str, ...]

    def of(self, role: str) -> list[Hook]:
        """The registered hooks of one role."""
        return [hook for hook in self.hooks if role in hook.roles]


_decision: Decision | None = None


def write(decision: Decision | None) -> None:
    """Keep what was decided for this process; None forgets it."""
    global _decision
    _decision = decision


def read() -> Decision:
    """What was decided for this process.

    Raises:
        RuntimeError: nothing was; no hook of ours runs in such a process.
    """
    if _decision is None:
        raise RuntimeError(
            "found a process in which sglang_exact is not registered, expected its "
            "plugin to have run; call sglang.srt.plugins.load_plugins() first"
        )
    return _decision


def roles() -> tuple[str, ...]:
    """Roles under which the overlay is on in this process; () while it is off."""
    if _decision is None or not _decision.settings.enable:
        return ()
    return _decision.roles
