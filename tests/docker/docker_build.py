# SPDX-License-Identifier: Apache-2.0
"""Run the steps of docker/Dockerfile in a folder, without Docker.

Reads the Dockerfile, carries out ARG, ENV, COPY, WORKDIR and RUN of each stage, and
maps the image's absolute folders into a temporary one. The base image is a virtual
environment that sees the host of this environment. What this cannot show: that the
base image exists, what is in it, and that a container of it starts.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from sglang_exact.host import VERSION

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
PINS = ROOT / "sglang_exact" / "host" / "pins" / f"sglang-{VERSION}.json"
# Folders of the image that are ours; everything else in a RUN line is the machine's.
OURS = re.compile(r"(?<![\w./-])/(opt|src|cache|etc)(?=/|\b)")
TIMEOUT_S = 300
# No variable of the tests reaches a base: they run kernels interpreted.
OURS_TO_SET = ("SGLANG_", "PIP_", "TRITON_")
STACK = json.loads(PINS.read_text())["stack"]


class Instruction(NamedTuple):
    """One line of a Dockerfile, continuations joined."""

    name: str
    text: str


class Failed(RuntimeError):
    """A RUN line ended with another status than 0."""


def read(path: Path = DOCKERFILE) -> list[Instruction]:
    """The instructions of a Dockerfile in order."""
    lines = [x for x in path.read_text().splitlines() if not x.strip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    found = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [Instruction(name.upper(), rest.strip()) for name, rest in found]


def runs(path: Path = DOCKERFILE) -> list[str]:
    """The RUN lines of a Dockerfile."""
    return [item.text for item in read(path) if item.name == "RUN"]


class Build:
    """One build: `arguments` are build arguments, `folder` holds every stage.

    `given` are variables that the base sets.
    """

    def __init__(
        self,
        folder: Path,
        base: Path,
        arguments: dict[str, str],
        given: dict[str, str] | None = None,
    ) -> None:
        self.folder, self.base, self.arguments = folder, base, arguments
        self.given = given or {}
        self.stages: dict[str, Path] = {}
        self.output: list[str] = []
        self.user = ""
        self.health = self.command = ""

    def run(self) -> Build:
        """Carry out the whole file. Raises Failed where a step fails."""
        for item in read():
            getattr(self, f"_{item.name.lower()}")(item.text)
        return self

    @property
    def text(self) -> str:
        """What the steps printed."""
        return "\n".join(self.output)

    def inside(self, path: str) -> Path:
        """Where a path of the image lies here."""
        return self.root / path.lstrip("/")

    def shell(self, line: str) -> str:
        """Run a shell line as a RUN of the current stage would."""
        line = OURS.sub(lambda m: f"{self.root}/{m.group(1)}", line)
        variables = {
            k: v for k, v in os.environ.items() if not k.startswith(OURS_TO_SET)
        }
        variables |= {
            "PATH": f"{self.base / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
            **self.given,
            **self.environment,
        }
        variables.pop("PYTHONPATH", None)
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=self.workdir,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        self.output.append(done.stdout)
        if done.returncode:
            raise Failed(f"status {done.returncode} of {line}\n{done.stdout}")
        return done.stdout

    def _from(self, text: str) -> None:
        name = text.partition(" AS ")[2] or "final"
        self.root = self.stages[name] = self.folder / name
        (self.root / "etc").mkdir(parents=True)
        (self.root / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\n")
        self.workdir = self.root
        self.environment: dict[str, str] = {}

    def _arg(self, text: str) -> None:
        name, _, default = text.partition("=")
        if self.stages:
            self.environment[name] = self.arguments.get(name, default)

    def _env(self, text: str) -> None:
        for word in shlex.split(text):
            name, _, value = word.partition("=")
            self.environment[name] = str(self.inside(value))

    def _workdir(self, text: str) -> None:
        self.workdir = self.inside(text)
        self.workdir.mkdir(parents=True, exist_ok=True)

    def _copy(self, text: str) -> None:
        words = shlex.split(text)
        source = ROOT
        if words[0].startswith("--from="):
            source = self.stages[words.pop(0).partition("=")[2]]
        *names, target = words
        into = self.inside(target) if target.startswith("/") else self.workdir / target
        for name in names:
            path = source / name.lstrip("/")
            if path.is_dir():
                skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
                shutil.copytree(
                    path, into, symlinks=True, ignore=skip, dirs_exist_ok=True
                )
                continue
            file = into / path.name if target.endswith("/") or names[1:] else into
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, file)

    def _run(self, text: str) -> None:
        self.shell(text)

    def _user(self, text: str) -> None:
        self.user = self.environment.get(text.strip("${}"), text)

    def _healthcheck(self, text: str) -> None:
        self.health = text

    def _cmd(self, text: str) -> None:
        self.command = text

    def _label(self, text: str) -> None:
        pass

    def _expose(self, text: str) -> None:
        pass


def site_packages(base: Path) -> Path:
    """Where packages of a virtual environment lie."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return base / "lib" / version / "site-packages"


def distribution(site: Path, name: str, version: str, *requires: str) -> Path:
    """Pretend that a distribution is installed; the folder of its metadata."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = [f"Requires-Dist: {text}\n" for text in requires]
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{''.join(lines)}"
    )
    (info / "RECORD").write_text("")
    (info / "INSTALLER").write_text("test\n")
    return info


def base_image(folder: Path, deep_gemm: Path | None = None, cuda: str = "13.0") -> Path:
    """A virtual environment with the installed host, a torch for `cuda` and an nvcc.

    `deep_gemm`: an unpacked wheel of sgl-deep-gemm of which the header is taken.
    """
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True
    )
    site = site_packages(folder)
    purelib = Path(sysconfig.get_path("purelib"))
    # pip by link: it must be there in a base without the host as well.
    for path in (purelib / "pip", *purelib.glob("pip-*.dist-info")):
        (site / path.name).symlink_to(path)
    # After the environment's own packages, as a plain path: the .pth files in there,
    # of an editable install of this package for one, stay out of it.
    (site / "host.pth").write_text(f"{purelib}\n")
    (site / "torch").mkdir()
    value = f"'{cuda}'" if cuda else "None"
    (site / "torch" / "__init__.py").write_text("")
    (site / "torch" / "version.py").write_text(f"cuda: str | None = {value}\n")
    for name in ("torch", "sglang-kernel", "flashinfer-python"):
        distribution(site, name, STACK[name])
    if deep_gemm is not None:
        header = Path("deep_gemm/include/deep_gemm/impls/sm120_bf16_gemm.cuh")
        (site / header).parent.mkdir(parents=True)
        shutil.copy(deep_gemm / header, site / header)
        (info,) = deep_gemm.glob("sgl_deep_gemm-*.dist-info")
        shutil.copytree(info, site / info.name)
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0'\n")
    nvcc.chmod(0o755)
    return folder
