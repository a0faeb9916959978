# SPDX-License-Identifier: Apache-2.0
"""What the overlay supports, as tables; everything else comes back as reasons.

Three questions, each answered before weights load: are the server arguments,
the model and the environment ones for which plain decode and verify have been
proven to give the same bits?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_exact import scope_arguments, variables
from sglang_exact.reasons import Reason
from sglang_exact.scope_families import FAMILIES, Fill

MAX_DRAFT_TOKENS = 16
GPU_ARCHS = {(9, 0): "sm90", (12, 0): "sm120"}
CHAIN_ALGORITHMS = ("DFLASH", "DSPARK", "EAGLE", "NEXTN", "NGRAM")

PREFILL_GRAPH_TOKENS = 512
"""Largest bucket of prefill graphs: 30 of them take 11 s and 0.7 GB of an H200 at 64
layers; longer steps wait for the GPU, not for launches."""

BEYOND_CONTEXT = 2**30
"""Tokens that no context has."""

FILLS = (
    Fill("enable_deterministic_inference", False, True, "batch-invariant kernels"),
    Fill("attention_backend", None, "triton", "its decode kernel is the reference"),
    *(fill for family in FAMILIES for fill in family.fills),
    Fill(
        "mamba_track_interval",
        256,
        BEYOND_CONTEXT,
        "decode's states are not prefill's, so none is kept",
        fixed=False,
    ),
    Fill(
        "cuda_graph_max_bs_prefill",
        None,
        PREFILL_GRAPH_TOKENS,
        "longer steps gain nothing from a graph; any other value has the same bits",
        fixed=False,
    ),
)
NGRAM_FILL = Fill(
    "speculative_ngram_max_bfs_breadth", 10, 1, "only linear chains are exact"
)

# field -> values that keep the bits, after the host resolved its arguments
ALLOWED: dict[str, tuple[object, ...]] = {
    "enable_deterministic_inference": (True,),
    "attention_backend": ("triton",),
    "prefill_attention_backend": (None, "triton"),
    "decode_attention_backend": (None, "triton"),
    "linear_attn_backend": ("triton",),
    "linear_attn_decode_backend": (None, "triton"),
    "linear_attn_prefill_backend": (None, "triton"),
    "linear_attn_verify_backend": (None, "triton"),
    "mamba_backend": ("triton",),
    "mamba_ssm_dtype": ("float32",),
    "enable_mamba_cache_stochastic_rounding": (False,),
    "enable_int8_mamba_checkpoint": (False,),
    "enable_linear_replayssm": (False,),
    "enable_linear_replayssm_spec": (False,),
    "mamba_radix_cache_strategy": ("extra_buffer", "extra_buffer_lazy"),
    # Each brings its own cache of prefixes; none was compared with computing them.
    "enable_hierarchical_cache": (False,),
    "radix_cache_backend": (None,),
    "enable_lmcache": (False,),
    "enable_flexkv": (False,),
    "enable_unified_cache_external_linker": (False,),
    "enable_session_radix_cache": (False,),
    "enable_streaming_session": (False,),
    "enable_unified_memory": (False,),
    "enable_page_major_kv_layout": (False,),
    "enable_mixed_chunk": (False,),
    "enable_priority_scheduling": (False,),
    "page_size": (None, 1),
    "bf16_gemm_backend": ("auto", "torch"),
    "fp8_gemm_runner_backend": ("auto", "deep_gemm"),
    "enable_fp32_lm_head": (False,),
    "enable_tf32_matmul": (None, False),
    "model_impl": ("auto", "sglang"),
    "forward_hooks": (None,),
    "enable_torch_compile": (False,),
    "enable_nvidia_megakernel": (False,),
    "enable_lean_attention": (None, False),
    "enable_two_batch_overlap": (False,),
    "enable_single_batch_overlap": (False,),
    "enable_symm_mem": (False,),
    "enable_pdmux": (False,),
    "enable_mis": (False,),
    "is_embedding": (False,),
    # With a server key every request that does not ask for it gets it, too.
    "enable_watermark": (False,),
    "sampling_backend": (None, "pytorch"),
    "rl_on_policy_target": (None,),
    "dllm_algorithm": (None,),
    "load_format": (
        *("auto", "safetensors", "pt", "npcache", "dummy", "fastsafetensors"),
        *("instanttensor", "runai_streamer", "sharded_state", "presharded"),
        *("remote", "remote_instance", "mistral"),
    ),
    "dtype": ("auto", "bfloat16"),
    "quantization": (None,),
    "modelopt_quant": (None,),
    "quantize_and_serve": (False,),
    "rl_quant_profile": (None,),
    "kv_cache_dtype": ("auto", "bf16", "bfloat16"),
    "cpu_offload_gb": (0,),
    "offload_group_size": (-1,),
    "disaggregation_mode": ("null",),
    "decoupled_spec_role": ("null",),
    "use_ray": (False,),
    # The host writes the first into the second, and a variable into the third.
    "grpc_mode": (False,),
    "smg_grpc_mode": (False,),
    "grpc_port": (None,),
    "nnodes": (1,),
    "tp_size": (1, 2),
    "pp_size": (1,),
    "dp_size": (1,),
    "ep_size": (1,),
    "dcp_size": (1,),
    "attn_cp_size": (1,),
    "attn_dp_size": (1,),
    "moe_dp_size": (1,),
    "dwdp_size": (1,),
    "enable_dp_attention": (False,),
    "enable_dp_lm_head": (False,),
    "enable_prefill_cp": (False,),
    "enable_cp_tp_group_sharing": (False,),
    "enable_attn_tp_input_scattered": (False,),
    "enable_layernorm_sp": (False,),
    "moe_dense_tp_size": (None,),
    # All-reduces that join the norm, or have an arithmetic of their own.
    "flashinfer_allreduce_fusion_backend": (None,),
    "enable_flashinfer_allreduce_fusion": (False,),
    "enable_aiter_allreduce_fusion": (False,),
    "enable_quant_communications": (None, False),
    # Chosen by the size of the message, or summed in the switch.
    "enable_mscclpp": (False,),
    "enable_torch_symm_mem": (False,),
    "enable_nccl_nvls": (False,),
    "enable_lora": (None, False),
    "lora_paths": (None, [], {}),
}
ALLOWED_SPECULATIVE: dict[str, tuple[object, ...]] = {
    "speculative_eagle_topk": (None, 1),
    "speculative_use_rejection_sampling": (False,),
    "speculative_use_block_verification": (False,),
    "speculative_adaptive": (False,),
    "speculative_accept_threshold_single": (1.0,),
    "speculative_accept_threshold_acc": (1.0,),
    "speculative_attention_mode": ("prefill",),
    "speculative_ngram_min_bfs_breadth": (1,),
    "speculative_ngram_external_corpus_path": (None,),
    "speculative_ngram_external_sam_budget": (0,),
}
# The other settings of NGRAM: the least value of each. Nothing reads the last one
# without an external corpus.
NGRAM_LEAST = {
    "speculative_ngram_max_bfs_breadth": 1,
    "speculative_ngram_max_trie_depth": 2,
    "speculative_ngram_capacity": 3,
    "speculative_ngram_external_corpus_max_tokens": 0,
}

# field -> why nothing else is served, where the flag alone does not say it
_NOT_COMPARED = "no other layout was compared with plain decode"
_ONE_KERNEL = "one kernel adds every message, whatever its size"
_OWN_TRIE = "a chain comes from one trie; a corpus would take its only token"
_OTHER_NORM = "the fused norm sums in an order of its own, and only takes some sizes"
WHY: dict[str, str] = {
    "mamba_radix_cache_strategy": "the others keep decode's states for later prompts",
    "tp_size": (
        "two ranks add two numbers; with more, the order of an all-reduce's sum may "
        "change with the size of its message, so with the number of rows"
    ),
    "nnodes": "all ranks on one host",
    "pp_size": _NOT_COMPARED,
    "dp_size": "one scheduler; run one server per replica",
    "ep_size": _NOT_COMPARED,
    "attn_dp_size": "rows must not be padded to those of other requests",
    "enable_dp_attention": "rows must not be padded to those of other requests",
    "attn_cp_size": "keys split over ranks are summed in another order",
    "dcp_size": "keys split over ranks are summed in another order",
    "enable_prefill_cp": "keys split over ranks are summed in another order",
    "flashinfer_allreduce_fusion_backend": _OTHER_NORM,
    "enable_mscclpp": _ONE_KERNEL,
    "enable_torch_symm_mem": _ONE_KERNEL,
    "enable_nccl_nvls": _ONE_KERNEL,
    "speculative_ngram_min_bfs_breadth": "only linear chains are exact",
    "speculative_ngram_external_corpus_path": _OWN_TRIE,
    "speculative_ngram_external_sam_budget": _OWN_TRIE,
}


def _flag(field: str) -> str:
    field = {"fp8_gemm_runner_backend": "fp8_gemm_backend"}.get(field, field)
    return "--" + field.replace("_", "-")


def _argument_fix(field: str, allowed: tuple[object, ...]) -> str:
    usable = [x for x in allowed if x not in (None, False, [], {})]
    if not usable or usable == [True]:
        return f"drop {_flag(field)}"
    return f"drop {_flag(field)} or set it to {' or '.join(map(str, usable))}"


def _same(value: object, allowed: tuple[object, ...]) -> bool:
    return any(value == x and type(value) is type(x) for x in allowed) or (
        isinstance(value, float) and value in allowed
    )


def fills(args: Any) -> list[Fill]:
    """The fills that apply to a raw ServerArgs record."""
    algorithm = str(args.speculative_algorithm or "").upper()
    return [*FILLS, NGRAM_FILL] if algorithm == "NGRAM" else list(FILLS)


def given(args: Any) -> set[str]:
    """Names of the raw arguments that differ from the host's defaults."""
    import msgspec

    found = set()
    for field in msgspec.structs.fields(type(args)):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if getattr(args, field.name) != default:
            found.add(field.name)
    return found


