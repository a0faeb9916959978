# SPDX-License-Identifier: Apache-2.0
"""`sglang-exact doctor`: what is installed, does it match the pins, what to do.

Reads metadata and source files, imports neither torch nor SGLang itself, and runs
without a GPU. Whether the host imports is tried in a process of its own. Exit status 0
when nothing fails, 1 otherwise; a warning does not fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from sglang_exact import __version__, plugins, scope, settings
from sglang_exact.client import machine
from sglang_exact.host import compat, headers
from sglang_exact.host import source as host
from sglang_exact.reasons import Reason

OK, WARN, FAIL = "ok", "warn", "FAIL"
PACKAGES_OF_THE_HOST = ("kernels", "sglang")


class Check(NamedTuple):
    """One line of the report; `fix` is empty where nothing is to be done."""

    status: str
    name: str
    found: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"[{self.status:<4}] {self.name}: {self.found}"
        return f"{line}\n       fix: {self.fix}" if self.fix else line


def _from_reasons(
    name: str, reasons: Iterable[Reason], status: str, otherwise: str
) -> list[Check]:
    found = [
        Check(status, name, f"found {r.found}; expected {r.expected}", r.fix)
        for r in reasons
    ]
    return found or [Check(OK, name, otherwise)]


def python_checks() -> list[Check]:
    """This package and the Python that runs it."""
    version = ".".join(map(str, sys.version_info[:3]))
    return [
        Check(OK, "sglang_exact", __version__),
        Check(OK, "python", f"{version} ({sys.executable})"),
    ]


def host_checks() -> list[Check]:
    """The installed SGLang against the pins of this release."""
    from sglang_exact import hooks

    names = hooks.pinned_names()
    reasons = compat.reasons(names)
    text = f"SGLang {host.version('sglang')}, {len(names)} pinned targets match"
    return _from_reasons("host", reasons, FAIL, text)


IMPORTS = """
import json, sys
from sglang_exact import gate, hooks
found = gate.import_reasons(hooks.ALL)
sys.stdout.write("\\n" + json.dumps([list(reason) for reason in found]))
"""


def _import_reasons(environ: Mapping[str, str]) -> list[Reason]:
    """What the host's modules say on import, in a process of its own."""
    import orjson

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORTS],
        env={**environ, "SGLANG_EXACT_ENABLE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stdout.splitlines()[-1:] if done.returncode == 0 else []
    if last:
        return [Reason(*words) for words in orjson.loads(last[0])]
    why = " ".join(done.stderr.split("\n")[-2:]).strip()
    return [
        Reason(
            f"a process that ended with status {done.returncode} while it imported "
            f"SGLang ({why})",
            "a host that imports",
            "repair what it names; see the end of python -c 'import "
            "sglang.srt.entrypoints.http_server'",
        )
    ]


def import_checks(environ: Mapping[str, str]) -> list[Check]:
    """Does the host import? Without a GPU only under the rehearsal's mends."""
    if host.root() is None:
        return []
    reasons = _import_reasons(environ)
    if reasons and not machine.gpus():
        from sglang_exact.rehearsal.environment import environment

        if not _import_reasons(environment(environ)):
            text = f"under the rehearsal alone, without a GPU; else {reasons[0].found}"
            return [Check(WARN, "import of the host", text, reasons[0].fix)]
    text = "every module that a hook changes imports"
    return _from_reasons("import of the host", reasons, FAIL, text)


def stack_checks(environ: Mapping[str, str]) -> list[Check]:
    """torch, and the packages whose code produces the bits.

    Others than the pinned ones are refused where they would serve, and only there.
    """
    torch = host.version("torch")
    if torch is None:
        return [Check(FAIL, "torch", "not installed", compat.FIX)]
    cuda = machine.torch_cuda()
    build = f"built for CUDA {cuda}" if cuda else "a build without CUDA"
    fix = "" if cuda else "install the CUDA build of torch to serve on a GPU"
    config, _ = settings.read(environ)
    served = cuda and not config.allow_unpinned_host and not config.rehearsal
    return [
        Check(OK if cuda else WARN, "torch", f"{torch}, {build}", fix),
        *_from_reasons(
            "stack",
            compat.stack_reasons(),
            FAIL if served else WARN,
            ", ".join(f"{k} {v}" for k, v in host.stack_versions().items() if v),
        ),
    ]


def gpu_checks() -> list[Check]:
    """GPUs as nvidia-smi reports them, and the compiler for DeepGEMM's kernels."""
    gpus = machine.gpus()
    if not gpus:
        return [
            Check(
                WARN,
                "gpu",
                "none (nvidia-smi is missing or lists no GPU)",
                "serve on "
                + " or ".join(scope.GPU_ARCHS.values())
                + "; without a GPU only the rehearsal runs",
            )
        ]
    found = []
    for gpu in gpus:
        text = f"{gpu.name}, {gpu.memory}, driver {gpu.driver}"
        reasons = scope.gpu_reasons(gpu.capability)
        found += _from_reasons("gpu", reasons, FAIL, text)
    nvcc = machine.nvcc()
    if nvcc is None:
        fix = "install the CUDA toolkit, or set CUDA_HOME to it"
        found.append(Check(WARN, "nvcc", "not found; DeepGEMM compiles with it", fix))
    else:
        found.append(Check(OK, "nvcc", nvcc))
    return found


def loading_checks(environ: Mapping[str, str]) -> list[Check]:
    """Would the host's plugin loader load the overlay, in this environment?"""
    from sglang_exact import hooks, launch_server

    entry = launch_server.entry_point_reasons(environ)
    config, unknown = settings.read(environ)
    unknown += hooks.name_reasons(config)
    checks = [
        *_from_reasons("plugin", entry, FAIL, f"{plugins.VALUE} is registered"),
        *_from_reasons("settings", unknown, FAIL, "every SGLANG_EXACT_* name is known"),
        *_from_reasons(
            "environment",
            scope.environment_reasons(environ),
            FAIL,
            "no variable that moves bits",
        ),
        *_from_reasons(
            "plugins",
            plugins.reasons(environ, config.allow_plugins),
            FAIL,
            "no other plugin, or each is allowed by name",
        ),
    ]
    tests = config.test_settings()
    if tests:
        fix = "unset SGLANG_EXACT_TEST_* to serve"
        text = ", ".join(f"{k}={v}" for k, v in tests.items())
        checks.append(Check(WARN, "test settings", text, fix))
    return checks


def shadow_checks(folder: Path) -> list[Check]:
    """A package in the working directory that `python -m` would import instead."""
    found = []
    for name in PACKAGES_OF_THE_HOST:
        for path in (folder / name / "__init__.py", folder / f"{name}.py"):
            if path.is_file():
                fix = "change to another directory, or rename it"
                text = f"{path} hides the installed package {name}"
                found.append(Check(FAIL, "working directory", text, fix))
    return found or [Check(OK, "working directory", "hides no package of the host")]


def patch_checks() -> list[Check]:
    """DeepGEMM's headers: can sm120 kernels be compiled from them as they are?"""
    install = headers.find_install()
    if install is None:
        return []
    entries = headers.load_manifest()
    text = f"{headers.DIST} {install.version} has the fence"
    return _from_reasons("headers", headers.reasons(install, entries), FAIL, text)


def checks(environ: Mapping[str, str], folder: Path, gpu: bool = True) -> list[Check]:
    """Every check; `gpu` False leaves the GPU out (for an image's build)."""
    return [
        *python_checks(),
        *host_checks(),
        *stack_checks(environ),
        *(gpu_checks() if gpu else ()),
        # An image is built without the driver that some modules want.
        *(import_checks(environ) if gpu else ()),
        *patch_checks(),
        *loading_checks(environ),
        *shadow_checks(folder),
    ]


def _summary(found: list[Check]) -> str:
    failed = sum(check.status == FAIL for check in found)
    if failed:
        return f"{failed} of {len(found)} checks failed; fix them in this order."
    if any(check.name == "gpu" and check.status == WARN for check in found):
        return "Nothing fails. This machine can rehearse, and needs a GPU to serve."
    return "Nothing fails. Start with: python -m sglang_exact.launch_server ..."


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = (
        False
    ),
    no_gpu: Annotated[bool, typer.Option("--no-gpu", help="Leave the GPU out.")] = (
        False
    ),
) -> None:
    """Say what is installed, whether it matches the pins, and what to do."""
    import orjson

    found = checks(os.environ, Path.cwd(), gpu=not no_gpu)
    failed = any(check.status == FAIL for check in found)
    if as_json:
        record = {"ok": not failed, "checks": [check._asdict() for check in found]}
        text = orjson.dumps(record, option=orjson.OPT_INDENT_2).decode()
    else:
        text = "\n".join([*map(str, found), "", _summary(found)])
    typer.echo(text)
    raise typer.Exit(1 if failed else 0)
