# SPDX-License-Identifier: Apache-2.0
"""Bundles: what is packed is unpacked, and nothing else is ever installed.

A small site-packages of its own, which sees the installed host; the real wheel, the
real unpacking, the real doctor.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "offline_bundle"
PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"
IMPORTS = ("hostpkg", "sglang_exact.launch_server")


def distribution(site: Path, name: str, files: dict[str, str], url: str = "") -> None:
    """Install a distribution of these files into `site`."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    if url:
        (info / "direct_url.json").write_text(url)
    names = [*files, f"{info.name}/METADATA", f"{info.name}/RECORD"]
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in names))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pip, one package that is needed and one that is not; the host by a path file."""
    folder = tmp_path_factory.mktemp("site") / "lib" / PYTHON / "site-packages"
    purelib = Path(sysconfig.get_path("purelib"))
    skip = shutil.ignore_patterns("__pycache__")
    for path in (purelib / "pip", *purelib.glob("pip-*.dist-info")):
        shutil.copytree(path, folder / path.name, ignore=skip)
    distribution(folder, "hostpkg", {"hostpkg/__init__.py": "VALUE = 7\n"})
    distribution(folder, "tilelang", {"tilelang/__init__.py": "", "tl.py": ""})
    distribution(folder, "sglang_exact", {"sglang_exact/__init__.py": "OLD = 1\n"})
    (folder / "hostpkg" / "run").write_text("#!/bin/sh\n")
    (folder / "hostpkg" / "run").chmod(0o755)
    (folder / "hostpkg" / "stub.pyi").write_text("")
    (folder / "host.pth").write_text(f"{purelib}\n")
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as `make` builds it."""
    from tools.offline import make

    return make.own_wheel(tmp_path_factory.mktemp("wheel"))


