# SPDX-License-Identifier: Apache-2.0
"""Install a bundle on a host without a network.

    python3.12 unpack.py --into /opt/sglang-exact

Run from the bundle's folder, or give it with --bundle. Checks this Python, this
machine, its GPU, the room on the disk and the hash of every file; then makes a virtual
environment at --into, fills it, installs the wheels, imports the server and runs
`sglang-exact doctor`. Needs nothing but Python's standard library.

Exit codes: 0 ready, 1 doctor or an import fails, 2 refused, with every reason.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import platform
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FORMAT = 1
MANIFEST = "manifest.json"
PROGRESS_BYTES = 256 * 2**20
# What a bad archive, a full disk or pip may raise after the hashes were right.
FAILURES = (
    subprocess.CalledProcessError,
    OSError,
    EOFError,
    lzma.LZMAError,
    tarfile.TarError,
)


class Refused(Exception):
    """The bundle or this host is not what the other was made for."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("\n".join(f"  - {reason}" for reason in reasons))
        self.reasons = list(reasons)


def say(text: str) -> None:
    """One line of progress."""
    sys.stderr.write(f"unpack: {text}\n")
    sys.stderr.flush()


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Parts(io.RawIOBase):
    """The parts one after the other, as one stream."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__()
        self._left = list(paths)
        self._file: io.BufferedReader | None = None

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the current part; 0 after the last one."""
        while True:
            if self._file is None:
                if not self._left:
                    return 0
                self._file = self._left.pop(0).open("rb")
            count = self._file.readinto(buffer)
            if count:
                return count
            self._file.close()
            self._file = None


def load(bundle: Path, expected: str | None = None) -> dict[str, Any]:
    """The manifest. Raises Refused if it is missing, of another format or hash."""
    path = bundle / MANIFEST
    if not path.is_file():
        raise Refused([f"found no {path}; expected a bundle; fix: give --bundle"])
    found = sha256(path)
    if expected is not None and found != expected:
        raise Refused(
            [
                f"found a manifest with sha256 {found}; expected {expected}; "
                "fix: copy the bundle again from where it was made"
            ]
        )
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if manifest.get("format") != FORMAT:
        raise Refused(
            [
                f"found bundle format {manifest.get('format')}; expected {FORMAT}; "
                "fix: use the unpack.py of the bundle"
            ]
        )
    return manifest


def gpu_archs() -> list[int]:
    """Architectures of the GPUs nvidia-smi lists, 90 for compute capability 9.0."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return []
    lines = done.stdout.split() if done.returncode == 0 else []
    return [int(x.replace(".", "")) for x in lines if x.replace(".", "").isdecimal()]


def host_reasons(manifest: dict[str, Any], into: Path, gpu: bool) -> list[str]:
    """Why this host cannot take the bundle."""
    reasons = []
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if python != manifest["python"]:
        reasons.append(
            f"found Python {python}; expected {manifest['python']}, for which the "
            f"bundle was made; fix: run this with python{manifest['python']}"
        )
    if platform.machine() != manifest["machine"]:
        reasons.append(
            f"found a {platform.machine()} machine; expected {manifest['machine']}; "
            "fix: make a bundle on a machine of this kind"
        )
    archs = gpu_archs() if gpu else []
    if gpu and manifest["arch"] not in archs:
        shown = ", ".join(f"sm_{arch}" for arch in archs) or "none (by nvidia-smi)"
        reasons.append(
            f"found GPUs {shown}; expected sm_{manifest['arch']}; fix: make a bundle "
            "with --arch of this GPU, or --no-gpu to unpack without looking"
        )
    if into.exists():
        reasons.append(
            f"found {into}; expected a folder that does not exist yet; fix: remove it "
            "or choose another"
        )
    parent = next(p for p in into.absolute().parents if p.exists())
    free, size = shutil.disk_usage(parent).free, manifest["unpacked_bytes"]
    if free < size:
        reasons.append(
            f"found {free >> 20} MiB free in {parent}; expected {size >> 20} MiB; "
            "fix: choose a folder on another disk"
        )
    return reasons


def file_reasons(manifest: dict[str, Any], bundle: Path) -> list[str]:
    """Parts and wheels that are missing, cut short or changed."""
    reasons = []
    for item in manifest["parts"] + manifest["wheels"]:
        path = bundle / item["name"]
        if not path.is_file():
            found = "no file"
        elif path.stat().st_size != item["bytes"]:
            found = f"{path.stat().st_size} bytes"
        elif sha256(path) != item["sha256"]:
            found = "other content"
        else:
            continue
        reasons.append(
            f"found {found} at {path}; expected {item['bytes']} bytes with sha256 "
            f"{item['sha256'][:16]}...; fix: copy it again"
        )
    return reasons


def extract(manifest: dict[str, Any], bundle: Path, site: Path) -> None:
    """Write the runtime's files into `site`. Raises Refused if some are missing."""
    stream = io.BufferedReader(Parts([bundle / p["name"] for p in manifest["parts"]]))
    count = written = shown = 0
    with (
        lzma.open(stream) as packed,
        tarfile.open(fileobj=packed, mode="r|") as archive,
    ):
        for member in archive:
            archive.extract(member, site, filter="data")
            count, written = count + 1, written + member.size
            if written - shown >= PROGRESS_BYTES:
                shown = written
                say(f"{written >> 20} of {manifest['unpacked_bytes'] >> 20} MiB")
    if count != manifest["files"]:
        raise Refused([f"found {count} files; expected {manifest['files']}"])


