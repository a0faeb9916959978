# SPDX-License-Identifier: Apache-2.0
"""Self-test: a verify block's attention rows against single decode rows, on the GPU."""

from __future__ import annotations

from typing import Any

from sglang_exact.reasons import Reason

# Around a split of 256 keys, inside a later one, and a request without a prefix.
PREFIX_LENGTHS = (0, 1, 255, 256, 257, 700)
FIX = "report GPU, driver and `sglang-exact env`; rows of one tile must not mix"


def compare(
    heads: int, kv_heads: int, head_dim: int, steps: int, seed: int, device: str
) -> list[str]:
    """Differences, as text, between verify rows and decode rows; empty if equal.

    One batch with every prefix of PREFIX_LENGTHS and `steps` draft positions each is
    compared with decode, one row at a time. bf16, N(0, 1).
    """
    import torch

    from sglang_exact_kernels.decode_attention import decode_attention, scratch_shapes

    generator = torch.Generator(device=device).manual_seed(seed)
    bs, bound = len(PREFIX_LENGTHS), max(PREFIX_LENGTHS) + steps
    slots = sum(PREFIX_LENGTHS) + bs * steps + 1

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).bfloat16()

    k, v = normal(slots, kv_heads, head_dim), normal(slots, kv_heads, head_dim)
    q = normal(bs * steps, heads, head_dim)
    order = torch.randperm(slots - 1, generator=generator, device=device) + 1
    lengths = torch.tensor((0, *PREFIX_LENGTHS), device=device)
    indptr = lengths.cumsum(0).to(torch.int32)
    prefix, block = order[: -bs * steps], order[-bs * steps :]
    shapes = scratch_shapes(bs * steps, heads, head_dim, bound)
    acc, stat = (torch.zeros(s, device=device) for s in shapes)

    def attend(rows: torch.Tensor, indptr: Any, keys: Any, **more: Any) -> torch.Tensor:
        out = torch.empty_like(rows)
        decode_attention(
            rows,
            k,
            v,
            out,
            kv_indptr=indptr,
            kv_indices=keys,
            part_acc=acc,
            part_stat=stat,
            sm_scale=head_dim**-0.5,
            max_context_len=bound,
            **more,
        )
        return out

    out = attend(
        q,
        indptr,
        prefix.contiguous(),
        num_draft_tokens=steps,
        out_cache_loc=block.contiguous(),
    )
    found = []
    for r, length in enumerate(PREFIX_LENGTHS):
        begin = int(indptr[r])
        for i in range(steps):
            row = r * steps + i
            keys = torch.cat(
                [prefix[begin : begin + length], block[r * steps : row + 1]]
            )
            ends = torch.tensor([0, len(keys)], dtype=torch.int32, device=device)
            single = attend(q[row : row + 1].clone(), ends, keys)
            differing = single[0].view(torch.int16) != out[row].view(torch.int16)
            if bool(differing.any()):
                found.append(
                    f"{int(differing.sum())} elements of draft position {i} after "
                    f"{length} tokens"
                )
    return found


def run(model_runner: Any) -> list[Reason]:
    """Verify attention must equal decode attention for the served model's heads."""
    from sglang.srt.runtime_context import get_parallel, get_spec

    tokens = int(get_spec().speculative_num_draft_tokens or 2)
    config, tp = model_runner.model_config, get_parallel().attn_tp_size
    found = compare(
        config.get_max_num_attention_heads() // tp,
        config.get_num_kv_heads(tp),
        int(config.head_dim),
        tokens,
        1,
        str(model_runner.device),
    )
    return [
        Reason(f"attention self-test: {text}", "decode's bits", FIX) for text in found
    ]