def command(*words: str | Path, **variables: str) -> tuple[int, str]:
    """Run something; status and output."""
    base = {
        k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "TRITON_"))
    }
    base.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(word) for word in words],
        env={**base, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout


def make(site: Path, wheel: Path, out: Path, *more: str) -> tuple[int, str]:
    """Make a bundle of several parts."""
    words = (sys.executable, SCRIPT, "make", "--site", site, "--out", out)
    words += ("--wheel", wheel, "--arch", "90", "--part-mb", "0.5", "--level", "0")
    return command(*words, *more, "--imports", *IMPORTS)


@pytest.fixture(scope="module")
def bundle(
    tmp_path_factory: pytest.TempPathFactory, site: Path, wheel: Path
) -> tuple[Path, str]:
    """A bundle, and what making it printed."""
    out = tmp_path_factory.mktemp("bundle") / "out"
    status, text = make(site, wheel, out)
    assert status == 0, text
    return out, text


def card(folder: Path, *capabilities: str) -> dict[str, str]:
    """Variables of a machine whose nvidia-smi lists these GPUs."""
    folder.mkdir(exist_ok=True)
    smi = folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\n" + "".join(f"echo {c}\n" for c in capabilities))
    smi.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def unpack(bundle: Path, into: Path, *more: str, **variables: str) -> tuple[int, str]:
    """Run the bundle's own script."""
    words = (sys.executable, bundle / "unpack.py", "--into", into, *more)
    return command(*words, **variables)


def copied(bundle: tuple[Path, str], into: Path) -> Path:
    """A bundle that a test may spoil."""
    return Path(shutil.copytree(bundle[0], into / "bundle"))


def changed(bundle: Path, **changes: Any) -> Path:
    """The bundle with other facts in its manifest."""
    path = bundle / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return bundle


@pytest.mark.host
def test_there_and_back(bundle: tuple[Path, str], tmp_path: Path) -> None:
    out, text = bundle
    manifest = json.loads((out / "manifest.json").read_text())
    assert len(manifest["parts"]) > 2
    assert all(part["bytes"] <= 500_000 for part in manifest["parts"])
    digest = text.split("manifest sha256 ")[1].split()[0]
    into = tmp_path / "new" / "env"
    status, text = unpack(
        out, into, "--manifest-sha256", digest, **card(tmp_path / "bin", "9.0")
    )
    # The doctor of a machine with a GPU looks at more than this one has.
    assert "importing 2 modules" in text, text
    assert "[ok  ] host: SGLang" in text
    assert status == (1 if "[FAIL]" in text else 0)
    packages = into / "lib" / PYTHON / "site-packages"
    assert (packages / "hostpkg" / "__init__.py").read_text() == "VALUE = 7\n"
    assert os.access(packages / "hostpkg" / "run", os.X_OK)
    for name in ("tilelang", "tilelang-1.0.dist-info", "tl.py", "hostpkg/stub.pyi"):
        assert not (packages / name).exists(), name
    code = "import sglang_exact as s; print(s.__file__, hasattr(s, 'OLD'))"
    _, text = command(into / "bin" / "python", "-I", "-c", code)
    assert text.split() == [str(packages / "sglang_exact" / "__init__.py"), "False"]


@pytest.mark.host
def test_ready_without_a_gpu(bundle: tuple[Path, str], tmp_path: Path) -> None:
    into = tmp_path / "env"
    status, text = unpack(bundle[0], into, "--no-gpu", PATH="/usr/bin:/bin")
    assert status == 0, text
    assert "Nothing fails." in text
    assert f"ready: {into}/bin/python" in text


@pytest.mark.host
@pytest.mark.parametrize(
    ("imports", "variables", "said"),
    [
        (["hostpkg", "no_such_module"], {}, "No module named 'no_such_module'"),
        (["hostpkg"], {"FLA_USE_FAST_OPS": "1"}, "[FAIL] environment"),
    ],
)
def test_not_ready(
    bundle: tuple[Path, str],
    tmp_path: Path,
    imports: list[str],
    variables: dict[str, str],
    said: str,
) -> None:
    spoilt = changed(copied(bundle, tmp_path), imports=imports)
    status, text = unpack(spoilt, tmp_path / "env", "--no-gpu", **variables)
    assert status == 1
    assert said in text and "not ready" in text


def test_same_site_same_parts(
    bundle: tuple[Path, str], site: Path, wheel: Path, tmp_path: Path
) -> None:
    status, text = make(site, wheel, tmp_path / "again")
    assert status == 0, text
    for path in bundle[0].glob("part.*"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_bad_files_are_named_at_once(bundle: tuple[Path, str], tmp_path: Path) -> None:
    spoilt = copied(bundle, tmp_path)
    first = bytearray((spoilt / "part.000").read_bytes())
    first[1000] ^= 1
    (spoilt / "part.000").write_bytes(first)
    (spoilt / "part.001").unlink()
    second = (spoilt / "part.002").read_bytes()
    (spoilt / "part.002").write_bytes(second[:-1])
    (wheel,) = (spoilt / "wheels").iterdir()
    wheel.write_bytes(wheel.read_bytes()[:-1] + b"x")
    status, text = unpack(spoilt, tmp_path / "env", "--no-gpu")
    assert status == 2
    lines = [line for line in text.splitlines() if line.startswith("  - ")]
    assert len(lines) == 4
    assert "other content" in lines[0] and "part.000" in lines[0]
    assert "no file" in lines[1] and "part.001" in lines[1]
    assert f"{len(second) - 1} bytes" in lines[2]
    assert "other content" in lines[3] and ".whl" in lines[3]
    assert not (tmp_path / "env").exists()


def test_another_host_is_refused(bundle: tuple[Path, str], tmp_path: Path) -> None:
    """Python, machine, GPU, folder and disk, in one message."""
    spoilt = changed(
        copied(bundle, tmp_path),
        python="3.99",
        machine="s390x",
        unpacked_bytes=2**60,
    )
    into = tmp_path / "env"
    into.mkdir()
    status, text = unpack(spoilt, into, **card(tmp_path / "bin", "12.0", "8.9"))
    assert status == 2
    lines = [line for line in text.splitlines() if line.startswith("  - ")]
    assert len(lines) == 5
    assert "expected 3.99" in lines[0] and "run this with python3.99" in lines[0]
    assert "expected s390x" in lines[1]
    assert "found GPUs sm_120, sm_89; expected sm_90" in lines[2]
    assert f"found {into}" in lines[3]
    assert "MiB free" in lines[4]
    assert list(into.iterdir()) == []


def test_no_gpu_at_all_is_refused(bundle: tuple[Path, str], tmp_path: Path) -> None:
    status, text = unpack(bundle[0], tmp_path / "env", **card(tmp_path / "bin"))
    assert status == 2
    assert "found GPUs none (by nvidia-smi); expected sm_90" in text


def test_other_manifest_is_refused(bundle: tuple[Path, str], tmp_path: Path) -> None:
    out, text = bundle
    digest = text.split("manifest sha256 ")[1].split()[0]
    spoilt = changed(copied(bundle, tmp_path), imports=[])
    flags = ("--no-gpu", "--manifest-sha256", digest)
    status, text = unpack(spoilt, tmp_path / "env", *flags)
    assert status == 2 and f"expected {digest}" in text
    (spoilt / "manifest.json").unlink()
    status, text = unpack(spoilt, tmp_path / "env", "--no-gpu")
    assert status == 2 and "expected a bundle" in text
    other = changed(copied(bundle, tmp_path / "other"), format=99)
    status, text = unpack(other, tmp_path / "env", "--no-gpu")
    assert status == 2 and "found bundle format 99" in text


def repacked(bundle: Path, member: tarfile.TarInfo, data: bytes) -> Path:
    """The bundle with one other archive, its hashes right."""
    import hashlib

    for path in bundle.glob("part.*"):
        path.unlink()
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    packed = lzma.compress(raw.getvalue())
    (bundle / "part.000").write_bytes(packed)
    part = {
        "name": "part.000",
        "bytes": len(packed),
        "sha256": hashlib.sha256(packed).hexdigest(),
    }
    return changed(bundle, parts=[part])


def test_archive_cannot_write_elsewhere(
    bundle: tuple[Path, str], tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    evil = tarfile.TarInfo(f"../../../../{outside.name}")
    spoilt = changed(repacked(copied(bundle, tmp_path), evil, b"x"), files=1)
    status, text = unpack(spoilt, tmp_path / "env", "--no-gpu")
    assert status == 2
    assert "outside the destination" in text
    assert not outside.exists() and not (tmp_path / "env").exists()


def test_half_an_archive_leaves_nothing(
    bundle: tuple[Path, str], tmp_path: Path
) -> None:
    spoilt = repacked(copied(bundle, tmp_path), tarfile.TarInfo("a"), b"x")
    status, text = unpack(spoilt, tmp_path / "env", "--no-gpu")
    assert status == 2
    assert "found 1 files; expected" in text
    assert not (tmp_path / "env").exists()


def test_what_no_bundle_is_made_of(tmp_path: Path, wheel: Path) -> None:
    site = tmp_path / "lib" / PYTHON / "site-packages"
    url = '{"url": "file:///x", "dir_info": {"editable": true}}'
    distribution(site, "hostpkg", {"hostpkg.py": ""}, url)
    status, text = make(site, wheel, tmp_path / "out", "--keep", "nothing")
    assert status == 2
    assert "found --keep nothing; expected one of anthropic" in text
    assert "found hostpkg installed in editable mode" in text
    assert "found no pip" in text
    assert not (tmp_path / "out").exists()
    status, text = make(tmp_path, wheel, tmp_path / "out")
    assert status == 2 and "pythonX.Y" in text


def test_full_folder_is_left_alone(
    site: Path, wheel: Path, bundle: tuple[Path, str]
) -> None:
    before = sorted(bundle[0].iterdir())
    status, text = make(site, wheel, bundle[0])
    assert status == 2 and "not empty" in text
    assert sorted(bundle[0].iterdir()) == before


def test_no_wheel_can_be_built(site: Path, tmp_path: Path) -> None:
    """pip is missing where `make` runs: said, and nothing is left."""
    bare = tmp_path / "bare"
    command(sys.executable, "-m", "venv", "--without-pip", bare)
    words = (bare / "bin" / "python", SCRIPT, "make", "--site", site, "--arch", "90")
    status, text = command(*words, "--out", tmp_path / "out")
    assert status == 2, text
    assert "found no wheel" in text and "give --wheel" in text
    assert "No module named pip" in text
    assert not (tmp_path / "out").exists()


def test_keep(site: Path, wheel: Path, tmp_path: Path) -> None:
    status, text = make(site, wheel, tmp_path / "out", "--keep", "tilelang")
    assert status == 0, text
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert "tilelang" in manifest["packages"]
    assert "sglang-exact" not in manifest["packages"]
