# SPDX-License-Identifier: Apache-2.0
"""The environment of a rehearsal process, and the chain of sitecustomize files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sglang_exact.rehearsal import environment as subject


def _run(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True
    )


def test_base_is_copied_and_ours_comes_first() -> None:
    base = {"PYTHONPATH": "/theirs", "TRITON_INTERPRET": "0", "HOME": "/home"}
    env = subject.environment(base)
    assert base == {
        "PYTHONPATH": "/theirs",
        "TRITON_INTERPRET": "0",
        "HOME": "/home",
    }
    paths = env["PYTHONPATH"].split(os.pathsep)
    assert paths[0] == str(subject.SITE_DIRECTORY)
    assert paths[-1] == "/theirs"
    assert env["TRITON_INTERPRET"] == "1"
    assert env["HOME"] == "/home"


def test_twice_is_once() -> None:
    once = subject.environment({})
    assert subject.environment(once) == once


def test_install_runs_in_every_process(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; from sglang_exact.rehearsal import bootstrap;"
        "print(bootstrap._installed);"
        "subprocess.run([sys.executable, '-c', 'from sglang_exact.rehearsal import"
        " bootstrap; print(bootstrap._installed)'])"
    )
    ran = _run(f"import sys; sys.stdout.flush(); {code}", subject.environment())
    assert ran.stdout.split() == ["True", "True"], ran.stderr


def test_without_the_variable_nothing_is_installed() -> None:
    env = subject.environment()
    del env[subject.REHEARSAL_VARIABLE]
    ran = _run("import sys; print('sglang_exact.rehearsal' in sys.modules)", env)
    assert ran.stdout.split() == ["False"], ran.stderr


def test_a_later_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nos.environ['SEEN'] = 'yes'\n"
    )
    env = subject.environment({**os.environ, "PYTHONPATH": str(tmp_path)})
    ran = _run("import os; print(os.environ.get('SEEN'))", env)
    assert ran.stdout.split() == ["yes"], ran.stderr


def test_half_an_environment_is_refused() -> None:
    env = subject.environment()
    env["TRITON_INTERPRET"] = "0"
    ran = _run("from sglang_exact.rehearsal import bootstrap; bootstrap.install()", env)
    assert ran.returncode != 0
    assert "TRITON_INTERPRET: found '0', expected '1'" in ran.stderr
