# SPDX-License-Identifier: Apache-2.0
"""Stand-ins: importable, yet "not installed" for those who ask."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from sglang_exact.rehearsal import stubs
from sglang_exact.rehearsal.environment import REHEARSAL_VARIABLE, environment

CODE = """
import importlib.util
from transformers.utils import import_utils
before = importlib.util.find_spec("torchvision")
import torchvision
from torchvision.transforms import InterpolationMode, functional
class Mode(InterpolationMode): pass
import vllm._custom_ops
import_utils.is_torchvision_available.cache_clear()
print(before, import_utils.is_torchvision_available(), InterpolationMode.BICUBIC)
"""


def _run(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CODE], env=env, capture_output=True, text=True
    )


@pytest.mark.host
def test_imports_are_served_and_questions_denied() -> None:
    ran = _run(environment())
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("None False <")


@pytest.mark.host
def test_control_without_stand_ins_the_import_fails() -> None:
    env = environment()
    del env[REHEARSAL_VARIABLE]
    ran = _run(env)
    assert ran.returncode != 0
    assert "torchvision" in ran.stderr


def test_an_installed_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stubs, "STOOD_IN_FOR", ("json",))
    with pytest.raises(RuntimeError, match="found installed: json"):
        stubs.install()


def test_placeholder_supports_what_modules_do_at_import() -> None:
    thing = stubs.Placeholder()
    assert isinstance(thing.a.b(1, c=2)["x"], stubs.Placeholder)
    assert list(thing) == []
    assert isinstance(int | thing, stubs.Placeholder)
    with pytest.raises(AttributeError):
        _ = thing.__wrapped__
    assert importlib.util.find_spec("json") is not None