def fill(args: Any) -> list[Reason]:
    """Set what exactness needs on a raw ServerArgs record.

    What the user gave is kept; what contradicts exactness comes back as reasons,
    with every other given argument that does, so that one message has them all.
    """
    user = given(args)
    settled = {item.field for item in fills(args) if item.fixed}
    reasons = argument_reasons(args, only=user - settled)
    reasons += scope_arguments.left_alone_reasons(args, user)
    for item in fills(args):
        found = getattr(args, item.field)
        if found == item.value:
            continue
        if found != item.host_default:
            if not item.fixed:
                continue
            reasons.append(
                Reason(
                    f"{_flag(item.field)} {found}",
                    f"{item.value} ({item.why})",
                    f"drop {_flag(item.field)}; it is set for you",
                )
            )
            continue
        setattr(args, item.field, item.value)
    return reasons


def argument_reasons(cfg: Any, only: set[str] | None = None) -> list[Reason]:
    """Reasons in the server arguments (resolved, or the `only` given raw ones)."""
    reasons = []
    tables = dict(ALLOWED)
    algorithm = str(cfg.speculative_algorithm or "").upper()
    if algorithm:
        tables |= ALLOWED_SPECULATIVE
        reasons += _speculative_reasons(cfg, algorithm, only)
    for field, allowed in tables.items():
        if only is not None and field not in only:
            continue
        found = getattr(cfg, field)
        if not _same(found, allowed):
            wanted = " or ".join(str(x) for x in allowed)
            if field in WHY:
                wanted += f" ({WHY[field]})"
            reasons.append(
                Reason(
                    f"{_flag(field)} {found}",
                    wanted,
                    _argument_fix(field, allowed),
                )
            )
    if only is None:
        reasons += _all_reduce_reasons(cfg)
    return reasons


