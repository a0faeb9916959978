# SPDX-License-Identifier: Apache-2.0
"""Shared basics: what is skipped where, and the tiny models."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rehearsed import OPTION, Inside, Outside

if TYPE_CHECKING:
    from sglang_exact.hooks.registered import Decision
    from sglang_exact.settings import Settings


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def _has_host() -> bool:
    return importlib.util.find_spec("sglang") is not None


# A shell starts what it puts in the background with interrupts ignored, and children
# inherit that: tests that interrupt one need them as in the foreground.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Read when triton is imported, so set before any test module can import it.
if not _has_cuda():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, help="where the process of the rehearsal writes reports")


def pytest_configure(config: pytest.Config) -> None:
    inside = config.getoption(OPTION)
    config.pluginmanager.register(Inside(config) if inside else Outside())


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Skip what this machine cannot run; e2e tests need the host as well."""
    missing = {}
    if any(item.get_closest_marker("gpu") for item in items) and not _has_cuda():
        missing["gpu"] = "needs a CUDA device"
    if not _has_host():
        missing["host"] = "needs the pinned SGLang importable"
        missing["e2e"] = missing["rehearsal"] = missing["host"]
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def decide() -> Iterator[Callable[[Settings], Decision]]:
    """Writes down a decision of both roles, as `plugin.register` does, for one test."""
    from sglang_exact import hooks
    from sglang_exact.hooks import registered

    def write(settings: Settings) -> Decision:
        decided = hooks.decide(settings, (hooks.MAIN, hooks.SCHEDULER))
        registered.write(decided)
        return decided

    yield write
    registered.write(None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line per reason, so that a green run does not hide what it left out."""
    reasons: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "other"
        reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"not run: {count} ({reason})")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `target` and one folder per draft kind, made once per session."""
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    from sglang_exact.rehearsal import models

    folder = tmp_path_factory.mktemp("models")
    models.make_target(folder / "target")
    for kind in models.DRAFT_KINDS:
        models.make_draft(folder / kind, kind)
    return folder
