# SPDX-License-Identifier: Apache-2.0
"""Other plugins of the host: which would be loaded, and what is said of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_exact import attestation, plugins
from sglang_exact.hooks.registered import Decision
from sglang_exact.host import compat
from sglang_exact.settings import Settings

OURS = metadata.EntryPoint(plugins.NAME, plugins.VALUE, plugins.GROUP)
OTHER = metadata.EntryPoint("other", "other:register", plugins.GROUP)
PLATFORM = metadata.EntryPoint("chip", "chip:activate", plugins.PLATFORMS)
GRPC = [
    metadata.EntryPoint(name, value, plugins.GROUP)
    for name, value in plugins.GRPC.items()
]
LOOKALIKE = metadata.EntryPoint("smg-zmq", "other:register", plugins.GROUP)
IMPOSTOR = metadata.EntryPoint(plugins.NAME, "other:register", plugins.GROUP)


def install(monkeypatch: pytest.MonkeyPatch, *points: metadata.EntryPoint) -> None:
    def entry_points(**select: Any) -> Any:
        return metadata.EntryPoints(points).select(**select)

    monkeypatch.setattr(metadata, "entry_points", entry_points)


@pytest.mark.parametrize(
    ("points", "environ", "found"),
    [
        ([OURS], {}, []),
        ([OURS, OTHER, PLATFORM], {}, ["chip", "other"]),
        ([OURS, OTHER, PLATFORM], {"SGLANG_PLUGINS": "sglang_exact"}, []),
        ([OURS, OTHER], {"SGLANG_PLUGINS": "sglang_exact, other"}, ["other"]),
        # The host takes the chosen platform whatever the list of plugins says.
        (
            [OURS, PLATFORM],
            {"SGLANG_PLUGINS": "sglang_exact", "SGLANG_PLATFORM": "chip"},
            ["chip"],
        ),
        ([OURS, IMPOSTOR], {}, [plugins.NAME]),
        # Every installation of the host brings these.
        ([OURS, *GRPC], {}, []),
        ([OURS, LOOKALIKE], {}, ["smg-zmq"]),
    ],
)
def test_what_the_host_would_load(
    monkeypatch: pytest.MonkeyPatch,
    points: list[metadata.EntryPoint],
    environ: dict[str, str],
    found: list[str],
) -> None:
    install(monkeypatch, *points)
    assert sorted(plugins.others(environ)) == found
    assert len(plugins.reasons(environ, ())) == len(found)
    assert plugins.reasons(environ, found) == []


def test_a_name_allows_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, OURS, OTHER, PLATFORM)
    (reason,) = plugins.reasons({}, ["other"])
    assert reason.found == "another plugin: chip (chip:activate)"
    assert reason.fix.endswith("--exact-allow-plugin chip")


@pytest.mark.parametrize("beside", [[], ["other"]])
def test_never_bitwise_beside_another_plugin(
    monkeypatch: pytest.MonkeyPatch,
    beside: list[str],
    decide: Callable[[Settings], Decision],
) -> None:
    """It is named, and so are hooks that nobody's entry point explains."""
    monkeypatch.setattr(compat, "reasons", lambda names: [])
    monkeypatch.setattr(compat, "stack_reasons", list)
    monkeypatch.setattr(compat, "loaded_reasons", list)
    monkeypatch.setattr(plugins, "names", lambda environ, hooks: beside)
    found = attestation.record(decide(Settings(enable=True)), {"device": "cuda:0"}, {})
    assert found["plugins"] == beside
    assert (found["numerics"] == attestation.BITWISE) is (beside == [])


def test_names_of_plugins_and_of_their_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, OURS, OTHER)
    entries = {"a.b": [("AFTER", 1, SimpleNamespace(plugin_name="late"))]}
    module = SimpleNamespace(HookRegistry=SimpleNamespace(_hooks=entries))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", module)
    assert plugins.names({}, []) == ["late", "other"]
    entries["a.c"] = [("AFTER", 1, None)]
    assert plugins.names({}, []) == [plugins.UNKNOWN, "late", "other"]


def test_the_hosts_own_plugins_may_add_flags_and_nothing_else() -> None:
    def entry(plugin: str) -> list[Any]:
        return [("AFTER", object(), SimpleNamespace(plugin_name=plugin))]

    def foreign(target: str, plugin: str) -> list[tuple[str, str]]:
        registry = SimpleNamespace(_hooks={target: entry(plugin)})
        return plugins.foreign_hooks([], registry)

    assert foreign(plugins.GRPC_TARGET, "smg-servicer") == []
    assert foreign(plugins.GRPC_TARGET, "other") == [(plugins.GRPC_TARGET, "other")]
    idle = "sglang.srt.managers.scheduler.Scheduler.init_idle_sleeper"
    assert foreign(idle, "smg-zmq") == [(idle, "smg-zmq")]
