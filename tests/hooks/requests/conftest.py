# SPDX-License-Identifier: Apache-2.0
"""The request hooks on the host's own classes, in a process of the rehearsal."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

if find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.rehearsal)


@pytest.fixture(scope="package", autouse=True)
def hooks_in_the_host() -> Iterator[None]:
    """The request hooks, applied by the host's registry as in a rank."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_exact import hooks
    from sglang_exact.hooks.base import of

    for hook in of(
        *(hooks.sampling, hooks.penalties, hooks.accept, hooks.stop, hooks.chain),
        *(hooks.streamed_parts, hooks.vocab_parallel, hooks.copies, hooks.ollama),
        *(hooks.context_end, hooks.text_endpoints),
    ):
        HookRegistry.register(hook.target, hook.replacement, HookType[hook.kind])
    HookRegistry.apply_hooks()
    with pytest.MonkeyPatch.context() as patch:
        _settings(patch)
        yield


def _settings(patch: pytest.MonkeyPatch) -> None:
    """The few runtime settings that the host's classes ask for."""
    from sglang.srt.layers import sampler
    from sglang.srt.managers import schedule_batch
    from sglang.srt.sampling import sampling_batch_info
    from sglang.srt.speculative import eagle_utils

    running = SimpleNamespace(
        deterministic=SimpleNamespace(enable_deterministic_inference=True),
        features=SimpleNamespace(
            enable_custom_logit_processor=True, enable_watermark=False
        ),
        kernel=SimpleNamespace(sampling_backend="pytorch"),
    )
    for module in (sampler, sampling_batch_info):
        patch.setattr(module, "get_exec", lambda: running)
    spec = SimpleNamespace(speculative_use_rejection_sampling=False)
    patch.setattr(eagle_utils, "get_spec", lambda: spec)
    patch.setattr(schedule_batch, "get_parallel", lambda: SimpleNamespace(tp_rank=1))
