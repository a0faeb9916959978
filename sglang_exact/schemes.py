# SPDX-License-Identifier: Apache-2.0
"""Which quantised checkpoints are served, one row a scheme; whoever asks reads the row.

A scheme is served where a row's bits do not depend on the number of rows of its GEMM
and of the kernel that quantises its activations. The reference is plain decoding of the
same checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Scheme(NamedTuple):
    """Linear layers of one number format; what the row does not name stays bfloat16.

    Attributes:
        name: in attestations, and of `--quantization` of the proofs.
        title: for readers.
        config: what config.json's `quantization_config` says of it.
        others: its further fields, and the values that they may have; any if empty.
        method: the host's class of its linear layers.
        weights: dtype of their weights.
        capabilities: compute capabilities on which its kernels were compared.
        wrong: of a layer that was built, why it runs other kernels; "" if it does not.
        cache: the host's class that gives attention the scales of a quantised KV cache.
        proved: whole servers were compared on a GPU; until then a server of it attests
            `unverified`.
        kept: the field with the names of layers that stay bfloat16.
        turned: whether a weight is [K, N] once it was loaded, and not [N, K].
    """

    name: str
    title: str
    config: Mapping[str, object]
    others: Mapping[str, tuple[object, ...]]
    method: str
    weights: str
    capabilities: tuple[tuple[int, int], ...]
    wrong: Callable[[Any], str]
    cache: str
    proved: bool = False
    kept: str = "modules_to_not_convert"
    turned: bool = False

    def shape(self, layer: Any) -> tuple[int, int]:
        """(N, K) of a layer that was loaded."""
        n, k = layer.weight.shape
        return (k, n) if self.turned else (n, k)

    def says(self) -> str:
        """What a checkpoint of this scheme has, for a message."""
        fields = ", ".join(f"{name} {value}" for name, value in self.config.items())
        places = ", ".join(f"sm{major}{minor}" for major, minor in self.capabilities)
        return f"{self.title} ({fields}) on {places}"


_DEEP_GEMM = "deepgemm_w8a8_block_fp8_linear_with_fallback"


def _block_fp8_wrong(layer: Any) -> str:
    """Why a layer would not run on DeepGEMM's block FP8 kernel."""
    method = layer.quant_method
    linear = method.w8a8_block_fp8_linear
    linear = getattr(linear, "func", linear)
    name = getattr(linear, "__name__", str(linear))
    if method.use_marlin or method.block_fp8_as_mxfp8 or name != _DEEP_GEMM:
        return f"block FP8 layers on {'Marlin' if method.use_marlin else name}"
    n, k = layer.weight.shape
    if n % 64 or k % 128:
        # The host hands these to another kernel (fp8_utils.py:1459).
        return f"a block FP8 layer of N = {n}, K = {k}, which DeepGEMM does not take"
    if str(layer.weight_scale_inv.dtype) != "torch.float32":
        return f"block FP8 scales of {layer.weight_scale_inv.dtype}"
    return ""


def _int8_wrong(layer: Any) -> str:
    """Why a layer would not run on sgl_kernel's int8_scaled_mm."""
    k, n = layer.weight.shape
    if str(layer.weight.dtype) != "torch.int8" or layer.weight.stride(0) != 1:
        return f"INT8 layers with other weights ({layer.weight.dtype})"
    if n % 8 or k % 16:
        return f"an INT8 layer of N = {n}, K = {k}, which the kernel does not take"
    scale = layer.weight_scale
    if str(scale.dtype) != "torch.float32" or scale.numel() != n:
        return f"{scale.numel()} INT8 scales of {scale.dtype} for {n} columns"
    return ""


SCHEMES = (
    Scheme(
        "fp8-block",
        "block FP8",
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        {
            "fmt": ("e4m3",),
            "modules_to_not_convert": (),
            "ignored_layers": (),
            "packed_modules_mapping": (),
        },
        method="Fp8LinearMethod",
        weights="torch.float8_e4m3fn",
        capabilities=((9, 0),),
        wrong=_block_fp8_wrong,
        cache="Fp8KVCacheMethod",
    ),
    # Sums of integers have one value in any order; the scales follow, in float32. The
    # quantiser (kernels/ops/quantization/int8_kernel.py) has one program a row.
    Scheme(
        "int8-w8a8",
        "INT8 weights and activations",
        {"quant_method": "w8a8_int8"},
        {"is_dynamic": (True,), "ignore": (), "packed_modules_mapping": ()},
        method="W8A8Int8LinearMethod",
        weights="torch.int8",
        capabilities=((9, 0),),
        wrong=_int8_wrong,
        # The host's method has none.
        cache="",
        kept="ignore",
        turned=True,
    ),
)
BY_NAME = {scheme.name: scheme for scheme in SCHEMES}


def config_of(hf_config: Any) -> Mapping[str, Any]:
    """`quantization_config` of a configuration, an object or from a file a dict; or {}.

    A model with a vision tower may keep it beside its text model's other fields.
    """

    def of(config: Any, name: str) -> Any:
        if isinstance(config, Mapping):
            return config.get(name)
        return getattr(config, name, None)

    text = of(hf_config, "text_config") or hf_config
    found = of(hf_config, "quantization_config") or of(text, "quantization_config")
    if found is not None and not isinstance(found, Mapping):
        found = found.to_dict()
    return found or {}


def find(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a `quantization_config`; None for one that is not served."""
    for scheme in SCHEMES:
        rest = {k: v for k, v in config.items() if k not in scheme.config}
        if (
            all(config.get(name) == value for name, value in scheme.config.items())
            and rest.keys() <= scheme.others.keys()
            and all(
                not scheme.others[name] or value in scheme.others[name]
                for name, value in rest.items()
            )
        ):
            return scheme
    return None


def of(hf_config: Any) -> Scheme | None:
    """The scheme of a model's configuration; None for bfloat16, or one not served."""
    return find(config_of(hf_config))


def shown(config: Mapping[str, Any]) -> str:
    """A `quantization_config` in a message, without its lists of layers."""
    fields = [
        f"{name} {value}"
        for name, value in config.items()
        if name != "quant_method" and not isinstance(value, (dict, list))
    ]
    blocks = config.get("weight_block_size")
    fields += [f"weight_block_size {blocks}"] if blocks else []
    method = config.get("quant_method", "unknown method")
    return ", ".join([str(method), *sorted(fields)])


def drop_unit_scales(model: Any, scheme: Scheme | None) -> None:
    """Take scales of 1 from the attention layers of a model that was loaded.

    A checkpoint without them gets them all the same, and with a bfloat16 cache they
    only cost a division of each key. Other ones stay, and are refused as strange.
    """
    for module in model.modules() if scheme else ():
        method = type(getattr(module, "quant_method", None)).__name__
        if scheme and method == scheme.cache and _scales(module) == (1.0, 1.0):
            module.k_scale = module.v_scale = None
            module.k_scale_float = module.v_scale_float = None
            # Or new weights would set them again.
            module.quant_method = None


def _scales(attention: Any) -> tuple[object, object]:
    return attention.k_scale_float, attention.v_scale_float
