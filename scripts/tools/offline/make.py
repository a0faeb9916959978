# SPDX-License-Identifier: Apache-2.0
"""Make a bundle: a site-packages for one GPU architecture in parts, and the wheels."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, cast

from sglang_exact.rehearsal.drafters import DRAFTERS
from tools import ROOT
from tools.offline import chosen, fatbin, unpack

ARCHS = (90, 120)
# One date for every file, so that the same site gives the same parts.
DATE = 1_700_000_000
SETUPTOOLS = 77
LARGE = 300_000
"""Bytes from which a shared library is worth looking into."""

# What a server of a text model imports, without touching a GPU. (The workers of
# EAGLE and NGRAM load sgl_kernel, which needs a driver.)
IMPORTS = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.qwen3_5",
    "sglang.srt.layers.attention.triton_backend",
    *(one.worker for one in DRAFTERS.values() if one.worker),
    "deep_gemm",
    "flashinfer",
    "sglang_exact.launch_server",
    "sglang_exact_kernels.gdn_commit",
    "sglang_exact_kernels.gdn_verify",
)


class PartWriter(io.RawIOBase):
    """Writes a stream into files of at most `size` bytes, hashing each."""

    def __init__(self, folder: Path, size: int) -> None:
        super().__init__()
        self.folder, self.size = folder, size
        self.parts: list[dict[str, Any]] = []
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self._room = 0

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:
        """Append `data`, beginning new parts where one is full."""
        view = memoryview(data)
        while view:
            if self._room == 0:
                self._begin()
            piece, view = view[: self._room], view[self._room :]
            if self._file is None:
                raise RuntimeError("found no open part, expected one; fix: report it")
            self._file.write(piece)
            self._hash.update(piece)
            self._room -= len(piece)
            self.parts[-1]["bytes"] += len(piece)
        return len(data)

    def _begin(self) -> None:
        self._end()
        name = f"part.{len(self.parts):03d}"
        self._file = (self.folder / name).open("wb")
        self.parts.append({"name": name, "bytes": 0, "sha256": ""})
        self._hash, self._room = hashlib.sha256(), self.size

    def _end(self) -> None:
        if self._file is not None:
            self._file.close()
            self.parts[-1]["sha256"] = self._hash.hexdigest()

    def close(self) -> None:
        """Finish the last part."""
        self._end()
        self._file = None
        super().close()


def say(text: str) -> None:
    """One line of progress."""
    sys.stderr.write(f"bundle: {text}\n")
    sys.stderr.flush()


def python_of(site: Path) -> str:
    """Version of the Python a site-packages belongs to, from its path: 3.12."""
    match = re.search(r"python(\d+\.\d+)", str(site))
    if match is None:
        raise chosen.Refused(
            f"  - found {site}; expected .../pythonX.Y/site-packages; fix: --site"
        )
    return match.group(1)


def stripped(path: Path) -> bytes:
    """A shared library without the symbols nothing links to; as it is without strip."""
    if shutil.which("strip") is None:
        return path.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / path.name
        command = ["strip", "--strip-unneeded", "-o", str(out), str(path)]
        done = subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
        return (out if done.returncode == 0 else path).read_bytes()


def content(site: Path, name: str, arch: int) -> bytes:
    """A file of `site` as it goes into the bundle."""
    path = site / name
    if ".so" not in path.name or path.stat().st_size < LARGE:
        return path.read_bytes()
    with path.open("rb") as file:
        if file.read(4) != fatbin.ELF_MAGIC:
            return path.read_bytes()
    # NVIDIA's libraries choose among their kernels by themselves: nobody has tried
    # one with holes. Libraries in *.libs carry names that a tool has rewritten.
    if name.startswith("nvidia/"):
        return path.read_bytes()
    data = bytearray(path.read_bytes() if ".libs/" in name else stripped(path))
    fatbin.keep_one_arch(data, arch)
    return bytes(data)


def compressed(
    write: Callable[[BinaryIO], None], parts: PartWriter, level: int
) -> None:
    """Call `write` with a stream whose xz-compressed bytes become the parts.

    xz on all cores where it is installed, else Python's own on one.
    """
    if shutil.which("xz") is None:
        with lzma.open(cast(BinaryIO, parts), "wb", preset=level) as packed:
            write(cast(BinaryIO, packed))
        return
    command = ["xz", "-T0", f"-{level}", "--block-size=16MiB", "-c"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("found no pipe to xz, expected one; fix: report it")
    pump = threading.Thread(
        target=shutil.copyfileobj, args=(process.stdout, parts, 2**20)
    )
    pump.start()
    try:
        with process.stdin as stream:
            write(cast(BinaryIO, stream))
    finally:
        pump.join()
        status = process.wait()
    if status:
        raise RuntimeError(f"found xz ended with status {status}, expected 0")


def write_tar(
    stream: BinaryIO, site: Path, paths: Iterable[str], arch: int
) -> tuple[int, int]:
    """Write the files as a tar archive; (files, bytes)."""
    count = size = shown = 0
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for name in paths:
            data = content(site, name, arch)
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), DATE
            info.mode = 0o755 if os.access(site / name, os.X_OK) else 0o644
            archive.addfile(info, io.BytesIO(data))
            count, size = count + 1, size + len(data)
            if size - shown >= unpack.PROGRESS_BYTES:
                shown = size
                say(f"{size >> 20} MiB of files, at {name}")
    return count, size


def own_wheel(folder: Path) -> Path:
    """Build this package's wheel from the checkout with pip.

    With the setuptools that is here, or the index's if it is too old. Raises Refused.
    """
    say("building the wheel of this package")
    source = folder / "source"
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("sglang_exact", "kernels", "patches"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    if setuptools_major() >= SETUPTOOLS:
        command += ["--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(source)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    built = list(folder.glob("sglang_exact-*.whl"))
    if done.returncode or not built:
        raise chosen.Refused(
            f"  - found no wheel after pip wheel (status {done.returncode}); expected "
            f"one; fix: build it elsewhere and give --wheel\n{done.stdout[-2000:]}"
        )
    return built[0]


def setuptools_major() -> int:
    """Major version of the installed setuptools; 0 without."""
    try:
        return int(metadata.version("setuptools").partition(".")[0])
    except metadata.PackageNotFoundError:
        return 0


def bundle(args: argparse.Namespace) -> dict[str, Any]:
    """Make the bundle; returns its manifest. Raises chosen.Refused with reasons."""
    site = args.site.resolve()
    python = python_of(site)
    taken = chosen.choose(site, args.keep, cuda_libraries=args.cuda_libraries)
    out = args.out
    if out.exists() and any(out.iterdir()):
        raise chosen.Refused(f"  - found {out} not empty; expected a new folder")
    with tempfile.TemporaryDirectory() as folder:
        wheels = args.wheel or [own_wheel(Path(folder))]
        (out / "wheels").mkdir(parents=True, exist_ok=True)
        for path in wheels:
            shutil.copy(path, out / "wheels" / path.name)
    say(f"{len(taken.paths)} files of {site} for sm_{args.arch}")
    totals = (0, 0)

    def write(stream: BinaryIO) -> None:
        nonlocal totals
        totals = write_tar(stream, site, taken.paths, args.arch)

    parts = PartWriter(out, int(args.part_mb * 1_000_000))
    with parts:
        compressed(write, parts, args.level)
    shutil.copy(unpack.__file__, out / "unpack.py")
    manifest = {
        "format": unpack.FORMAT,
        "arch": args.arch,
        "python": python,
        "machine": platform.machine(),
        "files": totals[0],
        "unpacked_bytes": totals[1],
        "cuda_libraries": args.cuda_libraries,
        "imports": list(IMPORTS if args.imports is None else args.imports),
        "parts": parts.parts,
        "wheels": [
            {
                "name": f"wheels/{path.name}",
                "bytes": path.stat().st_size,
                "sha256": unpack.sha256(path),
            }
            for path in sorted((out / "wheels").iterdir())
        ],
        "packages": dict(sorted(taken.packages.items())),
    }
    text = json.dumps(manifest, indent=1) + "\n"
    (out / unpack.MANIFEST).write_text(text)
    return manifest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of making."""
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument(
        "--arch", type=int, choices=ARCHS, required=True,
        help="90: H100, H200; 120: RTX PRO 6000, RTX 5090",
    )  # fmt: skip
    parser.add_argument(
        "--site", type=Path, default=Path(sysconfig.get_path("purelib")),
        help="site-packages with the pinned SGLang (default: this Python's)",
    )  # fmt: skip
    parser.add_argument("--part-mb", type=float, default=1900.0, help="size of a part")
    parser.add_argument("--level", type=int, default=3, choices=range(10), help="of xz")
    parser.add_argument(
        "--wheel", type=Path, action="append",
        help="install this wheel there, instead of one built from the checkout",
    )  # fmt: skip
    parser.add_argument(
        "--keep", nargs="*", default=[], metavar="NAME", help="left-out packages to add"
    )
    parser.add_argument(
        "--no-cuda-libraries", dest="cuda_libraries", action="store_false",
        help="the other host has CUDA 13 and cuDNN on its library path",
    )  # fmt: skip
    parser.add_argument("--imports", nargs="*", help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    """Make a bundle as the command line says."""
    try:
        manifest = bundle(args)
    except chosen.Refused as refusal:
        sys.stderr.write(f"no bundle can be made of this:\n{refusal}\n")
        return 2
    packed = sum(part["bytes"] for part in manifest["parts"])
    print(f"{len(manifest['parts'])} parts, {packed / 1e6:.1f} MB packed")
    print(f"{manifest['unpacked_bytes'] / 1e6:.1f} MB unpacked, in {args.out}")
    print(f"manifest sha256 {unpack.sha256(args.out / unpack.MANIFEST)}")
    print(f"there: python{manifest['python']} unpack.py --into /opt/sglang-exact")
    return 0
