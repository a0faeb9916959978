# SPDX-License-Identifier: Apache-2.0
"""Static tile tables of the small-M GEMM, keyed by capability and (N, K).

A tile is a function of (N, K, dtype, capability) and never of M: that is what makes a
row's bits independent of how many rows share the call. Nothing is tuned at run time.
Each row says where its numbers come from; ``measured`` is True only for a tile that
won a sweep on a device of that capability (scripts/sweep_small_m.py), and False for
one that was reasoned out. Either kind is compared with DeepGEMM at start-up.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from sglang_exact_kernels import arch

__all__ = [
    "BLOCK_M",
    "SHAPES_27B",
    "SHAPES_27B_TP2",
    "SHAPES_DRAFT",
    "SHAPES_DRAFT_TP2",
    "Tile",
    "prefers_deep_gemm",
    "small_m_tile",
]

BLOCK_M = 16
"""Rows of a tile: the M of mma.m16n8k16. Larger calls take more tiles, not larger."""

SHAPES_27B = (
    (16384, 5120),  # GDN q, k, v, z
    (96, 5120),  # GDN a, b
    (5120, 6144),  # GDN and attention output
    (14336, 5120),  # attention q with gate, k, v
    (34816, 5120),  # gate and up
    (5120, 17408),  # down
    (248320, 5120),  # lm_head
)
"""(N, K) of the 27B target's linear layers at one rank."""

SHAPES_DRAFT = (
    (6144, 5120),  # q, k, v
    (5120, 4096),  # attention output
    (34816, 5120),  # gate and up
    (5120, 17408),  # down
    (5120, 25600),  # fc over five captured hidden states
)
"""(N, K) of the DFLASH draft's linear layers at one rank."""

SHAPES_27B_TP2 = (
    (8192, 5120),  # GDN q, k, v, z
    (48, 5120),  # GDN a, b
    (5120, 3072),  # GDN and attention output, summed over ranks
    (7168, 5120),  # attention q with gate, k, v
    (17408, 5120),  # gate and up
    (5120, 8704),  # down, summed over ranks
    (124160, 5120),  # lm_head
)
"""(N, K) of one of two ranks: columns, or rows of the summed ones, are halved."""

SHAPES_DRAFT_TP2 = (
    (3072, 5120),  # q, k, v
    (5120, 2048),  # attention output, summed over ranks
    (17408, 5120),  # gate and up
    (5120, 8704),  # down, summed over ranks
    (5120, 25600),  # fc, whole on each rank
)
"""(N, K) of the DFLASH draft's linear layers at one of two ranks."""


