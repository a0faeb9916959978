# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of source: stable where code is the same, different where not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_exact.host import source as host

BODY = '''
"""A module."""

def plain(a, b=1, *args, c, **rest):
    """A docstring."""
    # A comment.
    return a + b


class Runner:
    """A class."""

    limit = 3

    def step(self, x):
        """Another."""
        return x * 2


try:
    import missing
except ImportError:
    def fallback(x):
        return x
else:
    def fallback(x):
        return missing.f(x)

kernel = plain
'''


@pytest.fixture
def write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], None]]:
    """Make a host of one module, sglang.part.code, with the given source."""
    package = tmp_path / "sglang" / "part"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    monkeypatch.setattr(host, "root", lambda: tmp_path / "sglang")

    def write(source: str) -> None:
        (package / "code.py").write_text(source)
        host._tree.cache_clear()

    write(BODY)
    yield write
    host._tree.cache_clear()


def shas(*names: str) -> list[str]:
    return [host.fingerprint(f"sglang.part.code.{name}").sha256 for name in names]


def test_fingerprint_reads_parameters(write: Callable[[str], None]) -> None:
    found = host.fingerprint("sglang.part.code.plain")
    assert found.params == ("a", "b", "*args", "c", "**rest")
    assert len(found.sha256) == 64


def test_comments_docstrings_and_layout_do_not_count(
    write: Callable[[str], None],
) -> None:
    names = ("plain", "Runner", "Runner.step")
    before = shas(*names)
    changed = BODY.replace('    """A docstring."""\n', "").replace("# A comment.", "")
    changed = changed.replace('"""Another."""', '"""Says something else."""')
    write("\n\n" + changed.replace("return a + b", "return (a +\n            b)"))
    assert shas(*names) == before


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("return a + b", "return b + a", ["plain"]),
        ("return a + b", "return a + b + 0", ["plain"]),
        ("b=1", "b=2", ["plain"]),
        ("return x * 2", "return x * 2.0", ["Runner", "Runner.step"]),
        ("limit = 3", "limit = 4", ["Runner"]),
        ("def step", "@staticmethod\n    def step", ["Runner", "Runner.step"]),
    ],
)
def test_code_counts(
    write: Callable[[str], None], old: str, new: str, changed: list[str]
) -> None:
    names = ("plain", "Runner", "Runner.step")
    before = shas(*names)
    write(BODY.replace(old, new))
    after = shas(*names)
    found = [n for n, x, y in zip(names, before, after, strict=True) if x != y]
    assert found == changed


def test_assignment_counts_as_a_definition(write: Callable[[str], None]) -> None:
    before = shas("kernel")
    write(BODY.replace("kernel = plain", "kernel = Runner"))
    assert shas("kernel") != before


@pytest.mark.parametrize(
    "name",
    [
        "sglang.part.code.absent",
        "sglang.part.code.Runner.absent",
        "sglang.part.absent.plain",
        "elsewhere.code.plain",
    ],
)
def test_missing_target(write: Callable[[str], None], name: str) -> None:
    with pytest.raises(host.TargetMissing):
        host.fingerprint(name)


def test_another_tree(write: Callable[[str], None], tmp_path: Path) -> None:
    """A host that is not installed is read from its folder."""
    other = tmp_path / "other" / "sglang"
    (other / "part").mkdir(parents=True)
    (other / "part" / "code.py").write_text("@f\ndef plain(a):\n    return a\n")
    name = "sglang.part.code.plain"
    assert host.fingerprint(name, other).params == ("a",)
    assert host.fingerprint(name).params == ("a", "b", "*args", "c", "**rest")
    assert host.source_lines(name, other) == ["@f", "def plain(a):", "    return a"]
    with pytest.raises(host.TargetMissing):
        host.fingerprint("sglang.part.code.Runner", other)


def test_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "root", lambda: None)
    with pytest.raises(host.TargetMissing, match="not installed"):
        host.fingerprint("sglang.srt.server_args.ServerArgs")


def test_versions_of_what_is_absent() -> None:
    assert host.version("no-such-distribution-here") is None
    assert set(host.stack_versions()) == set(host.STACK)
