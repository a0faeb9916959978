# SPDX-License-Identifier: Apache-2.0
"""Every argument of the host has a class, and every name of it leads to that class."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from sglang_exact import scope, scope_arguments

pytestmark = pytest.mark.host

SETTLED = {**scope.ALLOWED, **scope.ALLOWED_SPECULATIVE}
CLASSES = (SETTLED, scope_arguments.LEFT_ALONE, scope_arguments.HARMLESS)
NO_FIELD = {"help", "config"}
"""--config is a file of these same arguments."""


def server_args() -> Any:
    return pytest.importorskip("sglang.srt.server_args")


def actions() -> list[argparse.Action]:
    """What the host's own parser takes."""
    parser = argparse.ArgumentParser()
    server_args().ServerArgs.add_cli_args(parser)
    return list(parser._actions)


def unclassified(names: set[str]) -> list[str]:
    """Names that are in no class or in several."""
    return sorted(n for n in names if sum(n in table for table in CLASSES) != 1)


def test_every_argument_has_one_class() -> None:
    import msgspec

    fields = {f.name for f in msgspec.structs.fields(server_args().ServerArgs)}
    assert len(fields) > 500
    assert unclassified(fields) == []
    assert sorted(set().union(*CLASSES) - fields) == []
    # Control: an argument of a later host.
    assert unclassified({*fields, "enable_something_new"}) == ["enable_something_new"]


def test_every_option_sets_a_field() -> None:
    dests = {action.dest for action in actions()} - NO_FIELD
    assert unclassified(dests) == []


def wrong_value(action: argparse.Action) -> list[str] | None:
    """Words that set `action` to something other than what is served; None if none."""
    served = (*SETTLED.get(action.dest, ()), action.default)
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return []
    for value in [*(action.choices or ()), "7", "0.25", '{"a": 1}', "a=b"]:
        try:
            made = action.type(str(value)) if callable(action.type) else value
        except (ValueError, TypeError, argparse.ArgumentTypeError):
            continue
        if made not in served and str(made) not in map(str, served):
            return [str(value)]
    return None


def refused(words: list[str]) -> set[str]:
    """Flags that the arguments as given are refused for."""
    module = server_args()
    parser = argparse.ArgumentParser()
    module.ServerArgs.add_cli_args(parser)
    base = ["--model-path", "m", "--speculative-algorithm", "DFLASH"]
    args = module.ServerArgs.from_cli_args(parser.parse_args([*base, *words]))
    args.speculative_num_draft_tokens = 4
    return {reason.found.split()[0] for reason in scope.fill(args)}


def test_every_name_of_a_looked_at_argument_is_refused() -> None:
    """Aliases, deprecated names and JSON: whatever the host's parser calls it."""
    assert refused([]) == set()
    seen = set()
    for action in actions():
        if action.dest not in SETTLED and action.dest not in scope_arguments.LEFT_ALONE:
            continue
        words = wrong_value(action)
        for name in action.option_strings if words is not None else ():
            if name.startswith("--no-"):
                continue
            seen.add(action.dest)
            flag = scope._flag(action.dest)
            try:
                found = refused([name, *(words or [])])
            except SystemExit:
                pytest.fail(f"{name} {words} was not understood")
            # What is set for you may be given, and a fill is refused by value.
            fill = next((f for f in scope.FILLS if f.field == action.dest), None)
            if fill is not None and fill.value is True:
                assert found == set(), name
            else:
                assert flag in found, (name, words)
    assert {"tp_size", "smg_grpc_mode", "forward_hooks", "debug_cuda_graph"} <= seen
    assert len(seen) > 120


def test_what_was_not_given_is_not_refused() -> None:
    """Lists that the host makes anew for each record are no argument given."""
    module = server_args()
    args = module.ServerArgs(model_path="m")
    assert scope.given(args) == {"model_path"}
    args.debug_cuda_graph = True
    given = scope.given(args)
    (reason,) = scope_arguments.left_alone_reasons(args, given)
    assert reason.found == "--debug-cuda-graph True"
    assert reason.fix == "drop --debug-cuda-graph"
