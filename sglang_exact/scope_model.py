# SPDX-License-Identifier: Apache-2.0
"""What the overlay supports in a model and its sizes, as reasons.

Asked of the configuration before weights load, of what the host made of it
(`resolved_reasons`), and of the modules that were built (`live_reasons`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang_exact import schemes, scope_families
from sglang_exact.reasons import Reason

if TYPE_CHECKING:
    import torch

ROPE_TYPES = ("default", "mrope", "linear", "dynamic", "llama3", "yarn")
"""Tables fixed at load. longrope picks one by the positions of the whole step
(sglang/srt/layers/rotary_embedding/rope_variant.py:141)."""

MAX_REQUESTS = 256
"""Requests in a step that decode attention takes (its kernel's _MAX_BS)."""

INT32_MAX = 2**31 - 1
CHUNK = 64
"""Tokens per chunk: CHUNK_SIZE of sglang/kernels/ops/attention/fla/chunk_delta_h.py."""

GRAPHS = {"prefill": ("breakable", "disabled"), "decode": ("full", "disabled")}
"""Graph backends under which plain and speculative serving run the same code. Breakable
prefill graphs hold what sees one row at a time; attention and the GDN layers stay
between them and get the real rows alone."""

_UNQUANTIZED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_ROTARY = "sglang.srt.layers.rotary_embedding"


def _of(config: Any, name: str) -> Any:
    """A field of a configuration, which is an object or, from a file, a dict."""
    if isinstance(config, dict):
        return config.get(name)
    return getattr(config, name, None)


def _text(config: Any) -> Any:
    return _of(config, "text_config") or config


def quantized(method: str) -> Reason:
    """The reason in a checkpoint whose layers are `method`, which is not served."""
    served = [scheme.says() for scheme in schemes.SCHEMES]
    return Reason(
        f"a quantized checkpoint ({method})",
        " or ".join(["bfloat16 weights", *served]),
        "use the bfloat16 checkpoint, or one that is quantized in such a way",
    )


def model_reasons(hf_config: Any, dtype: str) -> list[Reason]:
    """Reasons in config.json: architecture, experts, positions, dtype, quantization."""
    reasons = []
    text = _text(hf_config)
    architectures = list(_of(hf_config, "architectures") or [])
    family = scope_families.find(architectures)
    served = (family,) if family else scope_families.FAMILIES
    if not family:
        names = (f"{' or '.join(f.architectures)} ({f.title})" for f in served)
        reasons.append(
            Reason(
                f"model architecture {', '.join(architectures) or 'unknown'}",
                ", ".join(names),
                "serve it without the overlay",
            )
        )
    kind, types = _of(text, "model_type"), [t for f in served for t in f.text_types]
    if kind not in (None, *types):
        reasons.append(
            Reason(
                f"a text model of type {kind}",
                " or ".join(types) + " (no experts)",
                "serve it without the overlay",
            )
        )
    if dtype not in ("bfloat16", "torch.bfloat16"):
        reasons.append(
            Reason(f"model dtype {dtype}", "bfloat16", "pass --dtype bfloat16")
        )
    if _of(hf_config, "compression_config") or _of(text, "compression_config"):
        reasons.append(quantized("compression_config in config.json"))
    found = schemes.config_of(hf_config)
    if found and not schemes.find(found):
        reasons.append(quantized(schemes.shown(found)))
    return [
        *reasons,
        *_rope_reasons(text),
        *_vocabulary_reasons(text),
        *_layer_reasons(text),
    ]


_LAYERS: Mapping[str, str] = {
    "attn_logit_softcapping": "a soft cap of attention",
    "final_logit_softcapping": "a soft cap of the logits",
    "dual_chunk_attention_config": "attention in chunks",
    "attention_chunk_size": "attention in chunks",
}
"""Fields of config.json that ask for layers which no family was compared with."""


def _layer_reasons(text: Any) -> list[Reason]:
    """Reasons in what the layers do: windows, soft caps, other attention.

    Experts show in the architecture, the type and the modules that were built.
    """
    found = {f"{what} ({name})" for name, what in _LAYERS.items() if _of(text, name)}
    window = _of(text, "sliding_window")
    # Without the switch, as in Mistral's, a size alone turns it on.
    switch = _of(text, "use_sliding_window")
    if switch or (switch is None and window):
        found.add(f"sliding windows (sliding_window {window})")
    kinds = set(_of(text, "layer_types") or ())
    strange = sorted(kinds - {"full_attention", "linear_attention"})
    found |= {f"layers of type {kind}" for kind in strange}
    return [
        Reason(
            f"{what} in config.json",
            "full attention, without windows and caps",
            "serve it without the overlay",
        )
        for what in sorted(found)
    ]


def _rope_reasons(text: Any) -> list[Reason]:
    rope = _of(text, "rope_parameters") or _of(text, "rope_scaling")
    kind = None
    if isinstance(rope, dict):
        kind = rope.get("rope_type") or rope.get("type")
    if kind in (None, *ROPE_TYPES):
        return []
    return [
        Reason(
            f"rope_type {kind}",
            " or ".join(ROPE_TYPES) + " (a table that no neighbour's position picks)",
            "serve it without the overlay",
        )
    ]


def _vocabulary_reasons(text: Any) -> list[Reason]:
    """torch's softmax sums a row by its address modulo 16 bytes: four floats."""
    size = _of(text, "vocab_size")
    if not isinstance(size, int) or size % 4 == 0:
        return []
    return [
        Reason(
            f"a vocabulary of {size} tokens",
            "a multiple of 4: in others a row's softmax depends on its place",
            "serve it without the overlay",
        )
    ]


def file_reasons(folder: str) -> list[Reason]:
    """Reasons in the files beside config.json that say how a checkpoint is quantized.

    A look ahead for one complete message; the host's own answer decides.
    """
    if os.path.isfile(os.path.join(folder, "quant_model_description.json")):
        return [quantized("modelslim")]
    try:
        with open(os.path.join(folder, "hf_quant_config.json"), "rb") as file:
            found = json.load(file)
        method = found.get("quantization", found).get("quant_algo")
    except (OSError, ValueError, AttributeError):
        return []
    return [quantized(str(method))] if method else []


def resolved_reasons(cfg: Any, model: Any) -> list[Reason]:
    """Reasons in what the host made of its arguments and the checkpoint.

    `cfg` is the resolved view of ServerArgs, `model` the host's ModelConfig.
    """
    reasons = model_reasons(model.hf_config, str(model.dtype))
    said = any("quantized checkpoint" in reason.found for reason in reasons)
    scheme = schemes.of(model.hf_config)
    served = {None, scheme.config["quant_method"]} if scheme else {None}
    if model.quantization not in served and not said:
        reasons.append(quantized(str(model.quantization)))
    return [
        *reasons,
        *family_reasons(cfg, model.hf_config),
        *graph_reasons(cfg),
        *size_reasons(cfg, model),
    ]


def fill_family(args: Any, hf_config: Any) -> None:
    """Turn the prefix cache off on raw arguments for a family that has none."""
    family = scope_families.find(list(_of(hf_config, "architectures") or []))
    if family and not family.prefix_cache:
        args.disable_radix_cache = True


def family_reasons(cfg: Any, hf_config: Any) -> list[Reason]:
    """Reasons in what is served for some families alone: drafters, cached prefixes."""
    family = scope_families.find(list(_of(hf_config, "architectures") or []))
    if not family:
        return []
    reasons = []
    algorithm = str(cfg.speculative_algorithm or "").upper()
    others = {name for f in scope_families.FAMILIES for name in f.drafters}
    if algorithm in others - set(family.drafters):
        reasons.append(
            Reason(
                f"--speculative-algorithm {algorithm} for {family.title}",
                " or ".join(family.drafters) + " (no other was compared with them)",
                "use one of these, or drop --speculative-algorithm",
            )
        )
    if not cfg.disable_radix_cache and not family.prefix_cache:
        reasons.append(
            Reason(
                f"a prefix cache for {family.title}",
                "none (cached prefixes were compared for GDN hybrids alone)",
                "pass --disable-radix-cache; it is set for a checkpoint that is here",
            )
        )
    return reasons


def graph_reasons(cfg: Any) -> list[Reason]:
    """Reasons in the resolved CUDA graphs, which several arguments decide."""
    reasons = []
    for phase, served in GRAPHS.items():
        found = getattr(cfg.cuda_graph_config, phase).backend
        if found not in served:
            reasons.append(
                Reason(
                    f"{phase} graphs {found}",
                    " or ".join(served),
                    f"drop --cuda-graph-backend-{phase} and the {phase} part of "
                    "--cuda-graph-config",
                )
            )
    # The host fails on it after weights load: no served attention backend takes it.
    size = cfg.cuda_graph_config.prefill.max_context_size
    if prefill_buckets(cfg) and size is not None:
        reasons.append(
            Reason(
                f"prefill graphs of contexts up to {size} tokens",
                "graphs that no context limits",
                "drop --cuda-graph-prefill-max-context and max_context_size of "
                "--cuda-graph-config",
            )
        )
    return reasons


def prefill_buckets(cfg: Any) -> tuple[int, ...]:
    """Rows of the prefill graphs, as the host resolved its arguments; () without them.

    A step of m rows is run as the next bucket, if that is at most 2 * m.
    """
    graphs = cfg.cuda_graph_config.prefill
    return () if graphs.backend == "disabled" else tuple(sorted(graphs.bs or ()))


def most_requests(cfg: Any) -> int:
    """Requests that may be in one step; the rank keeps to MAX_REQUESTS if not given."""
    return int(cfg.max_running_requests or MAX_REQUESTS)


def largest_step(cfg: Any, model: Any) -> int:
    """Prompt tokens that one step may hold, as the host resolved its arguments."""
    if (cfg.chunked_prefill_size or 0) > 0:
        return int(cfg.chunked_prefill_size)
    # Not cut: the first prompt of a step is admitted whole.
    return max(int(cfg.max_prefill_tokens or 0), int(model.context_len))


def step_limit(text: Any, ranks: int, requests: int) -> int:
    """Prompt tokens of one step that the host's kernels can address with 32 bits.

    The widest row of a layer's activations times the tokens, and the states that the
    chunk kernel keeps, one of heads x K x V per 64 tokens and request, stay below 2**31
    elements (triton_gdn_fused_proj.py:198, chunk_delta_h.py:111: int32 products).
    """

    def number(name: str) -> int:
        return int(_of(text, name) or 0)

    heads, head_v = number("linear_num_value_heads"), number("linear_value_head_dim")
    keys = number("linear_num_key_heads") * number("linear_key_head_dim")
    attention = 2 * number("num_attention_heads") + 2 * number("num_key_value_heads")
    head_dim = number("head_dim")
    if not head_dim:
        head_dim = number("hidden_size") // max(number("num_attention_heads"), 1)
    widest = max(
        number("hidden_size"),
        2 * number("intermediate_size") // ranks,
        (2 * keys + 2 * heads * head_v) // ranks,
        attention * head_dim // ranks,
        1,
    )
    limit = INT32_MAX // widest
    state = heads // ranks * number("linear_key_head_dim") * head_v
    if state:
        limit = min(limit, max(INT32_MAX // state - requests, 1) * CHUNK)
    return limit


def size_reasons(cfg: Any, model: Any) -> list[Reason]:
    """Reasons in the resolved sizes: requests in decode, prompt tokens in a step."""
    reasons = []
    requests = most_requests(cfg)
    if requests > MAX_REQUESTS:
        reasons.append(
            Reason(
                f"--max-running-requests {requests}",
                f"{MAX_REQUESTS} or less: decode attention takes no more in a step",
                f"pass --max-running-requests {MAX_REQUESTS}, or drop it",
            )
        )
    step = largest_step(cfg, model)
    text = _text(model.hf_config)
    limit = step_limit(text, cfg.tp_size, min(requests, MAX_REQUESTS))
    if any(bucket > limit for bucket in prefill_buckets(cfg)):
        reasons.append(
            Reason(
                f"prefill graphs of up to {prefill_buckets(cfg)[-1]} rows",
                f"{limit} or less: the host's kernels address this model's rows with "
                "32 bits",
                "drop --cuda-graph-max-bs-prefill, --cuda-graph-bs-prefill and the "
                "prefill part of --cuda-graph-config",
            )
        )
    if step > limit:
        reasons.append(
            Reason(
                f"up to {step} prompt tokens in a step (--chunked-prefill-size "
                f"{cfg.chunked_prefill_size})",
                f"{limit} or less: the host's kernels address this model's rows and "
                "states with 32 bits",
                f"pass --chunked-prefill-size {min(limit // CHUNK * CHUNK, 8192)}",
            )
        )
    return reasons


def capability_reasons(
    hf_config: Any, capability: tuple[int, int] | None
) -> list[Reason]:
    """Reasons in the GPU, if one is here, for the scheme of a quantised checkpoint."""
    scheme = schemes.of(hf_config)
    if not scheme or capability is None or capability in scheme.capabilities:
        return []
    return [
        Reason(
            f"{scheme.title} on sm{capability[0]}{capability[1]}",
            scheme.says(),
            "use the bfloat16 checkpoint, or such a GPU",
        )
    ]


def live_reasons(
    model: torch.nn.Module,
    kv_dtype: torch.dtype,
    scheme: schemes.Scheme | None = None,
) -> list[Reason]:
    """Reasons in the target as it was built: modules, their methods, dtypes, KV cache.

    `scheme` is that of its checkpoint, None for bfloat16. A vision tower is left out:
    no request reaches it.
    """
    dtypes = {"torch.bfloat16", "torch.float32"}
    family = scope_families.find([type(model).__name__])
    tables = (scope_families.COMMON, family.modules if family else {})
    strange: dict[str, str] = {}
    for name, module in model.named_modules():
        if "visual" in name.split("."):
            continue
        folder, kind = type(module).__module__, type(module).__name__
        classes = [name for t in tables for name in t.get(folder, "").split()]
        known = kind in classes or folder.startswith(_ROTARY)
        if not known:
            strange.setdefault(f"a module {folder}.{kind}", name or "the model itself")
        # Gate, up and activation in one kernel for few rows; sm100 has it today.
        if getattr(getattr(module, "dual_gemm", None), "mode", None) is not None:
            strange.setdefault("another kernel for 16 rows and fewer", name)
        method = type(getattr(module, "quant_method", None)).__name__
        ours = bool(scheme and method == scheme.method)
        if scheme and ours and (wrong := scheme.wrong(module)):
            strange.setdefault(wrong, name)
        elif scheme and method == scheme.cache:
            strange.setdefault("attention with scales of a quantized KV cache", name)
        elif not ours and method not in ("NoneType", *_UNQUANTIZED):
            strange.setdefault(f"layers of {method}", name)
        kept = dtypes | {scheme.weights} if scheme and ours else dtypes
        for parameter in module.parameters(recurse=False):
            if str(parameter.dtype) not in kept:
                strange.setdefault(f"weights of {parameter.dtype}", name)
    reasons = [
        Reason(
            f"{what} in the loaded model (first {name})",
            f"the dense {scheme.title if scheme else 'bfloat16'} layers that were "
            "compared",
            "use a dense checkpoint that is served, and drop what changes its layers",
        )
        for what, name in strange.items()
    ]
    return reasons + cache_reasons(kv_dtype)


def cache_reasons(dtype: torch.dtype) -> list[Reason]:
    """Reasons in the dtype of the KV cache; `auto` is what the checkpoint asks for."""
    if str(dtype) == "torch.bfloat16":
        return []
    return [
        Reason(
            f"a KV cache of {dtype}",
            "torch.bfloat16",
            "pass --kv-cache-dtype bfloat16",
        )
    ]
