# SPDX-License-Identifier: Apache-2.0
"""Hooks stand on their functions, in their order; none is declared and forgotten."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any

import pytest

from sglang_exact import hooks
from sglang_exact.hooks import base
from sglang_exact.settings import Settings

PACKAGE = hooks.__name__


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """This module, without what its other tests declared."""
    monkeypatch.delitem(base._declared, __name__, raising=False)
    return importlib.import_module(__name__)


def declared(*places: tuple[str, str]) -> Any:
    """A function that replaces several places, (name, target) from top to bottom."""

    def replacement(self: Any) -> None:
        """Stays what it is."""

    once = replacement
    for name, target in reversed(places):
        replacement = base.hook(target, "AFTER", name=name)(replacement)
    assert replacement is once
    return once


def test_order_is_that_of_the_functions_the_lowest_first(module: ModuleType) -> None:
    first = declared(("b", "host.b"), ("a", "host.a"))
    second = declared(("c", "host.c"))
    found = [(hook.name, hook.target, hook.replacement) for hook in base.of(module)]
    assert found == [
        ("a", "host.a", first),
        ("b", "host.b", first),
        ("c", "host.c", second),
    ]
    launch = hooks.MODULES[0]
    names = [hook.name for hook in base.of(launch, module)]
    assert names[-3:] == ["a", "b", "c"] and names[0] == "fill_arguments"


def test_fields_reach_the_hook(module: ModuleType) -> None:
    def in_force(target: Any) -> bool:
        return True

    given: dict[str, Any] = {
        "name": "all",
        "roles": (base.MAIN,),
        "relies_on": ("host.g",),
        "test": True,
        "in_force": in_force,
    }
    base.hook("host.f", base.DIRECT, **given)(declared)
    (found,) = base.of(module)
    assert found == base.Hook(
        target="host.f", kind="DIRECT", replacement=declared, **given
    )


def forgotten() -> set[str]:
    """Modules of the package that declare a hook which no list names."""
    for info in pkgutil.walk_packages(hooks.__path__, f"{PACKAGE}."):
        importlib.import_module(info.name)
    tests = Settings(dummy_weights=True, oracle="plan.json", deep_gemm_default=True)
    listed = {*hooks.ALL, *hooks.select(tests, hooks.SCHEDULER)}
    return {
        name
        for name, found in base._declared.items()
        if name.startswith(PACKAGE) and not set(found) <= listed
    }


def test_every_module_with_hooks_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forgotten() == set()
    # Control: a file that nobody listed.
    new = declared(("new", "host.f"))
    new.__module__ = f"{PACKAGE}.new"
    monkeypatch.setitem(base._declared, new.__module__, [])
    base.hook("host.f", "AFTER", name="new")(new)
    assert forgotten() == {new.__module__}
