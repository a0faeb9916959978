# SPDX-License-Identifier: Apache-2.0
"""Random prompts in a scattered cache, for the tests of prefill_attention."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_exact_kernels.prefill_attention import dense_shape, prefill_attention
from sglang_exact_kernels.reference import attention_fp64


class Heads(NamedTuple):
    q: int
    kv: int
    dim: int


SMALL = Heads(q=6, kv=2, dim=32)
MODEL_27B = Heads(q=24, kv=4, dim=256)
SHARD_27B = Heads(q=12, kv=2, dim=256)


class Case(NamedTuple):
    """Whole prompts; q [tokens, heads, dim] and slots [tokens] of each request."""

    heads: Heads
    q: list[torch.Tensor]
    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    slots: list[torch.Tensor]

    def step(
        self, spans: list[tuple[int, int, int]], copied: bool = False
    ) -> list[torch.Tensor]:
        """One launch: tokens first .. last of each (request, first, last).

        copied: from a copy of the keys; what the copy leaves out is NaN.
        """
        device = self.k_buffer.device

        def starts(sizes: list[int]) -> torch.Tensor:
            return torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32)

        sizes = [last - first for _, first, last in spans]
        q = torch.cat([self.q[r][a:b] for r, a, b in spans])
        out = torch.full_like(q, float("nan"))
        dense = None
        if copied:
            keys, heads = sum(last for _, _, last in spans), self.heads
            shape = dense_shape(keys + 9, len(spans) + 1, heads.kv, heads.dim)
            dense = torch.full(shape, float("nan"), dtype=q.dtype, device=device)
        prefill_attention(
            q,
            self.k_buffer,
            self.v_buffer,
            out,
            qo_indptr=starts(sizes),
            kv_indptr=starts([first for _, first, _ in spans]),
            kv_indices=torch.cat([self.slots[r][:a] for r, a, _ in spans]),
            out_cache_loc=torch.cat([self.slots[r][a:b] for r, a, b in spans]),
            max_extend_len=max(sizes),
            sm_scale=self.heads.dim**-0.5,
            dense=dense,
        )
        return list(out.split(sizes))

    def whole(self, r: int, copied: bool = False) -> torch.Tensor:
        return self.step([(r, 0, len(self.q[r]))], copied)[0]

    def in_pieces(self, r: int, cuts: list[int], copied: bool = False) -> torch.Tensor:
        edges = [0, *cuts, len(self.q[r])]
        spans = [(r, a, b) for a, b in zip(edges, edges[1:], strict=False)]
        return torch.cat([self.step([span], copied)[0] for span in spans])

    def fp64(self, r: int) -> torch.Tensor:
        rows = [self.slots[r][: i + 1] for i in range(len(self.q[r]))]
        scale = self.heads.dim**-0.5
        return attention_fp64(self.q[r], self.k_buffer, self.v_buffer, rows, scale)


def make_case(
    heads: Heads,
    lengths: list[int],
    device: torch.device,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Random prompts; slots are scattered and every unused slot holds NaN."""
    g = torch.Generator().manual_seed(seed)
    used = sum(lengths)
    slots = torch.randperm(used + 7, generator=g)[:used]
    kv = torch.full((2, used + 7, heads.kv, heads.dim), float("nan"))
    kv[:, slots] = torch.randn(2, used, heads.kv, heads.dim, generator=g)
    q = torch.randn(used, heads.q, heads.dim, generator=g) * 2
    return Case(
        heads,
        list(q.to(device, dtype).split(lengths)),
        kv[0].to(device, dtype),
        kv[1].to(device, dtype),
        list(slots.to(device).split(lengths)),
    )
