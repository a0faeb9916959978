# SPDX-License-Identifier: Apache-2.0
"""What pin_host says about a host that changed, and what it writes."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from sglang_exact import hooks
from sglang_exact.hooks.base import Hook
from sglang_exact.host import VERSION, compat
from sglang_exact.host import files as host_files
from sglang_exact.host import source as host
from tools.pins import changes as host_changes
from tools.pins import pin

ROOT = Path(__file__).resolve().parents[2]
OLD = {
    "srt/a.py": "def same(x):\n    return x\n\n\ndef body(x):\n    return x + 1\n",
    "srt/b.py": (
        "class Runner:\n    def step(self, x):\n        return x\n\n"
        "    def gone(self):\n        return 1\n"
    ),
    "kernels/k.py": "def moved(x):\n    return x * 2\n",
}
NEW = {
    "srt/a.py": "def same(x):\n    # Said anew.\n    return x\n\n\n"
    "def body(x):\n    return x + 2\n",
    "srt/b.py": "class Runner:\n    def step(self, x, y=0):\n        return x\n",
    "kernels/other.py": "def moved(x):\n    return x * 2\n",
}
HOOKS = (
    Hook(
        "first", "sglang.srt.a.body", "REPLACE", len, relies_on=("sglang.srt.a.same",)
    ),
    Hook("second", "sglang.srt.b.Runner.step", "REPLACE", len),
    Hook("third", "sglang.srt.b.Runner.gone", "REPLACE", len),
    Hook(
        "fourth",
        "sglang.kernels.k.moved",
        "REPLACE",
        len,
        relies_on=("sglang.srt.a.body",),
    ),
)


def make(folder: Path, files: dict[str, str], version: str) -> Path:
    """A site-packages folder with a host of a few functions."""
    (folder / "sglang" / "kernels").mkdir(parents=True)
    for name, text in files.items():
        path = folder / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    info = folder / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n"
        "Requires-Dist: torch==2.14.1\nRequires-Dist: flashinfer_python[cu13]==0.7.2\n"
        'Requires-Dist: triton==9; extra == "x"\n'
    )
    return folder


@pytest.fixture
def trees(
    tmp_path: Path,
) -> Iterator[tuple[host_changes.HostTree, host_changes.HostTree]]:
    host._tree.cache_clear()
    yield (
        host_changes.find_tree(make(tmp_path / "old", OLD, "1.0")),
        host_changes.find_tree(make(tmp_path / "new", NEW, "1.1")),
    )
    host._tree.cache_clear()


def pins_of(tree: host_changes.HostTree) -> compat.Pins:
    names = sorted({n for h in HOOKS for n in (h.target, *h.relies_on)})
    found, missing = host_changes.collect(tree, names)
    assert missing == []
    return compat.Pins(tree.version, found, tree.stack)


def test_every_kind_of_change(
    trees: tuple[host_changes.HostTree, host_changes.HostTree],
) -> None:
    old, new = trees
    pins = pins_of(old)
    pins.targets["sglang.srt.a.nobody_asks"] = host.Fingerprint((), "0" * 64)
    changes = host_changes.compare(pins, new, HOOKS, old)
    assert [(c.kind, c.target) for c in changes] == [
        ("missing", "sglang.kernels.k.moved"),
        ("missing", "sglang.srt.b.Runner.gone"),
        ("signature", "sglang.srt.b.Runner.step"),
        ("source", "sglang.srt.a.body"),
        ("unused", "sglang.srt.a.nobody_asks"),
    ]
    moved, gone, step, body, _ = changes
    assert moved.elsewhere == {"sglang.kernels.other.moved": "same source"}
    assert gone.elsewhere == {} and gone.hooks == {"third": "target"}
    assert (step.expected, step.found) == (("self", "x"), ("self", "x", "y"))
    assert body.hooks == {"first": "target", "fourth": "relied on"}
    assert "-    return x + 1" in body.diff and "+    return x + 2" in body.diff
    assert body.diff[0].startswith("--- 1.0")


def test_nothing_changed(
    trees: tuple[host_changes.HostTree, host_changes.HostTree],
) -> None:
    old, _ = trees
    assert host_changes.compare(pins_of(old), old, HOOKS, old) == []


def test_without_the_old_source_and_without_a_pin(
    trees: tuple[host_changes.HostTree, host_changes.HostTree],
) -> None:
    old, new = trees
    pins = pins_of(old)
    del pins.targets["sglang.srt.a.same"]
    found = {c.target: c for c in host_changes.compare(pins, new, HOOKS)}
    assert found["sglang.srt.a.same"].kind == "unpinned"
    assert found["sglang.srt.a.body"].diff == ()


def test_versions_and_stack(
    trees: tuple[host_changes.HostTree, host_changes.HostTree],
) -> None:
    """What the host pins; a requirement of an extra is none."""
    old, new = trees
    assert (old.version, new.version) == ("1.0", "1.1")
    assert new.stack == {"torch": "2.14.1", "flashinfer-python": "0.7.2"}
    pins = compat.Pins("1.0", {}, {"torch": "2.13.0", "flashinfer-python": "0.7.2"})
    assert host_changes.stack_changes(pins, new) == {"torch": ("2.13.0", "2.14.1")}


def test_what_a_host_can_be_asked_for(tmp_path: Path) -> None:
    """New flags, variables and sampling parameters: no pin of a function sees them."""
    files = {
        **OLD,
        "srt/arg_groups/fields/spec.py": "class A:\n    depth: int = 1\n    _x = 2\n",
        "srt/environ.py": "class Envs:\n    SGLANG_A = EnvBool(False)\n    B_B = 1\n",
        "srt/sampling/sampling_params.py": "class SamplingParams:\n    top_k = 1\n",
    }
    tree = host_changes.find_tree(make(tmp_path, files, "1.0"))
    found = host_changes.inventory(tree)
    assert found == {
        "server arguments": ["depth"],
        "variables": ["SGLANG_A = False"],
        "sampling parameters": ["top_k"],
    }
    assert host_changes.inventory_changes(found, found) == {}
    assert host_changes.inventory_changes({}, found) == {}
    # Another default is a change like a new name.
    before = {**found, "variables": ["SGLANG_A = True"]}
    assert host_changes.inventory_changes(before, found) == {
        "variables": {"new": ["SGLANG_A = False"], "gone": ["SGLANG_A = True"]}
    }


def checkout(folder: Path) -> Path:
    """A source checkout: python/sglang, pyproject.toml, a tag."""
    package = folder / "python" / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "srt" / "a.py").write_text(OLD["srt/a.py"])
    (folder / "python" / "pyproject.toml").write_text(
        '[project]\nname = "sglang"\ndependencies = ["torch==2.15.0"]\n'
    )
    return folder


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
    subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True
    )


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_checkout(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "sglang")
    git(tmp_path / "sglang", "init")
    git(folder, "add", "python")
    git(folder, "commit", "-m", "one")
    git(folder, "tag", "v0.6.0")
    tree = host_changes.find_tree(folder)
    assert tree.version == "0.6.0"
    assert tree.stack["torch"] == "2.15.0"
    assert host.fingerprint("sglang.srt.a.same", tree.package).params == ("x",)


def test_no_host_and_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="found no sglang/srt"):
        host_changes.find_tree(tmp_path)
    folder = checkout(tmp_path / "sglang")
    with pytest.raises(ValueError, match="fix: pass --version"):
        host_changes.find_tree(folder)
    assert host_changes.find_tree(folder, "0.6.1").version == "0.6.1"
    monkeypatch.setattr(host, "root", lambda: None)
    with pytest.raises(ValueError, match="found no SGLang installed"):
        host_changes.find_tree()


PARSED = functools.cache(host.fingerprint)


class Done(NamedTuple):
    """How the command ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def pin_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """The command in this process; `test_commands` runs it as documented.

    The installed host, which no test edits, is parsed once for all of them.
    """
    root = host.root()
    installed = root.resolve() if root else None
    parse = host.fingerprint

    def fingerprint(name: str, base: Path | None = None) -> host.Fingerprint:
        return (PARSED if base == installed else parse)(name, base)

    monkeypatch.setattr(host, "fingerprint", fingerprint)

    def ask(*arguments: str) -> Done:
        host._tree.cache_clear()
        monkeypatch.setattr(sys, "argv", ["pin_host", *arguments])
        return Done(pin.main(), *capsys.readouterr())

    return ask