def install(manifest: dict[str, Any], bundle: Path, into: Path) -> None:
    """Make the environment at `into`. Raises CalledProcessError when pip fails."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(into)
    site = into / "lib" / f"python{manifest['python']}" / "site-packages"
    say(f"{len(manifest['parts'])} parts into {site}")
    extract(manifest, bundle, site)
    wheels = [str((bundle / item["name"]).resolve()) for item in manifest["wheels"]]
    say(f"{len(wheels)} wheels")
    command = [str(into / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    command += ["--no-index", "--no-deps", "--no-cache-dir"]
    subprocess.run([*command, "--disable-pip-version-check", *wheels], check=True)


def check(manifest: dict[str, Any], into: Path, gpu: bool) -> int:
    """Import what a server imports, then run doctor; 0 if both are fine, else 1."""
    say(f"importing {len(manifest['imports'])} modules of the server")
    code = "".join(f"import {name}\n" for name in manifest["imports"])
    imported = subprocess.run(
        [str(into / "bin" / "python"), "-W", "ignore", "-c", code],
        cwd=into,
        check=False,
    )
    command = [str(into / "bin" / "sglang-exact"), "doctor"]
    doctor = subprocess.run(
        [*command, *([] if gpu else ["--no-gpu"])], cwd=into, check=False
    )
    if imported.returncode or doctor.returncode:
        say(f"not ready: imports {imported.returncode}, doctor {doctor.returncode}")
        return 1
    say(f"ready: {into}/bin/python -m sglang_exact.launch_server --help")
    return 0


def run(bundle: Path, into: Path, *, gpu: bool, manifest_sha256: str | None) -> int:
    """All of it. Raises Refused before anything is written, or when files are bad."""
    manifest = load(bundle, manifest_sha256)
    reasons = host_reasons(manifest, into, gpu)
    say("checking the hashes")
    reasons += file_reasons(manifest, bundle)
    if reasons:
        raise Refused(reasons)
    try:
        install(manifest, bundle, into)
    except BaseException:
        # A half-filled environment must not look like one.
        shutil.rmtree(into, ignore_errors=True)
        raise
    return check(manifest, into, gpu)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of unpacking."""
    parser.add_argument("--into", type=Path, required=True, help="a new folder")
    parser.add_argument("--bundle", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--no-gpu", action="store_true", help="do not look at the GPU")
    parser.add_argument(
        "--manifest-sha256", help="what `make` printed, if the copy is not trusted"
    )


def main(args: argparse.Namespace) -> int:
    """Unpack as the command line says."""
    try:
        return run(
            args.bundle.resolve(),
            args.into.absolute(),
            gpu=not args.no_gpu,
            manifest_sha256=args.manifest_sha256,
        )
    except Refused as refusal:
        sys.stderr.write(f"this bundle cannot be unpacked here:\n{refusal}\n")
    except FAILURES as error:
        sys.stderr.write(f"unpacking failed, nothing was left behind: {error}\n")
    return 2


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))
