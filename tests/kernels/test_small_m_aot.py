# SPDX-License-Identifier: Apache-2.0
"""Order of the tensor-core steps in compiled code, ours beside DeepGEMM's; no GPU.

Equal chains of equal instructions give equal bits if the tensor core is a function of
its operands. That last step is a device's to prove; it is the start-up self-test.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import deep_gemm_wheels as wheels  # noqa: E402
import ptx_machine as machine  # noqa: E402

from sglang_exact_kernels import tiles  # noqa: E402
from sglang_exact_kernels.tiles import Tile  # noqa: E402

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
HMMA = "HMMA.16816.F32.BF16"
A, W = 1 << 40, 1 << 41


def table_tiles(capability: int) -> set[Tile]:
    # wgmma is outside the PTX machine: the sweep on the device proves those tiles.
    found = [
        tile
        for tile in tiles._TABLES[capability].values()
        if tile is not None and not (capability == 90 and tile.swap_ab)
    ]
    found += [tiles._DEFAULT[capability], tiles._NARROW[capability]]
    return {t._replace(source="", measured=False) for t in found}


def build(capability: int, tile: Tile, kernel: str = "small_m") -> dict[str, str]:
    arguments = [*tile[:4], int(tile.swap_ab), int(tile.pdl)]
    command = [sys.executable, str(Path(__file__).with_name("small_m_aot.py"))]
    command += [str(x) for x in (capability, *arguments, kernel)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def our_chains(ptx: str, tile: Tile, k: int) -> list[list[machine.Step]]:
    """Chains of block 0 for M = 16 rows and one column block."""
    parameters = [A, W, 1 << 42, 16, tile.block_n, k, k, k, tile.block_n, 0, 0]
    program = machine.parse(ptx)
    threads = [
        machine.Thread(program, i, parameters, {"global_smem": 0})
        for i in range(32 * tile.num_warps)
    ]
    for thread in threads:
        thread.run()

    def where(address: int) -> machine.Chunk:
        name, base = ("w", W) if address >= W else ("a", A)
        row, column = divmod(address - base, 2 * k)
        return name, row, column // 16

    return machine.chains(threads, machine.copied(threads, where))


def deep_gemm_chains(ptx: str, k: int) -> list[list[machine.Step]]:
    """Chains of block 0 of DeepGEMM's kernel, M = N = 64; shared memory is TMA's."""
    tile = wheels.SM120_TILE
    rows, stages = tile["block_m"], tile["stages"]
    stage_bytes = rows * tile["block_k"] * 2
    begin = rows * tile["block_n"] * 2  # D comes first
    symbols = dict.fromkeys(re.findall(r"\w*smem_buffer\w*", ptx), 0)
    parameters = [0] * 6 + [64, 64, k] + [0] * 3
    program = machine.parse(ptx)
    threads = [machine.Thread(program, i, parameters, symbols) for i in range(128)]
    for thread in threads:
        thread.run()
    first = threads[0].matrices[0][0]

    def content(phase: int, address: int) -> machine.Chunk:
        # The hardware's 128-byte swizzle: chunk c of row r lies at c xor r mod 8.
        offset = address - begin
        name = "a" if offset < stages * stage_bytes else "w"
        row, within = divmod(offset % stage_bytes, 128)
        chunk = (within // 16) ^ (row % 8)
        return name, row, (phase - first) * tile["block_k"] // 8 + chunk

    return machine.chains(threads, content)


def orders(chains: list[list[machine.Step]]) -> set[tuple[tuple[str, int], ...]]:
    """(instruction, k step) of each accumulator, without where it lies."""
    return {tuple((s.op, s.k_step) for s in chain) for chain in chains}


def ascending(k: int) -> set[tuple[tuple[str, int], ...]]:
    return {tuple((MMA, i) for i in range(k // 16))}


CASES = [(c, t) for c in (90, 120) for t in sorted(table_tiles(c)) if not t.swap_ab]


@pytest.mark.parametrize(("capability", "tile"), CASES)
def test_one_accumulator_and_ascending_k(capability: int, tile: Tile) -> None:
    k = 3 * tile.block_k
    built = build(capability, tile)
    chains = our_chains(built["ptx"], tile, k)
    assert orders(chains) == ascending(k)
    columns = sorted(chain[0].b_row for chain in chains)
    assert columns == list(range(0, tile.block_n, 8))
    assert built["sass"].count(HMMA) == built["ptx"].count(MMA)
    assert not re.search(r"\bFADD|\bFFMA|\bRED\b|\bATOM", built["sass"])


@pytest.mark.parametrize("kernel", ["descending", "two_accumulators"])
def test_negative_control_other_orders_are_caught(kernel: str) -> None:
    tile = Tile(32, 64, 4, 3)
    built = build(120, tile, kernel)
    found = orders(our_chains(built["ptx"], tile, 256))
    assert found
    assert found != ascending(256)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.2.3.post2", "0.2.5"])
def test_sm120_steps_are_those_of_deep_gemm(version: str, tmp_path: Path) -> None:
    k = 4 * wheels.SM120_TILE["block_k"]
    include = wheels.wheel_root(version) / "deep_gemm" / "include"
    ptx = wheels.compile_sm120(include, version, tmp_path, ptx=True)
    sass = wheels.compile_sm120(include, version, tmp_path, ptx=False)
    theirs = deep_gemm_chains(ptx, k)
    assert len(theirs) == 4 * 8
    assert sass.count(HMMA) == ptx.count(MMA) == 32
    assert not re.search(r"\bFADD|\bFFMA", sass)
    tile = Tile(32, 128, 4, 3)
    ours = our_chains(build(120, tile)["ptx"], tile, k)
    assert orders(ours) == orders(theirs) == ascending(k)


@pytest.mark.parametrize("capability", [90, 120])
def test_early_launch_reads_nothing_before_the_wait(capability: int) -> None:
    """Before the wait only L2 is warmed; data is loaded after it, also by ptxas."""
    sass = build(capability, Tile(32, 128, 4, 4, pdl=True))["sass"]
    ops = re.findall(r"\b(ACQBULK|PREEXIT|CCTL\S*|LDGSTS|LDG|STG)\b", sass)
    wait = ops.index("ACQBULK")
    assert ops[:wait].count("PREEXIT") == 1
    assert {"LDG", "LDGSTS", "STG"}.isdisjoint(ops[:wait])
    assert "LDGSTS" in ops[wait:]
    assert "ACQBULK" not in build(capability, Tile(32, 128, 4, 4))["sass"]