@pytest.mark.host
def test_the_installed_host_is_as_pinned(pin_host: Callable[..., Done]) -> None:
    done = pin_host("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["targets"] == found["as_pinned"] == len(hooks.pinned_names())
    assert found["changes"] == [] and found["names"] == {} and found["files"] == {}


@pytest.mark.host
def test_a_changed_host(tmp_path: Path, pin_host: Callable[..., Done]) -> None:
    """One function of the installed host changed, another one taken away."""
    root = host.root()
    assert root is not None
    for name in hooks.pinned_names():
        file, _ = host.module_file(name)
        path = tmp_path / "sglang" / file.relative_to(root)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.read_text())
    (tmp_path / "sglang" / "_version.py").write_text("__version__ = '9.9.9'\n")
    path = tmp_path / "sglang" / "srt" / "managers" / "schedule_policy.py"
    text = path.read_text()
    assert "def mamba_prefill_chunk_grid(" in text
    text = text.replace("def mamba_prefill_chunk_grid(", "def renamed(")
    path.write_text(text.replace("def add_chunked_req(self", "def add_chunked_req(me"))
    flags = ("--site", str(tmp_path), "--against", VERSION)
    done = pin_host(*flags)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("SGLang 9.9.9 ")
    assert "1 missing, 1 signature" in lines[1]
    # Whole files as well: the copy has few of them, and one was edited.
    edited = "changed    files: srt/managers/schedule_policy.py"
    assert edited in lines
    assert any(line.startswith("gone       files: __init__.py, ") for line in lines)
    assert "           hooks: prefill_grid (target)" in lines
    assert any(
        line.startswith("           | -    def add_chunked_req(s") for line in lines
    )
    # Nothing is written while a target is missing, and the pins stay as they are.
    refused = pin_host(*flags, "--write", "--out", str(tmp_path))
    assert refused.returncode == 2
    assert "1 targets missing" in refused.stderr
    text = text.replace("def renamed(", "def mamba_prefill_chunk_grid(")
    path.write_text(f"{text}\nEDITED = 1\n")
    done = pin_host(*flags, "--write", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "refused until --device-run" in done.stderr
    written = json.loads((tmp_path / "sglang-9.9.9.json").read_text())
    assert written["device_run"] == ""
    assert sorted(written["targets"]) == hooks.pinned_names()
    files = json.loads((tmp_path / "files-9.9.9.json").read_text())
    pinned = host_files.pinned(VERSION)
    assert set(files) < set(pinned)
    off = [name for name in files if files[name] != pinned[name]]
    assert off == ["srt/managers/schedule_policy.py"]


@pytest.mark.host
def test_what_proves_a_host(tmp_path: Path, pin_host: Callable[..., Done]) -> None:
    """Rows that passed do; a measurement beside them is passed over."""
    out, runs = tmp_path / "pins", tmp_path / "gpu"
    out.mkdir()
    runs.mkdir()
    flags = ("--write", "--out", str(out), "--device-run", str(runs))
    versions = {"sglang": VERSION}
    speed, proof = runs / "speed.json", runs / "proof.json"
    speed.write_text(json.dumps({"versions": versions, "ratio": 1.01}))
    done = pin_host(*flags)
    assert done.returncode == 2 and "found no result for SGLang" in done.stderr
    proof.write_text(json.dumps({"versions": versions, "rows": [{}]}))
    done = pin_host(*flags)
    assert done.returncode == 0, done.stderr
    for off in ({"rows": []}, {"rows": [{}], "failed": ["ids differ"]}):
        proof.write_text(json.dumps({"versions": versions, **off}))
        done = pin_host(*flags)
        assert done.returncode == 2 and "expected a run that passed" in done.stderr


@pytest.mark.host
def test_what_cannot_be_done(tmp_path: Path, pin_host: Callable[..., Done]) -> None:
    done = pin_host("--site", str(tmp_path))
    assert done.returncode == 2 and "found no sglang/srt" in done.stderr
    done = pin_host("--against", "0.0.1")
    assert done.returncode == 2 and "correct --against" in done.stderr
    done = pin_host("--write", "--out", str(tmp_path), "--device-run", "results/none")
    assert done.returncode == 2 and "found no result for SGLang" in done.stderr
    assert list(tmp_path.iterdir()) == []
