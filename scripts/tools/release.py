# SPDX-License-Identifier: Apache-2.0
"""Build the sdist and the wheel of a release, and check what is in them.

    scripts/release_check [--out dist] [--install]

Checks: one version everywhere, the wheel of the tree is that of the sdist, every file
that is needed is in and nothing else. --install also installs the wheel, with what it
needs from the index, into a new environment without the host, and runs the commands.

Exit codes: 0 ready to publish, 1 not, with every reason.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Collection
from pathlib import Path

from sglang_exact.host import VERSION as HOST
from tools import ROOT

SOURCES = ("sglang_exact", "kernels", "patches")
FILES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in")
OPTIONAL = ("SECURITY.md",)
PACKAGES = {"sglang_exact", "sglang_exact_kernels"}
# Suffixes of files that a module reads at run time.
DATA = (".py", ".json", ".jsonl", ".j2", ".typed", ".patch")
NEEDED = (
    "sglang_exact/py.typed",
    "sglang_exact/_patches/manifest.json",
    "sglang_exact/_patches/deep_gemm/0001-sm120-bf16-fence.patch",
    f"sglang_exact/host/pins/sglang-{HOST}.json",
    "sglang_exact/verify/prompts.jsonl",
    "sglang_exact/verify/report.html.j2",
    "sglang_exact/bench/report/report.html.j2",
    "sglang_exact/bench/report/report.md.j2",
    "sglang_exact/rehearsal/site/sitecustomize.py",
    "sglang_exact_kernels/gdn_commit.py",
    "sglang_exact_kernels/gdn_verify.py",
)
BACKEND = (
    "import sys; from setuptools import build_meta as b;"
    "print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
)


def version(root: Path = ROOT) -> str:
    """The version, from the one place that states it."""
    text = (root / "sglang_exact" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.M)
    if match is None:
        raise ValueError(
            "found no __version__; expected it in sglang_exact/__init__.py"
        )
    return match.group(1)


def version_reasons(root: Path = ROOT) -> list[str]:
    """Where another version, or the version once more, is stated."""
    wanted, reasons = version(root), []
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", text, re.M)
    if newest is None or newest.group(1) != wanted:
        found = newest.group(1) if newest else "no version"
        reasons.append(f"found {found} at the top of CHANGELOG.md; expected {wanted}")
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    if re.search(r'^version\s*=\s*"', project, re.M) or (
        "sglang_exact.__version__" not in project
    ):
        reasons.append(
            "found a version in pyproject.toml; expected sglang_exact.__version__"
        )
    for path in sorted((root / "sglang_exact").rglob("*.py")):
        if path == root / "sglang_exact" / "__init__.py":
            continue
        if re.search(r"^__version__\s*=", path.read_text(encoding="utf-8"), re.M):
            reasons.append(f"found __version__ in {path.relative_to(root)}")
    compose = root / "docker" / "compose.yaml"
    if compose.is_file():
        tags = set(re.findall(r"sglang-exact:(\d[\w.]*)", compose.read_text()))
        if tags != {wanted}:
            reasons.append(
                f"found tags {sorted(tags)} in docker/compose.yaml; expected {wanted}"
            )
    return reasons


def wheel_reasons(names: Collection[str], tree: Collection[str]) -> list[str]:
    """What is missing from a wheel, or must not be in it.

    `tree`: the files of the packages as the wheel should hold them.
    """
    info = {n.split("/")[0] for n in names if ".dist-info/" in n}
    inside = {n for n in names if n.split("/")[0] not in info}
    reasons = [f"missing: {n}" for n in sorted({*tree, *NEEDED} - inside)]
    for name in sorted(inside):
        top = name.split("/")[0]
        if top not in PACKAGES:
            # One named kernels would hide the package that SGLang imports.
            reasons.append(f"another top-level name: {name}")
        elif Path(name).name.startswith(("test_", "conftest")) or "/tests/" in name:
            reasons.append(f"a test: {name}")
        elif "__pycache__" in name or name.endswith((".pyc", ".so")):
            reasons.append(f"a compiled file: {name}")
    for wanted in ("METADATA", "entry_points.txt", "licenses/LICENSE"):
        if not any(n.endswith(f".dist-info/{wanted}") for n in names):
            reasons.append(f"missing: .dist-info/{wanted}")
    return reasons


def sdist_reasons(names: Collection[str]) -> list[str]:
    """What is missing from an sdist (paths below its folder), or must not be in it."""
    reasons = [f"missing: {n}" for n in FILES if n not in names and n != "MANIFEST.in"]
    wanted = [n for n in NEEDED if n.startswith("sglang_exact/")]
    reasons += [f"missing: {n}" for n in wanted if n not in names]
    reasons += [
        f"must not be in: {n}"
        for n in sorted(names)
        if n.startswith(("tests/", "results/", ".")) or n == "kernels/__init__.py"
    ]
    return reasons


def tree_files(root: Path = ROOT) -> set[str]:
    """The files of the packages, as a wheel names them."""
    found = set()
    for base, package in ((root, "sglang_exact"), (root / "kernels", "")):
        for path in (base / package).rglob("*"):
            name = path.relative_to(base).as_posix()
            if path.suffix in DATA and not re.search(r"__pycache__|egg-info", name):
                found.add(name)
    return found


def copy_tree(target: Path, root: Path = ROOT) -> Path:
    """The sources of a release; building leaves files behind."""
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        shutil.copytree(root / name, target / name, ignore=skip)
    for name in (*FILES, *OPTIONAL):
        if (root / name).is_file():
            shutil.copy(root / name, target / name)
    return target


def build(kind: str, source: Path, out: Path) -> Path:
    """Build the sdist or the wheel of `source`; needs setuptools 77 or newer."""
    out.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", BACKEND, kind, str(out.resolve())],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"found no {kind} built; expected one\n{done.stderr}")
    return out / done.stdout.splitlines()[-1]


def members(path: Path) -> dict[str, str]:
    """Name and sha256 of every file of a wheel or an sdist."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            items = [(n, wheel.read(n)) for n in wheel.namelist()]
        return {n: hashlib.sha256(data).hexdigest() for n, data in items}
    found = {}
    with tarfile.open(path) as sdist:
        for member in sdist:
            file = sdist.extractfile(member)
            if file is not None:
                name = member.name.partition("/")[2]
                found[name] = hashlib.sha256(file.read()).hexdigest()
    return found


