# SPDX-License-Identifier: Apache-2.0
"""The architectures that are served, one row a family; whoever asks reads the row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Fill(NamedTuple):
    """A server argument that is set if not given: the host's default and our value.

    One that is `fixed` is refused with any other value.
    """

    field: str
    host_default: object
    value: object
    why: str
    fixed: bool = True


class Family(NamedTuple):
    """Models of one build, compared as one.

    Attributes:
        name: of its tiny model in `rehearsal.models.TARGETS`.
        title: for readers, in the plural.
        architectures: of config.json; also the host's classes of the whole model.
        text_types: `model_type` of its text model, where the configuration has one.
        modules: the host's classes that it is built of beside COMMON, by module.
        self_tests: hooks whose kernels are compared at start-up (`selftest.run`).
        fills: its arguments in `scope.FILLS`. The checkpoint may not be there yet when
            they are filled in, so each must be harmless to the other families.
        grid: tokens; a prompt is cut at multiples of it. 1: anywhere.
        drafters: --speculative-algorithm as the host resolves it; what was compared.
        prefix_cache: whether cached prefixes were compared with computed ones.
    """

    name: str
    title: str
    architectures: tuple[str, ...]
    text_types: tuple[str, ...]
    modules: Mapping[str, str]
    self_tests: tuple[str, ...]
    fills: tuple[Fill, ...] = ()
    grid: int = 1
    drafters: tuple[str, ...] = ()
    prefix_cache: bool = False


COMMON: Mapping[str, str] = {
    "torch.nn.modules.container": "ModuleList",
    "sglang.srt.layers.linear": """ColumnParallelLinear MergedColumnParallelLinear
        QKVParallelLinear RowParallelLinear""",
    "sglang.srt.layers.vocab_parallel_embedding": """VocabParallelEmbedding
        ParallelLMHead""",
    "sglang.srt.layers.activation": "SiluAndMul",
    "sglang.srt.layers.radix_attention": "RadixAttention",
    "sglang.srt.layers.logits_processor": "LogitsProcessor",
    "sglang.srt.layers.pooler": "Pooler",
}
"""Classes of every family beside its vision tower and rotary embeddings."""

_LLAMA = """LlamaForCausalLM LlamaModel LlamaDecoderLayer LlamaAttention LlamaMLP"""


def _dense(
    name: str,
    title: str,
    modules: Mapping[str, str],
    drafters: tuple[str, ...] = ("DFLASH", "NGRAM"),
) -> Family:
    """A row of attention-only layers; config.json says `name` as its model_type.

    Prompts may be cut anywhere: a row of prefill attention sums its keys in tiles at
    fixed positions (`selftest.attention.CUTS`), and no other layer sees two rows.
    """
    return Family(
        name,
        title,
        (f"{name.capitalize()}ForCausalLM",),
        (name,),
        {**modules, "sglang.srt.layers.layernorm": "RMSNorm"},
        ("decode_attention", "prefill_attention"),
        drafters=drafters,
    )


FAMILIES = (
    Family(
        "qwen3_5",
        "dense GDN hybrids",
        ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        # The host builds experts for the others (sglang/srt/models/qwen3_5.py:257).
        ("qwen3_5_text", "qwen3_5"),
        {
            "sglang.srt.models.qwen3_5_text": "Qwen3_5ForCausalLM",
            "sglang.srt.models.qwen3_5": """Qwen3_5ForCausalLM
                Qwen3_5ForConditionalGeneration Qwen3_5GatedDeltaNet
                Qwen3_5LinearDecoderLayer Qwen3_5AttentionDecoderLayer""",
            "sglang.srt.models.qwen2_moe": "Qwen2MoeMLP",
            "sglang.srt.layers.layernorm": "GemmaRMSNorm",
            "sglang.kernels.ops.attention.fla.layernorm_gated": "RMSNorm",
            "sglang.srt.layers.radix_linear_attention": "RadixLinearAttention",
        },
        ("gdn_verify", "prefix_snapshot", "decode_attention", "prefill_attention"),
        (
            Fill(
                "mamba_ssm_dtype", None, "float32", "verify keeps the state in float32"
            ),
            Fill(
                "mamba_radix_cache_strategy",
                "auto",
                "extra_buffer",
                "a cached prefix has the state of its last cut",
                fixed=False,
            ),
        ),
        # CHUNK_SIZE of sglang/kernels/ops/attention/fla/chunk_delta_h.py.
        grid=64,
        drafters=("DFLASH", "DSPARK", "EAGLE", "NEXTN", "NGRAM"),
        prefix_cache=True,
    ),
    _dense(
        "qwen3",
        "dense Qwen3",
        {
            "sglang.srt.models.qwen3": """Qwen3ForCausalLM Qwen3Model Qwen3DecoderLayer
                Qwen3Attention""",
            "sglang.srt.models.qwen2": "Qwen2MLP",
        },
    ),
    _dense("llama", "dense Llama", {"sglang.srt.models.llama": _LLAMA}),
    _dense(
        "qwen2",
        "dense Qwen2 and Qwen2.5",
        {
            "sglang.srt.models.qwen2": """Qwen2ForCausalLM Qwen2Model Qwen2DecoderLayer
                Qwen2Attention Qwen2MLP""",
        },
        # The host's class does not hand out the hidden states that DFLASH reads.
        drafters=("NGRAM",),
    ),
    _dense(
        "mistral",
        "dense Mistral without a window",
        {
            "sglang.srt.models.mistral": "MistralForCausalLM",
            "sglang.srt.models.llama": _LLAMA,
        },
    ),
)


def find(architectures: Iterable[str]) -> Family | None:
    """The family of a model by its architectures, or its class; None if not served."""
    names = set(architectures)
    for family in FAMILIES:
        if names & set(family.architectures):
            return family
    return None


def of(hf_config: Any) -> Family:
    """The family of a model that was let in.

    Raises:
        LookupError: it is of none.
    """
    architectures = list(hf_config.architectures or ())
    if family := find(architectures):
        return family
    raise LookupError(
        f"found a model of architecture {architectures}, expected one that "
        "scope_families lists; fix: report this, the start-up check let it in"
    )
