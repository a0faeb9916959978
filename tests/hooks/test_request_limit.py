# SPDX-License-Identifier: Apache-2.0
"""The host's own number of requests, brought down to what decode attention takes."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_exact.hooks import request_limit
from sglang_exact.hooks.base import of
from sglang_exact.host import source as host
from sglang_exact.scope_model import MAX_REQUESTS


@pytest.mark.parametrize("hosts", [1, 48, 255, 256, 257, 4096])
def test_limit(hosts: int) -> None:
    found = request_limit.resolve_max_num_reqs(hosts, None, 0)
    assert found == min(hosts, 256)


@pytest.mark.host
@pytest.mark.parametrize("hooked", [False, True])
def test_the_host_takes_more_when_nobody_says(hooked: bool) -> None:
    """Without the hook a roomy pool lets thousands in; decode attention ends at 256."""
    tree: Any = ast.Module([host.definition(of(request_limit)[0].target)], [])
    schedule = SimpleNamespace(max_running_requests=None, max_mamba_cache_size=4096)
    names: dict[str, Any] = {"get_schedule": lambda: schedule}
    exec(compile(tree, "host", "exec"), names)
    own: Any = SimpleNamespace(
        model_config=SimpleNamespace(context_len=4096),
        attn_dp_size=1,
        mambaish_config=object(),
        _calculate_mamba_ratio=lambda: 1,
    )
    tokens = 2**24
    found = names["resolve_max_num_reqs"](own, tokens)
    if hooked:
        found = request_limit.resolve_max_num_reqs(found, own, tokens)
    assert (found <= MAX_REQUESTS) is hooked
