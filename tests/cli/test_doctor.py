# SPDX-License-Identifier: Apache-2.0
"""doctor and env: right without a GPU, without torch and without the host."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from sglang_exact import launch_server
from sglang_exact.cli import doctor, env
from sglang_exact.client import machine
from sglang_exact.host import VERSION, compat
from sglang_exact.host import source as host
from sglang_exact.reasons import Refused
from sglang_exact.rehearsal.environment import environment

ROOT = Path(__file__).resolve().parents[2]
OWN = ("check", "allow_unpinned_host", "allow_plugin")
# Hides the host's stack from a process, as on a machine that lacks it.
BARE = """
import importlib.abc, importlib.metadata, sys

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("torch", "sglang", "triton", "numpy"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Hide())
version = importlib.metadata.version

def hidden(name):
    if name in ("torch", "sglang", "triton", "numpy"):
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

importlib.metadata.version = hidden
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name in ("torch", "sglang") else find_spec(name, package)
)
"""


def sglang_exact(
    *arguments: str, before: str = "", cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    base.pop("TRITON_INTERPRET", None)
    code = f"{before}\nfrom sglang_exact.cli import main; main()"
    paths = [str(ROOT), str(ROOT / "kernels")]
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**base, "PYTHONPATH": os.pathsep.join(paths), **variables},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def test_without_torch_and_host() -> None:
    done = sglang_exact("doctor", before=BARE)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "[FAIL] host: found no SGLang installed" in done.stdout
    assert "[FAIL] torch: not installed" in done.stdout
    assert done.stdout.count(f"fix: pip install 'sglang=={VERSION}'") == 2


def test_rehearsal_outside_its_environment(tmp_path: Path) -> None:
    code = (
        "sys.argv = ['launch_server']; import runpy; runpy.run_module("
        "'sglang_exact.rehearsal.launch_server', run_name='__main__')"
    )
    paths = [str(ROOT), str(ROOT / "kernels")]
    done = subprocess.run(
        [sys.executable, "-c", f"{BARE}\n{code}"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "TMPDIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("found no torch; expected the environment")


def test_launcher_names_its_own_flags() -> None:
    """SGLang's help cannot say them."""
    named = re.findall(r"--exact-[a-z-]+(?: [A-Z]+)?", launch_server.HELP)
    accepted = [word for flag in named for word in flag.split()]
    ours, rest = launch_server.split_flags(accepted)
    assert rest == [] and all(vars(ours)[f"exact_{x}"] for x in OWN)
    assert len(named) == len(OWN) == len(vars(ours)) - 1
    with pytest.raises(Refused, match="unknown flag --exact-chek"):
        launch_server.split_flags(["--exact-chek"])


def test_env_without_torch_and_host() -> None:
    done = sglang_exact("env", "--json", before=BARE, SGLANG_API_KEY="hidden-value")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["packages"]["sglang"] is None
    assert "hidden-value" not in done.stdout


@pytest.mark.host
def test_what_fails_and_what_to_do() -> None:
    done = sglang_exact(
        "doctor",
        "--json",
        "--no-gpu",
        SGLANG_EXACT_ENABEL="1",
        SGLANG_PLUGINS="another",
        FLA_USE_FAST_OPS="1",
    )
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert found["ok"] is False
    failed = [c for c in found["checks"] if c["status"] == "FAIL"]
    assert [c["name"] for c in failed] == ["plugin", "settings", "environment"]
    assert all(c["fix"] for c in failed)
    assert "gpu" not in [c["name"] for c in found["checks"]]


