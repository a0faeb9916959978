# SPDX-License-Identifier: Apache-2.0
"""Checks of the request hooks against the host's own classes.

Run as a program in a rehearsal environment: prints one JSON object that maps the name
of every check to "" or to a traceback. `test_requests_in_host.py` runs it once.
"""

from __future__ import annotations

import json
import traceback
from types import SimpleNamespace
from typing import Any

import request_checks_answer
import request_checks_chain
import request_checks_context
import request_checks_copies
import request_checks_ends
import request_checks_fields
import request_checks_ollama
import request_checks_sampling
import request_checks_streams
import request_checks_text
import request_checks_values
import request_checks_verify

MODULES = (
    request_checks_sampling,
    request_checks_verify,
    request_checks_chain,
    request_checks_context,
    request_checks_answer,
    request_checks_ends,
    request_checks_copies,
    request_checks_ollama,
    request_checks_text,
    request_checks_streams,
    request_checks_fields,
    request_checks_values,
)


def _install() -> None:
    """The request hooks, applied by the host's registry as in a rank."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_exact.hooks import (
        accept,
        chain,
        context_end,
        copies,
        ollama,
        penalties,
        sampling,
        stop,
        streamed_parts,
        text_endpoints,
        vocab_parallel,
    )
    from sglang_exact.hooks.base import of

    hooks = of(
        *(sampling, penalties, accept, stop, streamed_parts, vocab_parallel),
        *(copies, ollama, chain, context_end, text_endpoints),
    )
    for hook in hooks:
        HookRegistry.register(hook.target, hook.replacement, HookType[hook.kind])
    HookRegistry.apply_hooks()


def _context() -> None:
    """The few runtime settings that the host's classes ask for."""
    from sglang.srt.speculative import eagle_utils

    eagle_utils.get_spec = lambda: SimpleNamespace(
        speculative_use_rejection_sampling=False
    )
    from sglang.srt.managers import schedule_batch
    from sglang.srt.sampling import sampling_batch_info

    schedule_batch.get_parallel = lambda: SimpleNamespace(tp_rank=1)

    def exec_settings() -> Any:
        return SimpleNamespace(
            deterministic=SimpleNamespace(enable_deterministic_inference=True),
            features=SimpleNamespace(
                enable_custom_logit_processor=True, enable_watermark=False
            ),
            kernel=SimpleNamespace(sampling_backend="pytorch"),
        )

    from sglang.srt.layers import sampler

    sampling_batch_info.get_exec = exec_settings
    sampler.get_exec = exec_settings


def main() -> None:
    _context()
    _install()
    outcome = {}
    checks = [item for module in MODULES for item in vars(module).items()]
    for name, check in checks:
        if name.startswith(("check_", "control_")):
            try:
                check()
                outcome[name] = ""
            except Exception:  # noqa: BLE001
                outcome[name] = traceback.format_exc()
    print(json.dumps(outcome))  # noqa: T201


if __name__ == "__main__":
    main()