class Tile(NamedTuple):
    """Launch shape of one (N, K).

    `swap_ab` makes N the M of the MMA, so that 64 rows of W meet wgmma on sm90.
    `pdl` launches with programmatic stream serialisation and starts fetching W into
    L2 before the previous kernel ends.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap_ab: bool = False
    pdl: bool = False
    measured: bool = False
    source: str = ""

    @property
    def smem_bytes(self) -> int:
        """Shared memory of the load pipeline in bytes (bf16 operands)."""
        return self.num_stages * (self.block_n + BLOCK_M) * self.block_k * 2


_SM90_RULE = (
    "rule: 132 SMs at 4.3 TB/s need about 30 KiB of loads in flight per SM to cover "
    "1 us of latency; 3 stages of 32 x 256 give 48 KiB per block"
)
_SM120_RULE = (
    "rule: 188 SMs at 1.8 TB/s need about 8 KiB of loads in flight per SM; 2 stages "
    "of 32 x 128 give 16 KiB per block, and two blocks fit into 100 KiB of an SM"
)

_DEFAULT = {
    90: Tile(32, 256, 4, 4, source=_SM90_RULE),
    120: Tile(32, 128, 4, 3, source=_SM120_RULE),
}

_NARROW = {
    90: Tile(16, 512, 2, 4, source="rule: few columns, so more blocks and longer rows"),
    120: Tile(16, 256, 2, 4, source="rule: few columns, so more blocks"),
}
_NARROW_N = 1024
"""Below this N a 32-column tile leaves most of 132 to 188 SMs without a block."""


def _swept(
    block_n: int,
    block_k: int,
    num_warps: int,
    num_stages: int,
    swap_ab: bool = False,
    pdl: bool = False,
) -> Tile:
    """A tile that won a sweep; `_sourced` says which."""
    numbers = (block_n, block_k, num_warps, num_stages, swap_ab, pdl)
    return Tile(*numbers, measured=True)


def _sourced(
    table: dict[tuple[int, int], Tile | None], source: str
) -> dict[tuple[int, int], Tile | None]:
    """The table with the name of its sweep in every tile."""
    return {s: t and t._replace(source=source) for s, t in table.items()}


# sweep: begin (written by scripts/sweep_small_m.py --write-tiles)
_SWEEP = "NVIDIA H200, 2026-11-29, scripts/sweep_small_m.py"
_SWEPT_90: dict[tuple[int, int], Tile | None] = {
    (16384, 5120): _swept(128, 64, 4, 6, swap_ab=True),
    (96, 5120): None,
    (5120, 6144): _swept(64, 256, 4, 4),
    (14336, 5120): _swept(128, 64, 4, 6, swap_ab=True),
    (34816, 5120): _swept(32, 256, 4, 4),
    (5120, 17408): _swept(64, 256, 4, 4),
    (248320, 5120): _swept(32, 256, 4, 4),
    (6144, 5120): _swept(64, 128, 4, 5, swap_ab=True),
    (5120, 4096): _swept(64, 128, 4, 5, swap_ab=True),
    (5120, 25600): _swept(64, 256, 4, 4),
}
# sweep: end

# sweep tp2: begin (written by scripts/sweep_small_m.py --tp 2 --write-tiles)
_SWEEP_TP2 = "NVIDIA H200, 2026-11-29, scripts/sweep_small_m.py --tp 2"
_SWEPT_90_TP2: dict[tuple[int, int], Tile | None] = {
    (8192, 5120): _swept(64, 256, 4, 4),
    (48, 5120): None,
    (5120, 3072): _swept(64, 128, 4, 5, swap_ab=True),
    (7168, 5120): _swept(64, 128, 4, 5, swap_ab=True),
    (17408, 5120): _swept(128, 64, 4, 6, swap_ab=True),
    (5120, 8704): _swept(64, 256, 4, 4),
    (124160, 5120): _swept(64, 128, 4, 5, swap_ab=True),
    (3072, 5120): None,
    (5120, 2048): _swept(64, 128, 4, 5, swap_ab=True),
}
# sweep tp2: end

_TABLES: dict[int, dict[tuple[int, int], Tile | None]] = {
    90: _sourced(_SWEPT_90, _SWEEP) | _sourced(_SWEPT_90_TP2, _SWEEP_TP2),
    120: {},
}
"""None: DeepGEMM was faster there, by more than 3 % (results/kernels), or no sweep has
been run; on sm120 no shape has been swept and all take the rule."""

SMEM_LIMIT = {90: 227 * 1024, 120: 99 * 1024}
"""Shared memory one block may use in bytes (CUDA programming guide, 9.0 and 12.0)."""


def prefers_deep_gemm(n: int, k: int, device: torch.device) -> bool:
    """Whether W[n, k] is left to DeepGEMM, which is faster there or was not beaten."""
    table = arch.pick(_TABLES, device)
    return (n, k) in table and table[n, k] is None


@functools.cache
def small_m_tile(
    n: int, k: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Tile:
    """The tile of W[n, k] on `device`; the default rule where the table has no row.

    Raises ValueError for a dtype other than bfloat16 or a GPU without a table.
    """
    if dtype is not torch.bfloat16:
        raise ValueError(
            f"found dtype {dtype}, expected torch.bfloat16: only bf16 has tiles"
        )
    listed = arch.pick(_TABLES, device).get((n, k))
    if listed is not None:
        return listed
    return arch.pick(_NARROW if n < _NARROW_N else _DEFAULT, device)