def build_reasons(out: Path, work: Path) -> list[str]:
    """Build both into `out` and look into them."""
    tree = copy_tree(work / "tree")
    wheel, sdist = build("wheel", tree, out), build("sdist", tree, out)
    inside = members(wheel)
    reasons = [f"wheel: {r}" for r in wheel_reasons(inside, tree_files())]
    reasons += [f"sdist: {r}" for r in sdist_reasons(members(sdist))]
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (folder,) = (work / "unpacked").iterdir()
    again = members(build("wheel", folder, work / "again"))
    names = sorted(inside.keys() | again.keys())
    changed = [n for n in names if inside.get(n) != again.get(n)]
    # RECORD repeats the hashes of the others.
    changed = [n for n in changed if not n.endswith("/RECORD")]
    return reasons + [f"another file in the wheel of the sdist: {n}" for n in changed]


def install_reasons(wheel: Path, work: Path) -> list[str]:
    """Install the wheel without the host, with what it needs, and run its commands."""
    folder = work / "venv"
    venv.EnvBuilder(with_pip=True).create(folder)
    bin_ = folder / "bin"
    pip = [str(bin_ / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--disable-pip-version-check", str(wheel)], check=True)
    # doctor finds no host: that is its status 1, and it must say so.
    commands = (("--help", 0), ("verify --help", 0), ("env", 0), ("doctor", 1))
    reasons = []
    for text, status in commands:
        done = subprocess.run(
            [str(bin_ / "sglang-exact"), *text.split()],
            cwd=work,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != status or "Traceback" in done.stderr:
            reasons.append(
                f"sglang-exact {text}: found status {done.returncode}; expected "
                f"{status}\n{done.stderr[-2000:]}"
            )
    hidden = subprocess.run(
        [str(bin_ / "python"), "-c", "import kernels"], cwd=work, capture_output=True
    )
    if hidden.returncode == 0:
        reasons.append("found a package kernels; expected none of ours")
    return reasons


def main() -> int:
    """Check a release."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--install", action="store_true", help="needs an index")
    args = parser.parse_args()
    reasons = version_reasons()
    args.out.mkdir(parents=True, exist_ok=True)
    for path in args.out.glob("sglang_exact-*"):
        path.unlink()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tree").mkdir()
        reasons += build_reasons(args.out, Path(folder))
        if args.install:
            (wheel,) = args.out.glob("*.whl")
            reasons += install_reasons(wheel, Path(folder))
    for path in sorted(args.out.glob("sglang_exact-*")):
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")
    if reasons:
        print("not ready:\n" + "\n".join(f"  - {r}" for r in reasons), file=sys.stderr)
        return 1
    print(f"{version()}: ready")
    return 0