def _all_reduce_reasons(cfg: Any) -> list[Reason]:
    """Reasons in the resolved choice of the all-reduce of two ranks.

    The host's deterministic mode turns its own kernel off (attention_hook.py:680);
    what it leaves, NCCL's tree, was compared.
    """
    if cfg.tp_size == 1 or cfg.disable_custom_all_reduce:
        return []
    return [
        Reason(
            "the host's own all-reduce in use with several ranks",
            "NCCL's, as deterministic mode has it",
            "install the pinned release, or pass --disable-custom-all-reduce",
        )
    ]


def _speculative_reasons(
    cfg: Any, algorithm: str, only: set[str] | None
) -> list[Reason]:
    if algorithm not in CHAIN_ALGORITHMS:
        return [
            Reason(
                f"--speculative-algorithm {algorithm}",
                "one of " + ", ".join(CHAIN_ALGORITHMS),
                "use a drafter whose drafts form a linear chain",
            )
        ]
    reasons = []
    tokens = cfg.speculative_num_draft_tokens
    if only is not None and "speculative_num_draft_tokens" not in only:
        tokens = 1
    if tokens is None or not 1 <= int(tokens) <= MAX_DRAFT_TOKENS:
        reasons.append(
            Reason(
                f"--speculative-num-draft-tokens {tokens}",
                f"1 to {MAX_DRAFT_TOKENS}",
                f"set it to {MAX_DRAFT_TOKENS} or less",
            )
        )
    return [*reasons, *_ngram_reasons(cfg, only)] if algorithm == "NGRAM" else reasons


