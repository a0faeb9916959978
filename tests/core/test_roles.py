# SPDX-License-Identifier: Apache-2.0
"""Which process this is, from the function that loads the plugins."""

from __future__ import annotations

import multiprocessing
import os
from types import SimpleNamespace

import pytest

from sglang_exact import hooks, roles
from sglang_exact.settings import LAUNCHER_VARIABLE, Settings

BOTH = (hooks.MAIN, hooks.SCHEDULER)


def called_from(module: str, name: str) -> tuple[str, ...]:
    """The roles, as the plugin loader called from this function would find them."""
    space = {"__name__": module, "current": roles.current}
    exec(f"def {name}(): return current()", space)
    found: tuple[str, ...] = space[name]()  # type: ignore[operator]
    return found


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """This process is a child of another one."""
    found = SimpleNamespace(pid=os.getpid() + 1)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: found)
    return found


def test_roles_by_entry_function() -> None:
    managers = "sglang.srt.managers"
    rank = called_from(f"{managers}.scheduler", "run_scheduler_process")
    assert rank == (hooks.SCHEDULER,)
    for module, name in (
        ("detokenizer_manager", "run_detokenizer_process"),
        ("data_parallel_controller", "run_data_parallel_controller_process"),
    ):
        assert called_from(f"{managers}.{module}", name) == ()
    assert roles.current() == (hooks.MAIN,)


def test_unknown_child_takes_every_role(parent: SimpleNamespace) -> None:
    """It may serve HTTP or be a rank; a function of the same name proves nothing."""
    assert roles.current() == BOTH
    assert called_from("a_framework", "run_detokenizer_process") == BOTH
    assert called_from("a_framework", "run_scheduler_process") == BOTH


def test_every_hook_once_in_an_unknown_child() -> None:
    found = hooks.select(Settings(enable=True), *BOTH)
    assert found == list(hooks.ALL)


def test_a_rank_asks_who_started_it(
    parent: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(roles.launcher_reasons({})) == 1
    signed = {LAUNCHER_VARIABLE: str(parent.pid)}
    assert roles.launcher_reasons(signed) == []
    # What a process further up signed says nothing about the one in between.
    parent.pid += 1
    assert len(roles.launcher_reasons(signed)) == 1
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    monkeypatch.setattr(os, "environ", {})
    assert len(roles.launcher_reasons(os.environ)) == 1
    roles.sign()
    assert roles.launcher_reasons(os.environ) == []


def test_selection() -> None:
    on = Settings(enable=True)
    assert hooks.select(Settings(), hooks.SCHEDULER) == []
    both = [hooks.select(on, role) for role in (hooks.MAIN, hooks.SCHEDULER)]
    assert {h.name for found in both for h in found} == {h.name for h in hooks.ALL}
    off = on._replace(disabled_hooks=("attention_verify",))
    names = {hook.name for hook in hooks.select(off, hooks.SCHEDULER)}
    assert "gdn_verify" in names
    assert not any(name.startswith("attention_verify") for name in names)


def test_test_hooks_need_their_setting() -> None:
    """The oracle cannot be on by accident; it works on the stock host as well."""
    assert not any(hook.test for hook in hooks.ALL)
    found = hooks.select(Settings(oracle="plan.json"), hooks.SCHEDULER)
    assert found
    assert all(hook.test for hook in found)
    assert hooks.select(Settings(oracle="plan.json"), hooks.MAIN) == []


@pytest.mark.parametrize("name", ["gdn_verfy", "check_rank", "fill_arguments"])
def test_names_that_cannot_be_disabled(name: str) -> None:
    """Unknown, or the refusal itself."""
    assert len(hooks.name_reasons(Settings(disabled_hooks=(name,)))) == 1


def test_names_and_targets_are_unique() -> None:
    names = [hook.name for hook in hooks.ALL]
    assert len(names) == len(set(names))
