# SPDX-License-Identifier: Apache-2.0
"""Compiles the small-M GEMM and two planted mistakes ahead of time; prints JSON.

Run in a process of its own, because the tests' process may interpret kernels:
``python small_m_aot.py CAPABILITY BLOCK_N BLOCK_K WARPS STAGES SWAP PDL KERNEL``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import triton  # noqa: E402
import triton.backends.nvidia as nvidia  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from sglang_exact_kernels import small_m_gemm  # noqa: E402
from sglang_exact_kernels.tiles import BLOCK_M  # noqa: E402


@triton.jit
def _descending_kernel(
    a_ptr, w_ptr, c_ptr, M, N, K, stride_am, stride_wn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rm, rn, rk = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        at = rk[None, :] + (K - BLOCK_K - k)
        a = tl.load(a_ptr + rm[:, None] * stride_am + at)
        w = tl.load(w_ptr + rn[:, None] * stride_wn + at)
        acc = tl.dot(a, tl.trans(w), acc)
    out = c_ptr + rm[:, None] * stride_cm + rn[None, :]
    tl.store(out, acc.to(tl.bfloat16))


@triton.jit
def _two_accumulators_kernel(
    a_ptr, w_ptr, c_ptr, M, N, K, stride_am, stride_wn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rm, rn, rk = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    low = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    high = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    a_ptrs = a_ptr + rm[:, None] * stride_am + rk[None, :]
    w_ptrs = w_ptr + rn[:, None] * stride_wn + rk[None, :]
    for _k in range(0, K, 2 * BLOCK_K):
        low = tl.dot(tl.load(a_ptrs), tl.trans(tl.load(w_ptrs)), low)
        a = tl.load(a_ptrs + BLOCK_K)
        high = tl.dot(a, tl.trans(tl.load(w_ptrs + BLOCK_K)), high)
        a_ptrs += 2 * BLOCK_K
        w_ptrs += 2 * BLOCK_K
    out = c_ptr + rm[:, None] * stride_cm + rn[None, :]
    tl.store(out, (low + high).to(tl.bfloat16))


POINTERS = {"a_ptr": "*bf16", "w_ptr": "*bf16", "c_ptr": "*bf16"}
NUMBERS = dict.fromkeys(("M", "N", "K", "stride_am", "stride_wn", "stride_cm"), "i32")


def compile_kernel(kernel: Any, capability: int, constants: dict[str, Any], **options):
    """Triton's compiled kernel; pointers and numbers other than M divide by 16."""
    signature = {**POINTERS, **NUMBERS, **dict.fromkeys(constants, "constexpr")}
    names = list(signature)
    even = [x for x in names if x in {**POINTERS, **NUMBERS} and x != "M"]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(x),): value for x, value in constants.items()},
        attrs={(names.index(x),): [["tt.divisibility", 16]] for x in even},
    )
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=options
    )


def main() -> None:
    capability, block_n, block_k, warps, stages, swap, pdl = map(int, sys.argv[1:8])
    constants: dict[str, Any] = {
        "BLOCK_M": BLOCK_M, "BLOCK_N": block_n, "BLOCK_K": block_k
    }  # fmt: skip
    options: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
    kernel = {
        "small_m": small_m_gemm._small_m_gemm_kernel,
        "descending": _descending_kernel,
        "two_accumulators": _two_accumulators_kernel,
    }[sys.argv[8]]
    if sys.argv[8] == "small_m":
        constants.update(
            EVEN_N=True, EVEN_K=True, SWAP_AB=bool(swap), PDL=bool(pdl),
            PREFETCH_LINES=8, UPCAST=False,
        )  # fmt: skip
        options["launch_pdl"] = bool(pdl)
    compiled = compile_kernel(kernel, capability, constants, **options)
    binary = Path(nvidia.__file__).parent / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(binary), "-c", file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True)
    json.dump({"ptx": compiled.asm["ptx"], "sass": sass.stdout}, sys.stdout)


if __name__ == "__main__":
    main()
