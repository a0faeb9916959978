# SPDX-License-Identifier: Apache-2.0
"""Launch: fill in what exactness needs, refuse the rest, wait for every rank.

Why: the host accepts arguments under which plain decode and verify differ
    (sglang/srt/arg_groups/attention_hook.py), and calls a server ready without
    knowing whether its ranks carry the overlay.
What: before ServerArgs.resolve_once the fixed arguments are set; before
    check_server_args (all resolved, nothing spawned, no weights) the set-up is
    checked as a whole; after the ranks report, each must have attested the same.
Scope: the launching process, whatever the entry point (launch_server, `sglang
    serve`, sglang.Engine).
Retire when: never; this is the overlay's own contract.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_exact import attestation, scope, settings
from sglang_exact.hooks.base import MAIN, Hook
from sglang_exact.reasons import Reason, Refused


def fill_arguments(self: Any) -> None:
    """Before ServerArgs.resolve_once: set the fixed arguments, keep the user's."""
    if getattr(self, "_resolution_finished", False):
        return
    reasons = scope.fill(self)
    if reasons:
        raise Refused(reasons)


def _capability(device: str) -> tuple[int, int] | None:
    if not device.startswith("cuda"):
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return major, minor


def check_arguments(self: Any) -> None:
    """Before ServerArgs.check_server_args: every reason at once, or silence."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

    config, reasons = settings.read(os.environ)
    cfg = resolved_view(self)
    reasons += scope.argument_reasons(cfg)
    model = model_config_of(self)
    reasons += scope.model_reasons(model.hf_config, str(model.dtype))
    if not config.rehearsal:
        reasons += scope.gpu_reasons(_capability(str(cfg.device)))
    reasons += _mask_embedding_reasons(cfg)
    if reasons:
        raise Refused(reasons)


def _mask_embedding_reasons(cfg: Any) -> list[Reason]:
    """A draft that edits the target's embedding would change plain answers too."""
    path = cfg.speculative_draft_model_path
    if not path or not os.path.isfile(os.path.join(path, "mask_embedding.pt")):
        return []
    return [
        Reason(
            f"{path} ships mask_embedding.pt, which overwrites a row of the target's "
            "embedding",
            "a draft that leaves the target's weights alone",
            "use a draft without a trained mask embedding",
        )
    ]


def attest_ranks(
    result: list[dict[str, Any]], scheduler_pipe_readers: Any, scheduler_procs: Any
) -> None:
    """After _wait_for_scheduler_ready: every rank attested, and all the same."""
    reasons = attestation.rank_reasons([info.get(attestation.KEY) for info in result])
    if reasons:
        raise Refused(reasons)


HOOKS = (
    Hook(
        name="fill_arguments",
        target="sglang.srt.server_args.ServerArgs.resolve_once",
        kind="BEFORE",
        replacement=fill_arguments,
        roles=(MAIN,),
    ),
    Hook(
        name="check_arguments",
        target="sglang.srt.server_args.ServerArgs.check_server_args",
        kind="BEFORE",
        replacement=check_arguments,
        roles=(MAIN,),
        relies_on=(
            "sglang.srt.arg_groups.attention_hook.handle_deterministic_inference",
        ),
    ),
    Hook(
        name="attest_ranks",
        target="sglang.srt.entrypoints.engine._wait_for_scheduler_ready",
        kind="AFTER",
        replacement=attest_ranks,
        roles=(MAIN,),
    ),
)
