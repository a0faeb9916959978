# SPDX-License-Identifier: Apache-2.0
"""Edits of a module's source: applied, anchored, and refused when the host moved."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from sglang_exact.rehearsal import import_hook
from sglang_exact.rehearsal.import_hook import Edit, Mend

NAME = "module_of_the_host"
SOURCE = "LIMIT = 1\n\n\ndef limit():\n    return LIMIT\n"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module named `NAME` that can be imported, and its file."""
    file = tmp_path / f"{NAME}.py"
    file.write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield file
    sys.modules.pop(NAME, None)


def _import(mend: Mend) -> ModuleType:
    import_hook.install([mend])
    return importlib.import_module(NAME)


def test_edit_and_callback(host: Path) -> None:
    seen = []
    module = _import(
        Mend(NAME, "a reason", (Edit("LIMIT = 1", "LIMIT = 2"),), after=seen.append)
    )
    assert module.limit() == 2
    assert seen == [module]
    # The interpreter reads kernels back by line number: lines must not move.
    assert inspect.getsource(module.limit).startswith("def limit")
    assert host.read_text() == SOURCE


def test_without_a_mend_the_module_is_the_hosts(host: Path) -> None:
    module = _import(Mend("another_module", "a reason"))
    assert module.limit() == 1


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Edit("LIMIT = 7", "LIMIT = 2"), "found 0 times, expected 1 times"),
        (Edit("LIMIT", "BOUND"), "found 2 times, expected 1 times"),
        (Edit("LIMIT = 1\n", "LIMIT = 2"), "moves lines"),
    ],
)
def test_moved_anchor_is_refused(host: Path, edit: Edit, message: str) -> None:
    with pytest.raises(RuntimeError, match=message) as error:
        _import(Mend(NAME, "a reason", (edit,)))
    assert "Fix:" in str(error.value)


def test_missing_name_is_refused(host: Path) -> None:
    with pytest.raises(RuntimeError, match="found no gone, expected"):
        _import(Mend(NAME, "a reason", needs=("limit", "gone")))


def test_too_late_is_refused(host: Path) -> None:
    importlib.import_module(NAME)
    with pytest.raises(RuntimeError, match="found already imported"):
        _import(Mend(NAME, "a reason"))


def test_two_mends_of_one_module_are_refused() -> None:
    with pytest.raises(ValueError, match="two mends"):
        import_hook.install([Mend(NAME, "one"), Mend(NAME, "two")])
