# SPDX-License-Identifier: Apache-2.0
"""Whole files of the host: an edit outside every pinned function is seen."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib import machinery
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang_exact import attestation, gate
from sglang_exact.hooks import rank
from sglang_exact.hooks.registered import Decision
from sglang_exact.host import VERSION, compat
from sglang_exact.host import files as host_files
from sglang_exact.host import source as host
from sglang_exact.settings import Settings

FILES = {
    "__init__.py": "",
    "_version.py": "__version__ = '1'\n",
    "srt/models/m.py": 'def f(x):\n    """Says."""\n    return x + 1\n',
    "kernels/csrc/k.cuh": "__device__ int f() { return 1; }\n",
    "srt/notes.md": "not code\n",
    "test/t.py": "not = 'pinned'\n",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "sglang"


def test_what_counts_as_a_change(package: Path) -> None:
    pins = host_files.collect(package, {})
    assert sorted(pins) == ["__init__.py", "kernels/csrc/k.cuh", "srt/models/m.py"]
    same = host_files.fingerprint(pins, package)
    model, kernel = package / "srt/models/m.py", package / "kernels/csrc/k.cuh"
    model.write_text("# Said anew.\ndef f(x):\n    return x + 1  # one\n")
    assert host_files.changes(pins, package) == ([], [], [])
    assert host_files.fingerprint(pins, package) == same
    # Pinned again, the tree keeps its hash, and a known pin saves no change.
    assert host_files.collect(package, pins)["srt/models/m.py"] != ""
    model.write_text("def f(x):\n    return x + 2\n")
    kernel.write_text("__device__ int f() { return 1; } // said\n")
    (package / "srt/models/n.py").write_text("")
    (package / "__init__.py").unlink()
    found = host_files.changes(pins, package)
    assert found.changed == ["kernels/csrc/k.cuh", "srt/models/m.py"]
    assert (found.gone, found.new) == (["__init__.py"], ["srt/models/n.py"])
    assert host_files.fingerprint(pins, package) != same
    model.write_text("def f(x:\n")
    assert "srt/models/m.py" in host_files.changes(pins, package).changed


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the installed host, made of links, that is taken for it."""
    root = host.root()
    assert root is not None
    copy = tmp_path / "sglang"
    for name in host_files.pinned(VERSION):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).symlink_to(root / name)
    monkeypatch.setattr(host, "root", lambda: copy)
    return copy


@pytest.mark.host
def test_an_edited_file_is_named(installed: Path) -> None:
    """A model, a norm, a rotary embedding, a convolution, a compiled source."""
    assert compat.file_reasons(VERSION) == []
    before = attestation.files_fingerprint()
    for name in (
        "srt/models/qwen3_5.py",
        "srt/layers/layernorm.py",
        "srt/layers/rotary_embedding/base.py",
        "kernels/ops/mamba/causal_conv1d_triton.py",
        "kernels/jit/include/sgl_kernel/utils.cuh",
    ):
        path = installed / name
        text = path.read_text()
        said = "// said" if name.endswith(".cuh") else "EDITED = 1"
        path.unlink()
        path.write_text(f"{text}\n{said}\n")
        (reason,) = compat.file_reasons(VERSION)
        assert reason.found.endswith(f"that are edited: {name}")
        assert "--force-reinstall" in reason.fix
        assert attestation.files_fingerprint() != before
        path.write_text(text)
        assert compat.file_reasons(VERSION) == []
    path.write_text(text)
    (installed / "srt/layers/layernorm.py").unlink()
    (reason,) = compat.file_reasons(VERSION)
    assert reason.found.endswith("that are gone: srt/layers/layernorm.py")
    shutil.rmtree(installed / "lang")
    (reason,) = compat.file_reasons(VERSION)
    assert "more" in reason.found


def test_a_release_without_pins_of_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "root", lambda: Path("here"))
    (reason,) = compat.file_reasons("9.9.9")
    assert reason.found == "no pins of the files of SGLang 9.9.9"


def module(name: str, file: Path | None, loader: Any = None) -> ModuleType:
    made = ModuleType(name)
    made.__file__ = str(file) if file else None
    made.__loader__ = loader
    return made


def test_where_modules_came_from(package: Path) -> None:
    pins = host_files.collect(package, {})
    good = {
        "sglang": module("sglang", package / "__init__.py"),
        "sglang._version": module("sglang._version", package / "_version.py"),
        "sglang.srt": module(
            "sglang.srt", None, object.__new__(machinery.NamespaceLoader)
        ),
        "sglang.srt.models.m": module("m", package / "srt/models/m.py"),
        "sglang.srt.rust": module(
            "rust", Path("/cache/rust.so"), machinery.ExtensionFileLoader("r", "r.so")
        ),
        "another": module("another", Path("/elsewhere/another.py")),
    }
    assert host_files.loaded_from_elsewhere(pins, package, good) == {}
    (package / "srt/models/n.py").write_text("")
    bad = {
        "sglang.srt.models.m": module("m", Path("/shadow/m.py")),
        "sglang.srt.models.n": module("n", package / "srt/models/n.py"),
        "sglang.srt.made": module("made", None),
        "sglang.srt.models.alias": module("alias", package / "srt/models/m.py"),
    }
    found = host_files.loaded_from_elsewhere(pins, package, bad)
    assert sorted(found) == sorted(bad)
    assert found["sglang.srt.models.m"] == "/shadow/m.py"
    compiled = machinery.ExtensionFileLoader("m", "m.so")
    bad = {"sglang.srt.models.m": module("m", Path("/shadow/m.so"), compiled)}
    assert list(host_files.loaded_from_elsewhere(pins, package, bad)) == list(bad)


@pytest.mark.parametrize("waived", [False, True])
def test_a_rank_looks_at_what_it_loaded(
    monkeypatch: pytest.MonkeyPatch,
    waived: bool,
    decide: Callable[[Settings], Decision],
) -> None:
    """Before it attests; a waived host attests as unverified instead."""
    monkeypatch.setattr(host_files, "loaded_here", lambda: {"sglang.x": "/shadow/x.py"})
    monkeypatch.setattr(gate, "foreign_reasons", lambda hooks, registry, allowed: [])
    found = rank.late_reasons(decide(Settings(enable=True, allow_unpinned_host=waived)))
    assert [r.found for r in found] == [
        "host modules that came from elsewhere: sglang.x (/shadow/x.py)"
    ] * (not waived)
    monkeypatch.setattr(compat, "reasons", lambda names: [])
    monkeypatch.setattr(compat, "stack_reasons", list)
    on, facts = decide(Settings(enable=True)), {"device": "cuda:0"}
    record = attestation.record(on, facts, {})
    assert record["numerics"] == attestation.UNVERIFIED
    monkeypatch.setattr(host_files, "loaded_here", dict)
    record = attestation.record(on, facts, {})
    assert record["numerics"] == attestation.BITWISE
