# SPDX-License-Identifier: Apache-2.0
"""The gate: what leaves the process, and what counts as a hook in force."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_exact import gate, plugins
from sglang_exact.hooks.base import DIRECT, Hook
from sglang_exact.hooks.in_force import effect_reasons
from sglang_exact.reasons import HEADLINE, Reason
from sglang_exact.rehearsal.environment import environment


def replacement(x: int) -> int:
    return x + 1


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module `a_host` with a function `f`."""
    module = ModuleType("a_host")
    module.__dict__["f"] = lambda x: x
    monkeypatch.setitem(sys.modules, "a_host", module)
    return module


def wrapped(original: Callable[..., Any], hook: Callable[..., Any]) -> Any:
    """What the host's registry puts in place of a target."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs)

    return wrapper


HOOK = Hook("a_hook", "a_host.f", "REPLACE", replacement)


def registry(**entries: Any) -> Any:
    hooks = entries.pop("hooks", {"a_host.f": [("REPLACE", replacement, None)]})
    return SimpleNamespace(_hooks=hooks, _patched=entries.pop("patched", {"a_host.f"}))


def test_exit_with(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        gate.exit_with([Reason("a", "b", "c")])
    assert left.value.code == gate.EXIT_STATUS != 0
    assert capsys.readouterr().err.startswith(HEADLINE)


def test_any_exception_becomes_an_exit(capsys: pytest.CaptureFixture[str]) -> None:
    """The host's loader swallows Exception, and SystemExit is none."""
    with pytest.raises(SystemExit), gate.FailClosed("trying"):
        raise KeyError("lost")
    assert "trying raised KeyError" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt), gate.FailClosed("trying"):
        raise KeyboardInterrupt
    with pytest.raises(SystemExit) as left, gate.FailClosed("trying"):
        raise SystemExit(7)
    assert left.value.code == 7


def test_hook_in_force(target: ModuleType) -> None:
    target.__dict__["f"] = wrapped(target.f, replacement)
    assert effect_reasons(HOOK) == []
    gate.check_applied([HOOK], registry())


def test_hook_under_another_wrapper_is_in_force(target: ModuleType) -> None:
    target.__dict__["f"] = wrapped(wrapped(target.f, replacement), lambda x: x)
    assert effect_reasons(HOOK) == []


def test_hook_whose_effect_is_absent(
    target: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """The registry says applied; the live object says otherwise."""
    with pytest.raises(SystemExit):
        gate.check_applied([HOOK], registry())
    assert "hook a_hook is not in force at a_host.f" in capsys.readouterr().err


def test_hook_that_was_not_applied(
    target: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gate.check_applied([HOOK], registry(patched=set()))
    assert "the host did not apply it" in capsys.readouterr().err


def test_target_that_is_gone(target: ModuleType) -> None:
    (reason,) = effect_reasons(HOOK._replace(target="a_host.g"))
    assert "cannot be resolved" in reason.found


@pytest.mark.parametrize("key", ["a_host.f", "a_host:f", "a_host"])
def test_another_plugin_on_our_target(target: ModuleType, key: str) -> None:
    """Also in the host's other spelling, and on the class that holds the target."""
    other = [("AROUND", lambda original, x: original(x), None)]
    ours = [("REPLACE", replacement, None)]
    hooks = {"a_host.f": ours} | {key: ours + other if key == "a_host.f" else other}
    (reason,) = gate.foreign_reasons([HOOK], registry(hooks=hooks))
    assert key in reason.found
    # No name lets anyone in here.
    allowed = [plugins.UNKNOWN]
    assert gate.foreign_reasons([HOOK], registry(hooks=hooks), allowed) == [reason]
    assert gate.foreign_reasons([HOOK], registry()) == []


def test_another_plugin_on_what_a_hook_relies_on(target: ModuleType) -> None:
    hook = HOOK._replace(relies_on=("a_host.g",))
    hooks = {
        "a_host.f": [("REPLACE", replacement, None)],
        "a_host.g": [("AFTER", 1, None)],
    }
    (reason,) = gate.foreign_reasons([hook], registry(hooks=hooks))
    assert "a_host.g" in reason.found


def test_another_plugin_on_anything(target: ModuleType) -> None:
    """An AFTER hook on logits moves every bit, and nothing of ours stands there."""
    source = SimpleNamespace(plugin_name="other")
    hooks = {
        "a_host.f": [("REPLACE", replacement, None)],
        "another.logits": [("AFTER", 1, source), ("AFTER", 2, None)],
    }
    found = gate.foreign_reasons([HOOK], registry(hooks=hooks))
    assert [r.found for r in found] == [
        "another plugin hooks another.logits (code outside any plugin)",
        "another plugin hooks another.logits (other)",
    ]
    # By name, and only the one that has it.
    (left,) = gate.foreign_reasons([HOOK], registry(hooks=hooks), ["other"])
    assert left == found[0]
    with pytest.raises(SystemExit):
        gate.check_applied([HOOK], registry(hooks=hooks))


def test_direct_change(target: ModuleType) -> None:
    live = target.f
    hook = Hook(
        "direct", "a_host.f", DIRECT, replacement, in_force=lambda f: hasattr(f, "on")
    )
    assert len(effect_reasons(hook)) == 1
    live.on = True
    assert effect_reasons(hook) == []


@pytest.mark.host
def test_refusals_are_shown_without_a_traceback() -> None:
    """They end the process at once: what waits at exit would wait for ever."""
    code = (
        "import threading, time; from sglang_exact import gate\n"
        "from sglang_exact.reasons import *\n"
        "threading.Thread(target=time.sleep, args=[5]).start()\n"
        "gate.show_plainly()\n"
        "raise {}"
    )
    shown = []
    for error in ("Refused([Reason('a', 'b', 'c')])", "ValueError('x')"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code.format(error)],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        shown.append((done.returncode, done.stderr))
    assert shown[0][0] == gate.EXIT_STATUS
    assert shown[0][1].count(HEADLINE) == 1
    assert "Traceback" not in shown[0][1]
    assert shown[1][0] == 1
    assert "Traceback" in shown[1][1]