@pytest.mark.host
def test_the_pinned_host_passes(tmp_path: Path) -> None:
    done = sglang_exact("doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "[FAIL]" not in done.stdout
    assert f"[ok  ] host: SGLang {VERSION}" in done.stdout


@pytest.mark.host
def test_host_that_does_not_import(tmp_path: Path) -> None:
    """A broken dependency: one line with its error; the launcher says the same."""
    stub = tmp_path / "zmq"
    stub.mkdir()
    (stub / "__init__.py").write_text("raise ImportError('broken on purpose')\n")
    env = environment({**os.environ, "PYTHONPATH": str(tmp_path)})
    code = "from sglang_exact.cli import main; main()"
    for command, status in (
        (["-c", code, "doctor"], 1),
        (["-m", "sglang_exact.launch_server", "--exact-check", "--model-path", "m"], 3),
        (["-m", "sglang_exact.launch_server", "--help"], 0),
    ):
        done = warm.run(command, env=env, cwd=tmp_path)
        shown = done.stdout + done.stderr
        assert done.returncode == status, shown
        assert shown.count("ImportError: broken on purpose") == 1, shown
        assert "Traceback" not in shown
        assert "pip install 'sglang" not in shown
        if "--help" in command:
            assert done.stdout.startswith(launch_server.HELP)


@pytest.mark.host
def test_launcher_without_a_gpu() -> None:
    """No GPU and no rehearsal: what is missing, in a line each; help all the same."""
    paths = [str(ROOT), str(ROOT / "kernels")]
    base = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    base.pop("TRITON_INTERPRET", None)
    env = {**base, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    module = ("-W", "ignore", "-m", "sglang_exact.launch_server")
    done = {
        flag: subprocess.run(
            [sys.executable, *module, flag, "--model-path", "m"],
            env=env,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        for flag in ("--exact-check", "--help")
    }
    refused = done["--exact-check"].stderr
    assert done["--exact-check"].returncode == 3
    assert "Traceback" not in refused
    assert refused.count("  - found no CUDA GPU") == 1, refused
    assert "the host did not apply it" not in refused
    assert done["--help"].returncode == 0, done["--help"].stderr
    assert "--tensor-parallel-size" in done["--help"].stdout
    assert "Traceback" not in done["--help"].stderr


def test_changed_host_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pins decide, not the version number."""
    pins = compat.load(VERSION)
    assert pins is not None
    name = sorted(pins.targets)[0]
    changed = host.Fingerprint(pins.targets[name].params, "0" * 64)
    monkeypatch.setattr(host, "version", lambda name: VERSION)
    monkeypatch.setattr(host, "root", lambda: Path("here"))
    monkeypatch.setattr(
        host, "fingerprint", lambda x: changed if x == name else pins.targets[x]
    )
    monkeypatch.setattr(compat, "file_reasons", lambda version: [])
    (check,) = doctor.host_checks()
    assert check.status == doctor.FAIL
    assert name in check.found


def test_shadowed_packages(tmp_path: Path) -> None:
    assert [c.status for c in doctor.shadow_checks(tmp_path)] == [doctor.OK]
    (tmp_path / "sglang").mkdir()
    assert [c.status for c in doctor.shadow_checks(tmp_path)] == [doctor.OK]
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "kernels.py").touch()
    found = doctor.shadow_checks(tmp_path)
    assert [c.status for c in found] == [doctor.FAIL] * 2
    assert doctor.shadow_checks(ROOT)[0].status == doctor.OK


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "NVIDIA H200, 580.1, 9.0, 143771 MiB\nNVIDIA A100, 570.2, 8.0, 81920 MiB\n"
        "[Not Found]\n"
    )
    monkeypatch.setattr(machine, "gpus", lambda: machine.parse_gpus(text))
    monkeypatch.setattr(machine, "nvcc", lambda: None)
    found = doctor.gpu_checks()
    assert [c.status for c in found] == [doctor.OK, doctor.FAIL, doctor.WARN]
    assert "sm80" in found[1].found
    monkeypatch.setattr(machine, "gpus", lambda: [])
    assert [c.status for c in doctor.gpu_checks()] == [doctor.WARN]


def test_lines() -> None:
    assert str(doctor.Check("ok", "a", "b")) == "[ok  ] a: b"
    assert str(doctor.Check("FAIL", "a", "b", "c")) == "[FAIL] a: b\n       fix: c"


def test_credentials_stay_out() -> None:
    environ = {
        "SGLANG_API_KEY": "1", "SGLANG_HF_TOKEN": "2", "SGLANG_PLUGINS": "3",
        "HOME": "4", "NCCL_DEBUG": "5", "TORCH_AUTH": "6",
    }  # fmt: skip
    assert env.variables(environ) == {"NCCL_DEBUG": "5", "SGLANG_PLUGINS": "3"}


def test_unknown_command() -> None:
    done = sglang_exact("docter")
    assert done.returncode == 2
    assert "docter" in done.stderr
