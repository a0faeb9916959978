# SPDX-License-Identifier: Apache-2.0
"""Compile decode_attention for sm90 and sm120 and print what it takes, as JSON.

Run as a script, in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import aot
import triton

from sglang_exact_kernels import decode_attention as attention

SHAPES = {"27b": (4, 6, 256), "gqa128": (8, 4, 128), "mha64": (16, 1, 64)}
STRIDES = tuple(f"stride_{name}" for name in ("q", "k", "v", "acc"))
STATS = ("stride_stat_row", "stride_stat_head")


def attend(
    capability: int,
    shape: str,
    tile: attention._Tile | None = None,
    compile_kernel: Any = aot.compile_kernel,
) -> Any:
    kv_heads, group, dim = SHAPES[shape]
    tile = tile or attention._TILES[capability]
    return compile_kernel(
        attention.attend_kernel,
        {
            **dict.fromkeys(("q", "k_buffer", "v_buffer"), "*bf16"),
            "kv_indptr": "*i32",
            **dict.fromkeys(("kv_indices", "out_cache_loc"), "*i64"),
            **dict.fromkeys(("part_acc", "part_stat"), "*fp32"),
            "qk_scale": "fp32",
            **dict.fromkeys(("bs", "T", "tail", *STATS), "i32"),
            **dict.fromkeys(STRIDES, ("i32", "i32")),
        },
        {
            "HKV": kv_heads,
            "GROUP": group,
            "D": dim,
            "DV": dim,
            "BLOCK_M": attention._BLOCK_M,
            "BLOCK_N": tile.block_n,
            "BLOCK_D": triton.next_power_of_2(dim),
            "BLOCK_DV": triton.next_power_of_2(dim),
            "MAX_BS": attention._MAX_BS,
            "TIERS": attention._TIERS,
        },
        capability,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        multiples_of_16=STRIDES,
    )


def main() -> None:
    found = {
        f"{shape} sm{capability}": attend(capability, shape).metadata.shared
        for capability in attention._TILES
        for shape in SHAPES
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
