# SPDX-License-Identifier: Apache-2.0
"""Each rank: validate, self-test on its device, guard the commit, attest.

Why: a rank is a process of its own; hooks, host source and GPU are what it sees,
    not what the launcher saw. The host's commit after verify
    (hybrid_linear_attn_backend.py:1514) copies whatever dtype it finds.
What: before Scheduler.__init__ the hooks' effect, the arguments and the model are
    checked again, and a refusal ends the rank with one message; after the target
    model is loaded the kernels are compared with the decode kernels on the device;
    before each commit the layout of the state buffers is asserted; get_init_info
    carries the attestation to the launcher, once every host module of the rank is
    known to come from its pinned file and no other plugin's hook is in force.
Scope: scheduler processes.
Retire when: never; this is the overlay's own contract.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from sglang_exact import attestation
from sglang_exact.hooks import away, prefix_cache, registered, small_m_gemm
from sglang_exact.hooks.attention_layer import HYBRID
from sglang_exact.hooks.base import HOST_SCHEDULER, SCHEDULER, Unsupported, hook
from sglang_exact.hooks.in_force import effect_reasons
from sglang_exact.reasons import Reason, Refused

logger = logging.getLogger(__name__)


@hook(
    f"{HOST_SCHEDULER}.__init__",
    "AROUND",
    name="check_rank",
    relies_on=(
        "sglang.srt.configs.model_config.ModelConfig._verify_quantization",
        "sglang.srt.models.qwen3_5._qwen3_5_is_moe",
        "sglang.srt.mem_cache.kv_cache_dtype.configure_kv_cache_dtype",
        "sglang.srt.arg_groups.cuda_graph_hook.parse_cuda_graph_config",
    ),
)
def check_rank(
    original_fn: Callable[..., None], self: Any, server_args: Any, port_args: Any
) -> None:
    """Around Scheduler.__init__: hooks still in force; a refusal ends the rank.

    The host would log a traceback and kill the launcher; this way the launcher reads
    the rank's exit status and ends with a message of its own.
    """
    from sglang_exact import gate, roles, scope

    reasons = scope.environment_reasons(os.environ)
    unsigned = roles.launcher_reasons(os.environ)
    reasons += unsigned
    for ours in registered.read().of(SCHEDULER):
        reasons += effect_reasons(ours)
    reasons += setup_reasons(server_args)
    if reasons:
        gate.leave(Refused(reasons), tell_parent=bool(unsigned))
    try:
        original_fn(self, server_args, port_args)
    except Refused as refusal:
        gate.leave(refusal)


def setup_reasons(server_args: Any) -> list[Reason]:
    """Reasons in the resolved arguments and the model, as this rank got them.

    The launching process looks first; a rank does not rely on it.
    """
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

    from sglang_exact import scope, scope_arguments, scope_model

    cfg = resolved_view(server_args)
    rehearsal = registered.read().settings.rehearsal
    given = scope.given(server_args)
    return [
        *scope.argument_reasons(cfg),
        *scope_arguments.left_alone_reasons(server_args, given),
        *scope_model.resolved_reasons(cfg, model_config_of(server_args)),
        *scope.rehearsal_reasons(rehearsal, str(cfg.device)),
    ]


@hook(
    "sglang.srt.model_executor.model_runner.ModelRunner.initialize",
    "AFTER",
    name="self_test",
)
def self_test(result: None, self: Any) -> None:
    """After ModelRunner.initialize: the target as built, then kernels on the device."""
    if self.is_draft_worker:
        return
    import torch

    from sglang_exact import schemes, scope_model, selftest

    config, capability = self.model_config.hf_config, None
    scheme = schemes.of(config)
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
    schemes.drop_unit_scales(self.model, scheme)
    if reasons := [
        *scope_model.capability_reasons(config, capability),
        *scope_model.live_reasons(self.model, self.kv_cache_dtype, scheme),
    ]:
        raise Refused(reasons)
    decided = registered.read()
    names = {ours.name for ours in decided.of(SCHEDULER)}
    limit = decided.settings.small_m
    tested = selftest.run(self, names, limit)
    if tested.reasons:
        raise Refused(tested.reasons)
    if tested.small_m_shapes:
        small_m_gemm.enable(tested.small_m_shapes, limit)


@hook(f"{HOST_SCHEDULER}.get_init_info", "AFTER", name="attestation")
def add_attestation(result: dict[str, Any], self: Any) -> dict[str, Any]:
    """After Scheduler.get_init_info: what this rank reports about itself."""
    from sglang_exact import gate, scope_model, selftest

    decided = registered.read()
    pool = self.tp_worker.model_runner.token_to_kv_pool
    if reasons := [*late_reasons(decided), *scope_model.cache_reasons(pool.dtype)]:
        gate.leave(Refused(reasons))
    facts = attestation.runtime_facts(self) | {
        "prefix_cache": prefix_cache.room(self),
        "preemption": away.room.facts(),
    }
    record = attestation.record(decided, facts, selftest.last_report())
    logger.info("%s", attestation.log_line(record))
    attestation.publish_metrics(record)
    return {**result, attestation.KEY: record}


def late_reasons(decided: registered.Decision) -> list[Reason]:
    """Reasons in what this rank loaded and hooked by the time its model stands."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_exact import gate
    from sglang_exact.host import compat

    config = decided.settings
    reasons = gate.foreign_reasons(decided.known, HookRegistry, config.allow_plugins)
    return reasons if config.allow_unpinned_host else reasons + compat.loaded_reasons()


