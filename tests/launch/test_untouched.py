# SPDX-License-Identifier: Apache-2.0
"""Installed is not enabled: without the switch the host keeps every object it had."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import warm

from sglang_exact.rehearsal.environment import environment

pytestmark = pytest.mark.host

# Loads the plugins the way a rank does, and compares every target before and after.
PROBE = """
import json, sys
from sglang.srt import plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_exact import hooks
from sglang_exact.hooks.base import DIRECT
from sglang_exact.hooks.in_force import resolve

def look():
    found = {}
    for hook in hooks.ALL:
        live = resolve(hook.target)
        changed = hook.kind == DIRECT and hook.in_force(live)
        code = getattr(live, "__code__", None)
        found[hook.name] = [id(live), id(code), repr(getattr(live, "__dict__", "")),
                            changed]
    return found

def state():
    return [id(HookRegistry.apply_hooks.__code__), id(sys.excepthook),
            len(HookRegistry._hooks), len(HookRegistry._patched)]

# As a rank does: the name of the function and of its module tell.
rank = {"__name__": "sglang.srt.managers.scheduler", "load": plugins.load_plugins}
exec("def run_scheduler_process(): load()", rank)
before, state_before = look(), state()
rank["run_scheduler_process"]()
after, state_after = look(), state()
changed = [name for name in before if before[name] != after[name]]
from sglang_exact.hooks import registered
print(json.dumps({"targets": len(before), "changed": changed,
                  "registry_changed": state_before != state_after,
                  "role": registered.roles()}))
"""


def probe(**variables: str) -> dict[str, Any]:
    """Run the probe in a process of its own."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    env = environment(base)
    del env["SGLANG_EXACT_TEST_REHEARSAL"]
    # The mends are what lets the host's modules be imported without a GPU; they are
    # put in place here, so that no setting of the overlay is on.
    start = "from sglang_exact.rehearsal import bootstrap; bootstrap.install()\n"
    done = warm.run(["-c", start + PROBE], env={**env, **variables})
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("switch", [{}, {"SGLANG_EXACT_ENABLE": "0"}])
def test_not_enabled(switch: dict[str, str]) -> None:
    found = probe(**switch)
    assert found["targets"] > 10
    assert found["changed"] == []
    assert not found["registry_changed"]
    assert found["role"] == []


def test_enabled_changes_every_target_of_a_rank() -> None:
    """The control: the same probe sees the overlay once it is on."""
    from sglang_exact import hooks

    found = probe(SGLANG_EXACT_ENABLE="1", SGLANG_EXACT_TEST_REHEARSAL="1")
    expected = {hook.name for hook in hooks.ALL if hooks.SCHEDULER in hook.roles}
    assert expected <= set(found["changed"])
    assert found["registry_changed"]
    assert found["role"] == [hooks.SCHEDULER]
