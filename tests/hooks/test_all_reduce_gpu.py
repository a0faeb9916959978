# SPDX-License-Identifier: Apache-2.0
"""NCCL's all-reduce over two GPUs is a + b in bf16 for every size of message."""

from __future__ import annotations

import os
import socket
import time

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

HIDDEN = 5120
ROWS = (1, 2, 3, 8, 16, 17, 64, 128, 129, 512, 2048, 8192)
"""One decode row, verify blocks, prefill chunks: 10 KiB to 80 MiB."""
SETTINGS = {"NCCL_ALGO": "allreduce:tree", "NCCL_NVLS_ENABLE": "0"}
"""As the host's deterministic mode and launcher set them."""
CHANNELS = "8"
LIMIT_S = 240
"""Each rank imports torch, opens a context and connects: up to a minute, if alone."""


def _rank(rank: int, port: int, results: object) -> None:
    """Sum random rows with the other rank, eagerly and from a CUDA graph."""
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        device_id=torch.device("cuda", rank),
    )
    wrong = []
    for rows in ROWS:
        shape = (rows, HIDDEN)
        parts = []
        for seed in range(2):
            # The same generator on both GPUs of one model: each knows both parts.
            gen = torch.Generator("cuda").manual_seed(seed)
            scale = torch.randn(shape, device="cuda", generator=gen).mul(8).exp2()
            draws = torch.randn(shape, device="cuda", generator=gen)
            parts.append((draws * scale).bfloat16())
        want = (parts[0] + parts[1]).view(torch.int16)
        eager = parts[rank].clone()
        dist.all_reduce(eager)
        static = parts[rank].clone()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            dist.all_reduce(static)
        static.copy_(parts[rank])
        graph.replay()
        torch.cuda.synchronize()
        # NCCL ends a communicator only after every graph that uses it is gone.
        graph.reset()
        # Alone, the last row must be what it is among the others.
        single = parts[rank][-1:].clone()
        dist.all_reduce(single)
        for name, got, expected in (
            ("eager", eager, want),
            ("graph", static, want),
            ("last row alone", single, want[-1:]),
        ):
            count = int((got.view(torch.int16) != expected).sum())
            if count:
                wrong.append(f"rank {rank}, {rows} rows, {name}: {count} elements")
    if torch.equal(parts[0].view(torch.int16), want):
        wrong.append("the sum equals one addend: the test would prove nothing")
    results.put(wrong)  # type: ignore[attr-defined]
    dist.barrier()
    dist.destroy_process_group()


def test_sum_of_two_ranks_is_the_bf16_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, os.environ.get(name, value))
    monkeypatch.setenv("NCCL_MIN_NCHANNELS", CHANNELS)
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", CHANNELS)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = torch.multiprocessing.spawn(
        _rank, args=(port, results), nprocs=2, join=False
    )
    deadline = time.monotonic() + LIMIT_S
    try:
        while not ranks.join(timeout=1):
            if time.monotonic() > deadline:
                pytest.fail(f"found ranks that run after {LIMIT_S} s")
    finally:
        for process in ranks.processes:
            process.kill()
    assert [results.get(), results.get()] == [[], []]
