# SPDX-License-Identifier: Apache-2.0
"""Real sgl-deep-gemm wheels, and what nvcc makes of their sm120 bf16 kernel.

Wheels are downloaded with pip once, into a cache outside of the repository
(SGLANG_EXACT_TEST_CACHE, by default ~/.cache/sglang_exact).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SM120_TILE = {"block_m": 64, "block_n": 64, "block_k": 64, "stages": 3}
"""The instantiation that `sm120_source` asks for."""


def cache() -> Path:
    default = Path.home() / ".cache" / "sglang_exact"
    return Path(os.environ.get("SGLANG_EXACT_TEST_CACHE", default))


def wheel_root(version: str) -> Path:
    """The unpacked wheel of `version`; skips the test if pip cannot get it."""
    root = cache() / f"sgl_deep_gemm-{version}"
    if (root / "deep_gemm").is_dir():
        return root
    into = cache() / "wheels"
    into.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--dest", str(into), f"sgl-deep-gemm=={version}"]
    got = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(into.glob(f"sgl_deep_gemm-{version}-*.whl"))
    if got.returncode or not wheels:
        pytest.skip(f"pip cannot download sgl-deep-gemm=={version}")
    partial = root.with_name(f"{root.name}.{os.getpid()}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(partial)
    partial.rename(root)
    return root


def need_nvcc() -> str:
    """Path of nvcc; skips the test without one."""
    return shutil.which("nvcc") or pytest.skip("no nvcc on PATH")


def cuda_tool(name: str) -> str:
    """A disassembler: Triton ships nvdisasm, a CUDA toolkit has it on PATH."""
    triton = pytest.importorskip("triton")
    shipped = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if shipped.exists():
        return str(shipped)
    return shutil.which(name) or pytest.skip(f"no {name}")


def sm120_source(version: str) -> str:
    """A translation unit that instantiates the sm120 bf16 kernel once."""
    tile = SM120_TILE
    numbers = [0, 0, 0, 1, tile["block_m"], tile["block_n"], tile["block_k"]]
    numbers += [128, 128, 128, tile["stages"], 128, 128, 188]
    arguments = ", ".join(map(str, numbers))
    return f"""
#include <deep_gemm/impls/sm120_bf16_gemm.cuh>
using namespace deep_gemm;
void* address_of_{version.replace(".", "_")}() {{
    return reinterpret_cast<void*>(&sm120_bf16_gemm_impl<
        {arguments}, GemmType::Normal, false, cutlass::bfloat16_t>);
}}
"""


def compile_sm120(include: Path, version: str, into: Path, *, ptx: bool) -> str:
    """PTX or SASS of the sm120 bf16 kernel compiled from the headers in `include`."""
    source = into / "kernel.cu"
    source.write_text(sm120_source(version))
    output = into / ("kernel.ptx" if ptx else "kernel.cubin")
    target = (
        ["-arch=compute_120a", "-ptx"]
        if ptx
        else ["-gencode=arch=compute_120a,code=sm_120a", "-cubin"]
    )
    command = [need_nvcc(), "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-w"]
    command += [*target, "-I", str(include), "-o", str(output), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    if ptx:
        return output.read_text()
    command = [cuda_tool("nvdisasm"), "-c", str(output)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