@hook(
    f"{HYBRID}.update_mamba_state_after_mtp_verify",
    "BEFORE",
    name="commit_guard",
    relies_on=(
        "sglang.kernels.ops.mamba.mamba_state_scatter_triton."
        "fused_mamba_state_scatter_with_mask",
        "sglang.srt.speculative.spec_utils.commit_mamba_states_after_verify",
    ),
)
def check_commit(
    self: Any,
    last_correct_step_indices: Any,
    mamba_track_indices: Any,
    mamba_steps_to_track: Any,
    model: Any,
    req_pool_indices: Any = None,
) -> None:
    """Before the commit of verified states: pool and scratch have one layout.

    Host-side checks of dtype and shape only; nothing waits for the device.
    """
    pool = self.linear_attn_backend.req_to_token_pool
    caches = pool.get_speculative_mamba2_params_all_layers()
    found = []
    state, steps = caches.temporal, caches.intermediate_ssm
    if steps is None:
        found.append("no intermediate state buffer (replay mode)")
    elif steps.ndim == 4:
        # Records, whose layout `gdn_commit` compares with the states'.
        pass
    elif state.dtype != steps.dtype or state.shape[-3:] != steps.shape[-3:]:
        found.append(
            f"state {state.dtype} {tuple(state.shape[-3:])}, intermediate "
            f"{steps.dtype} {tuple(steps.shape[-3:])}"
        )
    for conv, window in zip(caches.conv, caches.intermediate_conv_window, strict=False):
        if conv.dtype != window.dtype:
            found.append(f"conv state {conv.dtype}, intermediate {window.dtype}")
    if found:
        raise Unsupported("commit after verify: found " + "; ".join(found))


def mask_embedding_reasons(cfg: Any) -> list[Reason]:
    """A draft that edits the target's embedding would change plain answers too."""
    path = cfg.speculative_draft_model_path
    if not path or not os.path.exists(os.path.join(path, "mask_embedding.pt")):
        return []
    return [
        Reason(
            f"{path} ships mask_embedding.pt, which overwrites a row of the target's "
            "embedding",
            "a draft that leaves the target's weights alone",
            "use a draft without a trained mask embedding",
        )
    ]


@hook(
    "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2."
    "_maybe_merge_trained_mask_embedding",
    "AROUND",
    name="mask_embedding",
)
def keep_target_weights(original_fn: Callable[..., None], self: Any) -> None:
    """Around _maybe_merge_trained_mask_embedding: never edit the target."""
    if reasons := mask_embedding_reasons(self.server_args):
        raise Refused(reasons)
    original_fn(self)
