# SPDX-License-Identifier: Apache-2.0
"""Self-test of the attention kernels, on the GPU.

Verify rows against single decode rows; a prompt in one piece against the same prompt
cut, beside neighbours, and from a copy of its keys.
"""

from __future__ import annotations

from typing import Any

from sglang_exact.reasons import Reason

# Around a split of 256 keys, inside later ones, and a request without a prefix.
PREFIX_LENGTHS = (0, 1, 255, 256, 257, 510, 900)
# Around the first of the long splits; the interpreter would take minutes for it.
GPU_PREFIX_LENGTHS = (*PREFIX_LENGTHS, 8187)
# Around tiles of 64 keys and of 128 rows, and one step of most of the prompt.
PROMPT_LENGTH = 900
CUTS = ((1,), (63,), (64,), (65, 66), (130, 512, 771), (899,))
FIX = "report GPU, driver and `sglang-exact env`; rows of one tile must not mix"


def compare(
    heads: int,
    kv_heads: int,
    head_dim: int,
    steps: int,
    seed: int,
    device: str,
    prefixes: tuple[int, ...] = PREFIX_LENGTHS,
) -> list[str]:
    """Differences, as text, between verify rows and decode rows; empty if equal.

    One batch with a request for each of `prefixes` (lengths in tokens), `steps` draft
    positions each, is compared with decode, one row at a time. bf16, N(0, 1).
    """
    import torch

    from sglang_exact_kernels.decode_attention import decode_attention, scratch_shapes

    generator = torch.Generator(device=device).manual_seed(seed)
    bs, bound = len(prefixes), max(prefixes) + steps
    slots = sum(prefixes) + bs * steps + 1

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).bfloat16()

    k, v = normal(slots, kv_heads, head_dim), normal(slots, kv_heads, head_dim)
    q = normal(bs * steps, heads, head_dim)
    order = torch.randperm(slots - 1, generator=generator, device=device) + 1
    lengths = torch.tensor((0, *prefixes), device=device)
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
    for r, length in enumerate(prefixes):
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


def compare_prefill(
    heads: int,
    kv_heads: int,
    head_dim: int,
    seed: int,
    device: str,
    cuts: tuple[tuple[int, ...], ...] = CUTS,
) -> list[str]:
    """Differences, as text, between prefills of one prompt; empty if there is none.

    PROMPT_LENGTH tokens in one step, in steps cut at each of `cuts`, and from the
    second step on beside another request; each also from a copy of its keys, where
    this GPU serves one. bf16, N(0, 1).
    """
    import torch

    from sglang_exact_kernels.prefill_attention import (
        copies,
        dense_shape,
        prefill_attention,
    )

    generator = torch.Generator(device=device).manual_seed(seed)
    length = PROMPT_LENGTH

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).bfloat16()

    k, v = (normal(2 * length, kv_heads, head_dim) for _ in range(2))
    q = normal(2 * length, heads, head_dim)
    order = torch.randperm(2 * length, generator=generator, device=device)
    ways: list[torch.Tensor | None] = [None]
    if copies(k.device, head_dim, head_dim):
        # NaN: nothing that a step did not copy may count.
        shape = dense_shape(2 * length, 2, kv_heads, head_dim)
        ways.append(torch.full(shape, float("nan"), dtype=k.dtype, device=device))

    def starts(sizes: list[int]) -> torch.Tensor:
        return torch.tensor([0, *sizes], device=device).cumsum(0).to(torch.int32)

    def step(
        spans: list[tuple[int, int, int]], dense: torch.Tensor | None
    ) -> torch.Tensor:
        """Tokens first .. last of prompts that begin at row `at`; the last's rows."""
        new = torch.cat([torch.arange(at + a, at + b) for at, a, b in spans]).to(device)
        old = torch.cat([torch.arange(at, at + a) for at, a, _ in spans]).to(device)
        sizes = [b - a for _, a, b in spans]
        out = torch.empty_like(q[new])
        prefill_attention(
            q[new],
            k,
            v,
            out,
            qo_indptr=starts(sizes),
            kv_indptr=starts([a for _, a, _ in spans]),
            kv_indices=order[old],
            out_cache_loc=order[new],
            max_extend_len=max(sizes),
            sm_scale=head_dim**-0.5,
            dense=dense,
        )
        return out[-sizes[-1] :]

    whole = step([(0, 0, length)], None).view(torch.int16)
    found = []
    for cut in ((), *cuts):
        edges = [0, *cut, length]
        for dense in ways:
            how = "" if dense is None else ", keys copied"
            for a, b in zip(edges, edges[1:], strict=False):
                neighbour = [(length, 3, 70)] if a else []
                rows = step([*neighbour, (0, a, b)], dense).view(torch.int16)
                count = int((rows != whole[a:b]).sum())
                if count:
                    found.append(
                        f"{count} elements of tokens {a} to {b}, cut at {cut}{how}"
                    )
    return found


def heads_of(model_runner: Any) -> tuple[int, int, int]:
    """Query heads and KV heads of this rank, and head_dim, of the served model."""
    from sglang.srt.runtime_context import get_parallel

    config, tp = model_runner.model_config, get_parallel().attn_tp_size
    return (
        config.get_max_num_attention_heads() // tp,
        config.get_num_kv_heads(tp),
        int(config.head_dim),
    )


def run(model_runner: Any) -> list[Reason]:
    """Verify attention must equal decode attention for the served model's heads."""
    from sglang.srt.runtime_context import get_spec

    tokens = int(get_spec().speculative_num_draft_tokens or 2)
    shape, device = heads_of(model_runner), str(model_runner.device)
    prefixes = PREFIX_LENGTHS if device == "cpu" else GPU_PREFIX_LENGTHS
    return [
        Reason(f"attention self-test: {text}", "decode's bits", FIX)
        for text in compare(*shape, tokens, 1, device, prefixes)
    ]


def run_prefill(model_runner: Any) -> list[Reason]:
    """A cut prompt's prefill must equal the uncut one's, for the same heads."""
    shape, device = heads_of(model_runner), str(model_runner.device)
    return [
        Reason(f"prefill self-test: {text}", "the bits of one step", FIX)
        for text in compare_prefill(*shape, 1, device)
    ]
