# SPDX-License-Identifier: Apache-2.0
"""Tests marked `rehearsal`: one process that can import the host on the CPU runs them.

The first of them starts a pytest in the environment of a rehearsal with all that were
chosen; each is then reported as it went there, under its own name.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

OPTION = "--rehearsal-reports"


class Inside:
    """In that process: writes down every report, a line of JSON each."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.file = Path(config.getoption(OPTION))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(
            config=self.config, report=report
        )
        with self.file.open("a") as out:
            out.write(json.dumps(data) + "\n")


class Outside:
    """In every other: has them run, and reports them."""

    def __init__(self) -> None:
        self.reports: dict[str, list[pytest.TestReport]] | None = None
        self.output = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        if not item.get_closest_marker("rehearsal") or item.get_closest_marker("skip"):
            return None
        hook, where = item.ihook, {"nodeid": item.nodeid, "location": item.location}
        hook.pytest_runtest_logstart(**where)
        if self.reports is None:
            self.reports = self._run(item.session)
        found = self.reports.get(item.nodeid, [])
        if not found or found[-1].when != "teardown":
            found = [*found, self._missing(item)]
        for report in found:
            hook.pytest_runtest_logreport(report=report)
        # Folders that tests before it set up and those after it do not need.
        item.session._setupstate.teardown_exact(nextitem)
        hook.pytest_runtest_logfinish(**where)
        return True

    def _run(self, session: pytest.Session) -> dict[str, list[pytest.TestReport]]:
        """Run all that were chosen; reports of each by its name."""
        from sglang_exact.rehearsal.environment import environment

        names = [i.nodeid for i in session.items if i.get_closest_marker("rehearsal")]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "reports"
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", OPTION,
                 str(file), *names],
                env={**environment(), "TORCHDYNAMO_DISABLE": "1"},
                cwd=session.config.rootpath,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            self.output = done.stdout
            lines = file.read_text().splitlines() if file.exists() else []
        found: dict[str, list[pytest.TestReport]] = {}
        for line in lines:
            report = _read(session.config, json.loads(line))
            found.setdefault(report.nodeid, []).append(report)
        return found

    def _missing(self, item: pytest.Item) -> pytest.TestReport:
        text = f"found no end of this test in the rehearsal's process:\n{self.output}"
        return pytest.TestReport(
            item.nodeid, item.location, {}, "failed", text, when="call"
        )


def _read(config: pytest.Config, data: dict[str, Any]) -> pytest.TestReport:
    # The reason of a skip is a tuple, which JSON does not have.
    if isinstance(data["longrepr"], list):
        data["longrepr"] = tuple(data["longrepr"])
    report: pytest.TestReport = config.hook.pytest_report_from_serializable(
        config=config, data=data
    )
    return report
