# SPDX-License-Identifier: Apache-2.0
"""Which process this is, from the function that loads the plugins."""

from __future__ import annotations

import multiprocessing

import pytest

from sglang_exact import hooks, roles
from sglang_exact.settings import Settings


def run_scheduler_process() -> str:
    return roles.current()


def run_detokenizer_process() -> str:
    return roles.current()


def test_roles_by_entry_function() -> None:
    assert run_scheduler_process() == hooks.SCHEDULER
    assert run_detokenizer_process() == roles.OTHER
    assert roles.current() == hooks.MAIN


def test_unknown_child_counts_as_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks too many cost time, hooks too few cost exactness."""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    assert roles.current() == hooks.SCHEDULER


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
