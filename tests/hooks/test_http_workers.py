# SPDX-License-Identifier: Apache-2.0
"""More than one HTTP worker is refused: the host loads no plugin in them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_exact.hooks import launch


@pytest.mark.parametrize("workers", [1, 2])
def test_http_workers_without_hooks_are_refused(workers: int) -> None:
    found = launch.worker_reasons(SimpleNamespace(tokenizer_worker_num=workers))
    assert ["--tokenizer-worker-num 2" in str(reason) for reason in found] == [True] * (
        workers - 1
    )


@pytest.mark.host
def test_the_host_loads_no_plugin_in_them() -> None:
    """Control: workers start in http_server, plugins are loaded elsewhere."""
    package = find_spec("sglang")
    assert package is not None and package.submodule_search_locations
    root = Path(next(iter(package.submodule_search_locations))) / "srt" / "entrypoints"
    assert "def init_multi_tokenizer" in (root / "http_server.py").read_text()
    assert "load_plugins" not in (root / "http_server.py").read_text()
    assert "load_plugins()" in (root / "engine.py").read_text()
