# SPDX-License-Identifier: Apache-2.0
"""What is registered is decided once; whoever asks later reads what was decided."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sglang_exact import hooks
from sglang_exact.hooks import launch, registered
from sglang_exact.hooks.registered import Decision
from sglang_exact.settings import Settings


def test_nothing_is_registered_before_register() -> None:
    assert registered.roles() == ()
    with pytest.raises(RuntimeError, match="not registered"):
        registered.read()


def test_what_was_decided_stays(
    monkeypatch: pytest.MonkeyPatch, decide: Callable[[Settings], Decision]
) -> None:
    """Another environment later on changes nothing: the hooks are in place by then."""
    decided = decide(Settings(enable=True, disabled_hooks=("penalties",)))
    monkeypatch.setenv("SGLANG_EXACT_TEST_DISABLE_HOOKS", "gdn_verify")
    assert registered.read() is decided
    assert registered.roles() == (hooks.MAIN, hooks.SCHEDULER)
    names = {hook.name for hook in registered.read().of(hooks.SCHEDULER)}
    assert "gdn_verify" in names and "penalties_order" not in names
    known = {hook.name for hook in registered.read().known}
    assert "penalties_order" in known
    main = [hook.name for hook in decided.of(hooks.MAIN)]
    assert main[:1] == ["fill_arguments"] and "check_rank" not in main
    asked: list[str] = []
    monkeypatch.setattr(launch, "effect_reasons", lambda h: asked.append(h.name) or ())
    assert launch._effect_reasons() == []
    assert asked == main


def test_a_test_setting_alone_is_not_the_overlay(
    decide: Callable[[Settings], Decision],
) -> None:
    decided = decide(Settings(dummy_weights=True))
    assert [hook.name for hook in decided.hooks] == ["test_dummy_weights"]
    assert decided.hooks[0] in decided.known
    assert registered.roles() == ()
