# SPDX-License-Identifier: Apache-2.0
"""Self-test: GDN verify and commit against the host's decode kernel, on the GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang_exact.reasons import Reason

# Gate logits: ordinary ones, gates near 1 and near 0, and softplus past its
# threshold of 20, where the kernel takes another branch.
GATE_RANGES = ((-4.0, 4.0), (-60.0, -20.0), (18.0, 40.0))
FIX = (
    "report GPU, driver and `sglang-exact env`; the compiler on this machine gives "
    "the two kernels different arithmetic"
)


class Shape(NamedTuple):
    """GDN sizes of one rank: H key heads, HV value heads, K and V head dims."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int


# What a model with GDN layers says of their shape.
SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)


def shape_of(model_runner: Any) -> Shape:
    """The GDN shape that this rank serves."""
    from sglang.srt.runtime_context import get_parallel

    config = model_runner.model_config.hf_text_config
    ranks = int(get_parallel().attn_tp_size)
    return Shape(
        int(config.linear_num_key_heads) // ranks,
        int(config.linear_num_value_heads) // ranks,
        int(config.linear_key_head_dim),
        int(config.linear_value_head_dim),
    )


def _inputs(
    shape: Shape, num_tokens: int, gates: tuple[float, float], seed: int, device: str
) -> dict[str, Any]:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    h, hv, k, v = shape

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).bfloat16()

    def uniform(low: float, high: float, *size: int) -> torch.Tensor:
        raw = torch.rand(size, generator=generator, device=device)
        return (raw * (high - low) + low).bfloat16()

    return {
        "mixed_qkv": normal(num_tokens, 2 * h * k + hv * v),
        "a": uniform(*gates, num_tokens, hv),
        "b": uniform(-8.0, 8.0, num_tokens, hv),
        "A_log": uniform(0.0, 2.7, hv).float(),
        "dt_bias": uniform(-4.0, 1.0, hv).float(),
    }


def _step_by_step(data: dict[str, Any], states: Any, bs: int, steps: int) -> Any:
    """Outputs [bs * steps, HV, V] and states [bs, steps, HV, V, K] of plain decode."""
    import torch
    from sglang.kernels.ops.attention.fla.fused_recurrent import (
        fused_recurrent_gated_delta_rule_packed_decode as decode,
    )

    hv, v, k = states.shape[-3:]
    pool = states.clone()
    indices = torch.arange(bs, dtype=torch.int32, device=pool.device)
    rows = {n: data[n].view(bs, steps, -1) for n in ("mixed_qkv", "a", "b")}
    outputs, kept = [], []
    for t in range(steps):
        out = rows["mixed_qkv"].new_empty(bs, 1, hv, v)
        decode(
            mixed_qkv=rows["mixed_qkv"][:, t].contiguous(),
            a=rows["a"][:, t].contiguous(),
            b=rows["b"][:, t].contiguous(),
            A_log=data["A_log"],
            dt_bias=data["dt_bias"],
            scale=k**-0.5,
            initial_state=pool,
            out=out,
            ssm_state_indices=indices,
            use_qk_l2norm_in_kernel=True,
        )
        outputs.append(out)
        kept.append(pool[:bs].clone())
    return torch.stack(outputs, 1).reshape(bs * steps, hv, v), torch.stack(kept, 1)


def _committed(states: Any, records: Any) -> Any:
    """States [bs, steps, HV, V, K] after each accepted length, by `gdn_commit`."""
    import torch

    from sglang_exact_kernels.gdn_commit import gdn_commit

    bs, steps = records.shape[:2]
    rows = torch.arange(bs, dtype=torch.int32, device=states.device)
    kept = []
    for step in range(steps):
        pool = states.clone()
        last = torch.full_like(rows, step)
        gdn_commit(
            pool[None],
            records[None],
            cache_indices=rows,
            record_rows=rows,
            last_steps=last,
        )
        kept.append(pool)
    return torch.stack(kept, 1)


def compare(shape: Shape, bs: int, steps: int, seed: int, device: str) -> list[str]:
    """Where verify and commit differ from T decode steps, as text; empty if equal."""
    import torch

    from sglang_exact_kernels.gdn_verify import gdn_verify, record_width

    h, hv, k, v = shape
    width = record_width(h, hv, k, v)
    found = []
    for gates in GATE_RANGES:
        data = _inputs(shape, bs * steps, gates, seed, device)
        generator = torch.Generator(device=device).manual_seed(seed + 1)
        states = torch.randn((bs, hv, v, k), generator=generator, device=device)
        records = torch.full((bs, steps, width), float("nan"), device=device)
        indices = torch.arange(bs, dtype=torch.int32, device=device)
        out = gdn_verify(
            data["mixed_qkv"],
            data["a"],
            data["b"],
            data["A_log"],
            data["dt_bias"],
            ssm_states=states,
            cache_indices=indices,
            records=records,
            record_rows=indices,
            num_draft_tokens=steps,
            num_k_heads=h,
            scale=k**-0.5,
        )
        want_out, want_states = _step_by_step(data, states, bs, steps)
        for name, ours, theirs, kind in (
            ("output", out.reshape(want_out.shape), want_out, torch.int16),
            ("state", _committed(states, records), want_states, torch.int32),
        ):
            differing = int((ours.view(kind) != theirs.view(kind)).sum())
            if differing:
                found.append(
                    f"{name}: {differing} of {ours.numel()} elements differ at "
                    f"bs {bs}, {steps} draft tokens, gate logits in {gates}"
                )
    return found


def run(model_runner: Any) -> list[Reason]:
    """GDN verify must equal plain decode for the shape this rank serves."""
    from sglang.srt.runtime_context import get_spec

    tokens = get_spec().speculative_num_draft_tokens
    if not tokens:
        return []
    config = model_runner.model_config.hf_text_config
    missing = [name for name in SIZES if not hasattr(config, name)]
    if missing:
        return [
            Reason(
                f"a model without {', '.join(missing)} in its configuration",
                "a hybrid with GDN layers: speculation was compared on these alone",
                "use a supported dense GDN hybrid",
            )
        ]
    shape, device = shape_of(model_runner), str(model_runner.device)
    found = compare(shape, 1, int(tokens), 1, device)
    found += compare(shape, 3, int(tokens), 2, device)
    return [
        Reason(f"GDN verify self-test: {text}", "decode's bits", FIX) for text in found
    ]