def _ngram_reasons(cfg: Any, only: set[str] | None) -> list[Reason]:
    """Reasons in the trie's sizes; the host fails on them after weights load."""
    reasons = []
    for field, least in NGRAM_LEAST.items():
        if only is not None and field not in only:
            continue
        found, wanted = getattr(cfg, field), f"{least} or more"
        if field == "speculative_ngram_capacity":
            # One path, and the root: else the trie has nothing to drop.
            least = cfg.speculative_ngram_max_trie_depth + 1
            wanted = f"{least} or more, one path of --speculative-ngram-max-trie-depth"
        if field == NGRAM_FILL.field and found != NGRAM_FILL.value:
            found, wanted = f"{found} (a draft tree)", "1 (a linear chain)"
        elif found >= least:
            continue
        reasons.append(
            Reason(f"{_flag(field)} {found}", wanted, f"drop {_flag(field)}")
        )
    return reasons


def environment_reasons(environ: Mapping[str, str]) -> list[Reason]:
    """Reasons in the environment: variables that move bits, or may."""
    return variables.reasons(environ)


def gpu_reasons(capability: tuple[int, int] | None) -> list[Reason]:
    """Reasons in the GPU; `capability` is None on a machine without one."""
    if capability in GPU_ARCHS:
        return []
    found = "no CUDA GPU" if capability is None else f"sm{capability[0]}{capability[1]}"
    return [
        Reason(
            found,
            " or ".join(GPU_ARCHS.values()),
            "use a Hopper or workstation Blackwell GPU, or the rehearsal mode for a "
            "look without one",
        )
    ]


def rehearsal_reasons(rehearsal: bool, device: str) -> list[Reason]:
    """Reasons in the rehearsal mode: it leaves out what a GPU is checked for."""
    if not rehearsal or not device.startswith("cuda"):
        return []
    return [
        Reason(
            f"SGLANG_EXACT_TEST_REHEARSAL=1 with --device {device}",
            "the rehearsal mode on the CPU alone: it skips the checks of the GPU",
            "unset SGLANG_EXACT_TEST_REHEARSAL",
        )
    ]


def gpu_mix_reasons(names: Sequence[str]) -> list[Reason]:
    """Reasons in the GPUs of the ranks, by name: all must be of one model."""
    if len(set(names)) < 2:
        return []
    return [
        Reason(
            "ranks on different GPUs: " + ", ".join(names),
            "one GPU model on every rank",
            "choose equal GPUs with CUDA_VISIBLE_DEVICES or --base-gpu-id",
        )
    ]
