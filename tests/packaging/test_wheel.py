# SPDX-License-Identifier: Apache-2.0
"""What an installation gets, and what must not be in it."""

from __future__ import annotations

import configparser
import email
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sglang_exact import __version__

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the tree; building leaves files behind."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("sglang_exact", "kernels", "patches"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index",
         "--no-build-isolation", "--wheel-dir", str(folder), str(source)],
        check=True,
    )  # fmt: skip
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def names(wheel: zipfile.ZipFile) -> set[str]:
    return set(wheel.namelist())


def metadata_file(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = [n for n in names(wheel) if n.endswith(f".dist-info/{name}")]
    return wheel.read(path).decode()


def test_wheel_is_pure_and_named(wheel: zipfile.ZipFile) -> None:
    file = Path(str(wheel.filename)).name
    assert file == f"sglang_exact-{__version__}-py3-none-any.whl"


def test_every_module_and_data_file_is_in(wheel: zipfile.ZipFile) -> None:
    inside = names(wheel)
    for base, package in ((ROOT, "sglang_exact"), (ROOT / "kernels", "")):
        for path in (base / package).rglob("*"):
            if path.suffix in (".py", ".json", ".jsonl", ".j2", ".typed", ".patch"):
                name = str(path.relative_to(base))
                if "__pycache__" not in name and "egg-info" not in name:
                    assert name in inside
    assert "sglang_exact/py.typed" in inside
    assert any(n.startswith("sglang_exact/pins/sglang-") for n in inside)


def test_nothing_else_is_in(wheel: zipfile.ZipFile) -> None:
    """Top-level packages: ours alone. One named kernels would hide SGLang's."""
    top = {n.split("/")[0] for n in names(wheel)}
    info = {n for n in top if n.endswith(".dist-info")}
    assert top - info == {"sglang_exact", "sglang_exact_kernels"}
    assert not any(Path(n).name.startswith("test_") for n in names(wheel))


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(metadata_file(wheel, "entry_points.txt"))
    assert dict(parser["sglang.srt.plugins"]) == {
        "sglang_exact": "sglang_exact.plugin:register"
    }
    assert dict(parser["console_scripts"]) == {"sglang-exact": "sglang_exact.cli:main"}


def test_dependencies(wheel: zipfile.ZipFile) -> None:
    """Installing into a serving image must not replace its torch or SGLang."""
    found = email.message_from_string(metadata_file(wheel, "METADATA"))
    required = found.get_all("Requires-Dist") or []
    base = [r for r in required if "extra ==" not in r]
    for name in ("torch", "sglang", "triton", "numpy", "transformers"):
        assert not any(r.lower().startswith(name) for r in base), base
    pins = [r for r in required if r.startswith("sglang")]
    assert [r.replace(" ", "") for r in pins] == ['sglang==0.5.23;extra=="sglang"']
    assert found["Requires-Python"] == ">=3.11"
    assert found["License-Expression"] == "Apache-2.0"


def test_kernels_is_not_ours_from_the_checkout() -> None:
    """From the root of a checkout, `import kernels` must not find a package of ours.

    A folder without __init__.py is a namespace: any installed package wins over it.
    """
    code = (
        "import importlib.util as u; s = u.find_spec('kernels');"
        "print(s.origin if s else None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stdout.strip().startswith(str(ROOT / "kernels"))
    assert not (ROOT / "kernels" / "__init__.py").exists()
