# SPDX-License-Identifier: Apache-2.0
"""Which build of torch a rehearsal takes, with pip and indexes made on the spot."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "scripts" / "rehearsal_torch.py"
TORCH = "torch==2.13.0"
RUN = f"""
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("subject", {str(PROGRAM)!r})
subject = importlib.util.module_from_spec(spec)
spec.loader.exec_module(subject)
subject.CPU_INDEX = sys.argv[1]
sys.exit(subject.main({TORCH!r}, os.environ))
"""


def wheel(folder: Path, name: str, version: str, needs: str = "") -> None:
    """A wheel that pip installs, with nothing in it but its own name."""
    module, info = f"{name}/__init__.py", f"{name}-{version}.dist-info"
    texts = {
        module: f"version = {version!r}\n",
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            + (f"Requires-Dist: {needs}\n" if needs else "")
        ),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{info}/RECORD"
    lines = [
        f"{path},sha256={_digest(text)},{len(text.encode())}"
        for path, text in texts.items()
    ]
    place = folder / name.replace("_", "-")
    place.mkdir(parents=True, exist_ok=True)
    file = place / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in {
            **texts,
            record: "\n".join([*lines, f"{record},,\n"]),
        }.items():
            archive.writestr(path, text)
    links = "".join(f'<a href="{f.name}">{f.name}</a>' for f in place.glob("*.whl"))
    (place / "index.html").write_text(f"<!DOCTYPE html><html>{links}</html>")


def _digest(text: str) -> str:
    raw = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of indexes: public (CUDA), cpu, both CPU-only kinds, and none."""
    folder = tmp_path_factory.mktemp("indexes")
    wheel(folder / "cuda", "torch", "2.13.0", "nvidia-cudnn==1.0")
    wheel(folder / "cuda", "nvidia_cudnn", "1.0")
    wheel(folder / "plain", "torch", "2.13.0")
    wheel(folder / "cpu", "torch", "2.13.0+cpu")
    wheel(folder / "older", "torch", "2.12.0+cpu")
    names = ("cuda", "plain", "cpu", "older")
    return {name: (folder / name).as_uri() for name in names} | {
        "gone": (folder / "gone").as_uri()
    }


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


def install(python: Path, own: str, cpu: str, **variables: str) -> tuple[int, str, str]:
    """Status, installed version ("" for none) and message, in an emptied place."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": own, **variables}
    for name in ("torch", "nvidia_cudnn"):
        for path in python.parents[1].glob(f"lib/*/site-packages/{name}*"):
            shutil.rmtree(path)
    ran = subprocess.run(
        [str(python), "-c", RUN, cpu], env=env, capture_output=True, text=True
    )
    look = "import torch; print(torch.version)"
    seen = subprocess.run(
        [str(python), "-c", look], env=env, capture_output=True, text=True
    )
    return ran.returncode, seen.stdout.strip(), ran.stderr


@pytest.mark.parametrize(
    ("own", "cpu", "variables", "version"),
    [
        ("plain", "gone", {}, "2.13.0"),
        ("cuda", "cpu", {}, "2.13.0+cpu"),
        ("gone", "cpu", {}, "2.13.0+cpu"),
        ("cuda", "gone", {"REHEARSAL_TORCH_INDEX": "cpu"}, "2.13.0+cpu"),
        ("plain", "gone", {"REHEARSAL_TORCH_INDEX": "cpu"}, "2.13.0+cpu"),
        ("cuda", "cpu", {"REHEARSAL_TORCH_CUDA": "1"}, "2.13.0+cpu"),
        ("cuda", "gone", {"REHEARSAL_TORCH_CUDA": "1"}, "2.13.0"),
    ],
)
def test_the_build_that_is_taken(
    python: Path,
    indexes: dict[str, str],
    own: str,
    cpu: str,
    variables: dict[str, str],
    version: str,
) -> None:
    given = {name: indexes.get(value, value) for name, value in variables.items()}
    status, found, said = install(python, indexes[own], indexes[cpu], **given)
    assert (status, found) == (0, version), said
    if "CUDA" in "".join(variables) and cpu == "gone":
        look = [str(python), "-c", "import nvidia_cudnn"]
        assert subprocess.run(look).returncode == 0, (
            "the CUDA build lacks its libraries"
        )


@pytest.mark.parametrize(
    ("own", "cpu", "variables", "words"),
    [
        ("cuda", "gone", {}, ["only a CUDA build", "REHEARSAL_TORCH_CUDA=1"]),
        (
            "cuda",
            "cuda",
            {},
            ["a CUDA build of torch==2.13.0", "REHEARSAL_TORCH_INDEX"],
        ),
        ("cuda", "older", {}, ["No matching distribution", "REHEARSAL_TORCH_INDEX"]),
        ("gone", "gone", {"REHEARSAL_TORCH_CUDA": "1"}, ["No matching distribution"]),
        # An index that is named is the only one asked.
        ("plain", "cpu", {"REHEARSAL_TORCH_INDEX": "gone"}, ["unset REHEARSAL_TORCH"]),
        (
            "cuda",
            "cpu",
            {"REHEARSAL_TORCH_INDEX": "cuda", "REHEARSAL_TORCH_CUDA": "1"},
            ["REHEARSAL_TORCH_INDEX=", "a CUDA build"],
        ),
    ],
)
def test_without_a_build_one_message_and_nothing_installed(
    python: Path,
    indexes: dict[str, str],
    own: str,
    cpu: str,
    variables: dict[str, str],
    words: list[str],
) -> None:
    given = {name: indexes.get(value, value) for name, value in variables.items()}
    status, found, said = install(python, indexes[own], indexes[cpu], **given)
    assert (status, found) == (1, "")
    assert "Traceback" not in said
    for word in words:
        assert word in said


def test_an_address_that_does_not_answer_is_said_in_seconds(
    python: Path, indexes: dict[str, str]
) -> None:
    status, _, said = install(
        python, indexes["cuda"], "http://127.0.0.1:9/", no_proxy="127.0.0.1"
    )
    assert status == 1
    assert "http://127.0.0.1:9/ cannot be used" in said


def test_an_installed_torch_is_kept(python: Path, indexes: dict[str, str]) -> None:
    install(python, indexes["plain"], indexes["gone"])
    env = {**os.environ, "PIP_INDEX_URL": indexes["gone"]}
    line = [str(python), "-c", RUN, indexes["gone"]]
    assert subprocess.run(line, env=env).returncode == 0
