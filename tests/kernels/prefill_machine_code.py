# SPDX-License-Identifier: Apache-2.0
"""Compile prefill_attention for sm90 and sm120 and print what it takes, as JSON.

"copied" entries are kernels that work on a copy of the keys, "specialised" is sm90's.

Run as a script, in a process without TRITON_INTERPRET. For each shape: bytes of shared
memory, and per loop that multiplies, loads and stores of spilled registers.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import aot
import triton
from triton.experimental.gluon._runtime import GluonASTSource

from sglang_exact_kernels import prefill_attention as prefill
from sglang_exact_kernels import prefill_attention_sm90 as sm90

SHAPES = {"27b": (6, 256), "gqa128": (4, 128), "mha64": (1, 64)}
STRIDES = tuple(f"stride_{name}" for name in ("q", "k", "v", "out"))


def compiled(capability: int, shape: str, sass: bool) -> Any:
    group, dim = SHAPES[shape]
    tile = prefill._TILES[capability]
    block_d = triton.next_power_of_2(dim)
    compile_kernel = aot.compile_sass if sass else aot.compile_kernel
    return compile_kernel(
        prefill.paged_kernel,
        {
            **dict.fromkeys(("q", "k_buffer", "v_buffer", "out"), "*bf16"),
            **dict.fromkeys(("qo_indptr", "kv_indptr"), "*i32"),
            **dict.fromkeys(("kv_indices", "out_cache_loc"), "*i64"),
            "qk_scale": "fp32",
            "blocks": "i32",
            **dict.fromkeys(STRIDES, ("i32", "i32")),
        },
        {
            "GROUP": group,
            "D": dim,
            "DV": dim,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_D": block_d,
            "BLOCK_DV": block_d,
        },
        capability,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        multiples_of_16=STRIDES,
    )


def compiled_dense(capability: int, shape: str, sass: bool) -> Any:
    group, dim = SHAPES[shape]
    tile = prefill._DENSE_TILES[capability]
    strides = (STRIDES[0], STRIDES[-1])
    compile_kernel = aot.compile_sass if sass else aot.compile_kernel
    return compile_kernel(
        prefill.dense_kernel,
        {
            **dict.fromkeys(("q", "out"), "*bf16"),
            **dict.fromkeys(
                ("k_desc", "v_desc"), f"tensordesc<bf16[{tile.block_n},{dim}]>"
            ),
            **dict.fromkeys(("qo_indptr", "kv_indptr"), "*i32"),
            "qk_scale": "fp32",
            **dict.fromkeys(("blocks", "rows"), "i32"),
            **dict.fromkeys(strides, ("i32", "i32")),
        },
        {
            "GROUP": group,
            "D": dim,
            "PAD_ROWS": prefill.PAD,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
        },
        capability,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        multiples_of_16=strides,
    )


def compiled_sm90(sass: bool) -> Any:
    group, dim = SHAPES["27b"]
    strides = (STRIDES[0], STRIDES[-1])
    sizes = dict(sm90.LAUNCH)
    warps = sizes.pop("num_warps")
    box = f"tensordesc<bf16[{sizes['BLOCK_N']},{dim}],{sm90.SHARED!r}>"
    compile_kernel = aot.compile_sass if sass else aot.compile_kernel
    return compile_kernel(
        sm90.kernel,
        {
            **dict.fromkeys(("q", "out"), "*bf16"),
            **dict.fromkeys(("k_desc", "v_desc"), box),
            **dict.fromkeys(("qo_indptr", "kv_indptr"), "*i32"),
            "scale": "fp32",
            **dict.fromkeys(("blocks", "rows"), "i32"),
            **dict.fromkeys(strides, ("i32", "i32")),
        },
        {
            "GROUP": group,
            "D": dim,
            "PAD_ROWS": prefill.PAD,
            **sizes,
        },
        90,
        num_warps=warps,
        num_stages=1,
        multiples_of_16=strides,
        source_class=GluonASTSource,
    )


def unguarded_arrivals(ptx: str) -> int:
    """Arrivals that no bar.sync of the warp group directly precedes.

    Without one a tile may be overwritten that another warp of the group still reads.
    """
    steps = re.findall(r"\bbar\.sync\b|mbarrier\.arrive\.shared", ptx)
    pairs = zip(["", *steps], steps, strict=False)
    return sum(b.startswith("mbarrier") and a != "bar.sync" for a, b in pairs)


def loop_spills(sass: str) -> list[int]:
    """LDL and STL in each innermost loop that holds tensor core instructions."""
    lines = sass.splitlines()
    labels: dict[str, int] = {}
    found, ends = [], -1
    for i, line in enumerate(lines):
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = i
        branch = re.search(r"BRA.*?(\.L_x_\d+)", line)
        start = labels.get(branch[1], -1) if branch else -1
        if start <= ends:
            continue
        body = "\n".join(lines[start:i])
        if re.search(r"\bHG?MMA\b", body):
            found.append(len(re.findall(r"\b(?:LDL|STL)\b", body)))
            ends = i
    return found


def main() -> None:
    found = {
        f"{shape}{how} sm{capability}": {
            "shared": make(capability, shape, False).metadata.shared,
            "spills": loop_spills(make(capability, shape, True)),
        }
        for how, make, tiles in (
            ("", compiled, prefill._TILES),
            (" copied", compiled_dense, prefill._DENSE_TILES),
        )
        for capability in tiles
        for shape in SHAPES
    }
    specialised = compiled_sm90(False)
    found["27b specialised sm90"] = {
        "shared": specialised.metadata.shared,
        "spills": loop_spills(compiled_sm90(True)),
        "unguarded": unguarded_arrivals(specialised.asm["ptx"]),
        "unguarded_control": unguarded_arrivals(
            specialised.asm["ptx"].replace("bar.sync", "")
        ),
        "same_keys": prefill._TILES[90].block_n == sm90.LAUNCH["BLOCK_N"],
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
