# SPDX-License-Identifier: Apache-2.0
"""Launch: fill in what exactness needs, refuse the rest, wait for every rank.

Why: the host accepts arguments under which plain decode and verify differ
    (sglang/srt/arg_groups/attention_hook.py), and calls a server ready without
    knowing whether its ranks carry the overlay.
What: before ServerArgs.resolve_once the fixed arguments are set; before
    check_server_args (all resolved, nothing spawned, no weights) the set-up is
    checked as a whole; after the ranks report, each must have attested the same,
    and their number joins the attestation, as do the hooks of this process.
Scope: the launching process, whatever the entry point (launch_server, `sglang
    serve`, sglang.Engine).
Retire when: never; this is the overlay's own contract.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from sglang_exact import attestation, gate, roles, scope, scope_model
from sglang_exact.hooks import registered
from sglang_exact.hooks.base import MAIN, hook
from sglang_exact.hooks.in_force import effect_reasons
from sglang_exact.hooks.rank import mask_embedding_reasons, setup_reasons
from sglang_exact.host import headers
from sglang_exact.reasons import Reason


@hook(
    "sglang.srt.server_args.ServerArgs.resolve_once",
    "BEFORE",
    name="fill_arguments",
    roles=(MAIN,),
)
def fill_arguments(self: Any) -> None:
    """Before ServerArgs.resolve_once: set the fixed arguments, keep the user's."""
    if getattr(self, "_resolution_finished", False):
        return
    reasons, config = scope.fill(self), _config_of(str(self.model_path))
    scope_model.fill_family(self, config)
    # The host would end on some of these with a traceback.
    reasons += scope_model.family_reasons(self, config)
    if reasons:
        gate.refuse([*reasons, *_early_reasons(self)])


def _early_reasons(args: Any) -> list[Reason]:
    """What the full check would find next, so that one message has it all.

    Only a local checkpoint is looked at; one on a hub is judged after resolution.
    """
    reasons: list[Reason] = []
    found, capability = _config_of(str(args.model_path)), None
    if not registered.read().settings.rehearsal:
        capability = _capability(str(args.device or "cuda"))
        reasons += scope.gpu_reasons(capability)
    if found:
        reasons += scope_model.capability_reasons(found, capability)
        dtype = found.get("dtype") or found.get("torch_dtype") or "bfloat16"
        # A --dtype that is given is judged with the other arguments.
        wanted = str(dtype) if args.dtype == "auto" else "bfloat16"
        reasons += scope_model.model_reasons(found, wanted)
        reasons += scope_model.file_reasons(str(args.model_path))
    return reasons + _beside_reasons(args)


def _config_of(folder: str) -> dict[str, Any]:
    """config.json of a local checkpoint; {} where there is none.

    One that cannot be read or is no JSON object is the host's to complain about.
    """
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _effect_reasons() -> list[Reason]:
    """Reasons why a hook of this process is no longer in force.

    The gate looked right after the host applied them; another plugin may come later.
    """
    return [r for hook in registered.read().of(MAIN) for r in effect_reasons(hook)]


def _capability(device: str) -> tuple[int, int] | None:
    if not device.startswith("cuda"):
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return major, minor


def _gpu_names(cfg: Any) -> list[str]:
    """Name of every rank's GPU; the host itself refuses one that is not there."""
    import torch

    if not str(cfg.device).startswith("cuda") or not torch.cuda.is_available():
        return []
    first, step, count = cfg.base_gpu_id, cfg.gpu_id_step, torch.cuda.device_count()
    ranks = [first + step * rank for rank in range(cfg.tp_size)]
    return [torch.cuda.get_device_name(i) for i in ranks if i < count]


