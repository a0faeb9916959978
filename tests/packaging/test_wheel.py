# SPDX-License-Identifier: Apache-2.0
"""What an installation gets, and what must not be in it."""

from __future__ import annotations

import configparser
import email
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from release_build import Release

from sglang_exact import __version__
from sglang_exact.host import VERSION

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(release: Release) -> zipfile.ZipFile:
    return zipfile.ZipFile(release.wheel)


def names(wheel: zipfile.ZipFile) -> set[str]:
    return set(wheel.namelist())


def metadata_file(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = [n for n in names(wheel) if n.endswith(f".dist-info/{name}")]
    return wheel.read(path).decode()


def test_wheel_is_pure_and_named(wheel: zipfile.ZipFile) -> None:
    file = Path(str(wheel.filename)).name
    assert file == f"sglang_exact-{__version__}-py3-none-any.whl"


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
    assert [r.replace(" ", "") for r in pins] == [f'sglang=={VERSION};extra=="sglang"']
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