@hook(
    "sglang.srt.server_args.ServerArgs.check_server_args",
    "BEFORE",
    name="check_arguments",
    roles=(MAIN,),
    relies_on=(
        "sglang.srt.arg_groups.attention_hook.handle_deterministic_inference",
        "sglang.srt.entrypoints.http_server.init_multi_tokenizer",
    ),
)
def check_arguments(self: Any) -> None:
    """Before ServerArgs.check_server_args: every reason at once, or silence."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

    cfg = resolved_view(self)
    reasons = [*_effect_reasons(), *setup_reasons(self)]
    if not registered.read().settings.rehearsal:
        capability = _capability(str(cfg.device))
        reasons += scope.gpu_reasons(capability)
        reasons += scope.gpu_mix_reasons(_gpu_names(cfg))
        hf_config = model_config_of(self).hf_config
        reasons += scope_model.capability_reasons(hf_config, capability)
        if capability == (12, 0):
            # DeepGEMM's sm120 kernel races without this fence.
            install = headers.find_install()
            reasons += headers.reasons(install, headers.load_manifest())
    reasons += _beside_reasons(cfg)
    if reasons:
        gate.refuse(reasons)
    roles.sign()


def _beside_reasons(cfg: Any) -> list[Reason]:
    """Reasons beside the tables of arguments, raw or resolved: draft and workers."""
    return [
        *mask_embedding_reasons(cfg),
        *_draft_block_reasons(cfg),
        *worker_reasons(cfg),
    ]


def _draft_block_reasons(cfg: Any) -> list[Reason]:
    """A DFlash2 draft convolves over its block; the host needs room for all taps.

    sglang.srt.models.dflash._grouped_conv shifts the rows of a step by up to taps - 1;
    with fewer rows, one request alone, it fails when graphs are captured.
    """
    path, tokens = cfg.speculative_draft_model_path, cfg.speculative_num_draft_tokens
    algorithm = str(cfg.speculative_algorithm or "").upper()
    if algorithm != "DFLASH" or not path or not tokens:
        return []
    draft = _config_of(path).get("dflash_config")
    if not isinstance(draft, dict):
        return []
    taps = draft.get("conv_kernel_size") or 0
    try:
        # As the host reads it (dflash_utils._parse_optional_int).
        least = int(taps) - 1
    except (TypeError, ValueError, OverflowError):
        return []  # The host says so itself.
    if tokens >= least:
        return []
    return [
        Reason(
            f"--speculative-num-draft-tokens {tokens} with a draft that convolves "
            f"over {taps} tokens",
            f"{least} or more: the host's convolution fails on fewer rows",
            f"pass --speculative-num-draft-tokens {least} or more",
        )
    ]


def worker_reasons(cfg: Any) -> list[Reason]:
    """The host loads no plugin in HTTP workers (http_server.init_multi_tokenizer).

    Requests would arrive there without being looked at, and streams without the
    hooks of this process.
    """
    if cfg.tokenizer_worker_num == 1:
        return []
    return [
        Reason(
            f"--tokenizer-worker-num {cfg.tokenizer_worker_num}",
            "1 (further HTTP workers of the host load no plugin)",
            "drop --tokenizer-worker-num, or run one server per replica",
        )
    ]


@hook(
    "sglang.srt.entrypoints.engine._wait_for_scheduler_ready",
    "AROUND",
    name="attest_ranks",
    roles=(MAIN,),
)
def attest_ranks(
    original_fn: Callable[..., list[dict[str, Any]]],
    scheduler_pipe_readers: Any,
    scheduler_procs: Any,
) -> list[dict[str, Any]]:
    """Around _wait_for_scheduler_ready: every rank attested, and all the same."""
    try:
        result = original_fn(scheduler_pipe_readers, scheduler_procs)
    except RuntimeError:
        left = [p.exitcode == gate.EXIT_STATUS for p in scheduler_procs]
        if not any(left):
            raise
        gate.refuse(
            [
                Reason(
                    f"rank(s) {[i for i, x in enumerate(left) if x]} refused to start",
                    "every rank under the overlay",
                    "see the reasons that the rank printed above",
                )
            ]
        )
    reasons = attestation.rank_reasons([info.get(attestation.KEY) for info in result])
    reasons += _effect_reasons()
    if reasons:
        gate.refuse(reasons)
    decided = registered.read()
    for info in result:
        info[attestation.KEY]["ranks"] = len(result)
        info[attestation.KEY]["http"] = {
            "roles": list(decided.roles),
            "hooks": [hook.name for hook in decided.of(MAIN)],
        }
    return result


@hook(
    "sglang.srt.entrypoints.engine.Engine._set_startup_time",
    "BEFORE",
    name="attest_engine",
    roles=(MAIN,),
)
def attest_engine(
    tokenizer_manager: Any, scheduler_init_result: Any, startup_tic: float
) -> None:
    """Before Engine._set_startup_time: no rank was started in another way.

    An engine that launches its ranks itself (sglang.srt.ray.engine.RayEngine) does not
    wait in `_wait_for_scheduler_ready`, and its ranks may not load plugins.
    """
    infos = scheduler_init_result.scheduler_infos
    if reasons := attestation.rank_reasons([x.get(attestation.KEY) for x in infos]):
        gate.refuse(reasons)
