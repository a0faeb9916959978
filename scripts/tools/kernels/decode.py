# SPDX-License-Identifier: Apache-2.0
"""Decode and verify attention for bench_kernels.py: times beside the host's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from sglang_exact_kernels import decode_attention as attention
from sglang_exact_kernels.reference import verify_rows_reference
from tools.kernels import model
from tools.kernels.timing import Budget, show, time_us


def host_attention() -> Any:
    """The host's decode and extend attention modules, or None without a host."""
    try:
        from sglang.kernels.ops.attention import decode_attention, extend_attention
    except ImportError:
        return None
    return decode_attention, extend_attention


class Pool(NamedTuple):
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor


def make_pool(keys: int) -> Pool:
    shape = (keys, model.KV_HEADS, model.DIM)
    k = torch.randn(shape, device=model.DEVICE, dtype=torch.bfloat16)
    v = torch.randn(shape, device=model.DEVICE, dtype=torch.bfloat16)
    return Pool(k, v, torch.arange(keys, device=model.DEVICE))


class Rows(NamedTuple):
    """Static buffers of one attention measurement."""

    bs: int
    T: int
    length: int
    q: torch.Tensor
    out: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    loc: torch.Tensor


def make_rows(pool: Pool, bs: int, positions: int, length: int) -> Rows:
    """Requests of `length` keys each, the block's tokens included."""
    prefix = length - positions
    at = torch.arange(bs, device=model.DEVICE)[:, None] * length
    q = torch.randn(
        bs * positions,
        model.Q_HEADS,
        model.DIM,
        device=model.DEVICE,
        dtype=torch.bfloat16,
    )
    return Rows(
        bs,
        positions,
        length,
        q,
        torch.empty_like(q),
        (torch.arange(bs + 1, device=model.DEVICE) * prefix).to(torch.int32),
        (at + torch.arange(prefix, device=model.DEVICE)).flatten().contiguous(),
        (at + prefix + torch.arange(positions, device=model.DEVICE))
        .flatten()
        .contiguous(),
    )


def ours(pool: Pool, rows: Rows) -> Callable[[], None]:
    context = rows.length
    acc, stat = attention.scratch_shapes(len(rows.q), model.Q_HEADS, model.DIM, context)
    part_acc = torch.empty(acc, device=model.DEVICE)
    part_stat = torch.empty(stat, device=model.DEVICE)

    def launch() -> None:
        attention.decode_attention(
            rows.q,
            pool.k,
            pool.v,
            rows.out,
            kv_indptr=rows.indptr,
            kv_indices=rows.indices,
            part_acc=part_acc,
            part_stat=part_stat,
            sm_scale=model.DIM**-0.5,
            max_context_len=context,
            num_draft_tokens=rows.T,
            out_cache_loc=rows.loc,
        )

    return launch


def host_decode(modules: Any, pool: Pool, rows: Rows) -> Callable[[], None]:
    """The host's deterministic decode kernel; verify positions as rows of their own."""
    count = rows.bs * rows.T
    splits = -(-model.HOST_CONTEXT // model.HOST_SPLIT)
    row_indptr, row_splits, row_indices = (
        x.to(model.DEVICE)
        for x in verify_rows_reference(
            rows.indptr, rows.indices, rows.loc, rows.T, model.HOST_SPLIT
        )
    )
    logits = torch.empty(count, model.Q_HEADS, splits, model.DIM, device=model.DEVICE)
    lse = torch.empty(count, model.Q_HEADS, splits, device=model.DEVICE)

    def launch() -> None:
        modules[0].decode_attention_fwd(
            rows.q,
            pool.k,
            pool.v,
            rows.out,
            row_indptr,
            row_indices,
            logits,
            lse,
            row_splits,
            splits,
            model.DIM**-0.5,
            1.0,
            1.0,
        )

    return launch


def host_extend(modules: Any, pool: Pool, rows: Rows) -> Callable[[], None]:
    """The host's deterministic verify path: one unified extend launch."""
    steps = torch.arange(rows.bs + 1, device=model.DEVICE)
    kv_indptr = (steps * rows.length).to(torch.int32)
    qo_indptr = (steps * rows.T).to(torch.int32)
    prefix = torch.full((rows.bs,), rows.length - rows.T, device=model.DEVICE).int()
    indices = torch.arange(rows.bs * rows.length, device=model.DEVICE)

    def launch() -> None:
        modules[1].extend_attention_fwd_unified(
            rows.q,
            rows.out,
            pool.k,
            pool.v,
            1.0,
            1.0,
            qo_indptr,
            kv_indptr,
            indices,
            prefix,
            rows.T,
            sm_scale=model.DIM**-0.5,
        )

    return launch


def attention_entry(pool: Pool, modules: Any, bs: int, length: int) -> dict[str, Any]:
    one = make_rows(pool, bs, 1, length)
    block = make_rows(pool, bs, model.T, length)
    entry: dict[str, Any] = {
        "bs": bs,
        "length": length,
        "decode_us": time_us(ours(pool, one), model.DEVICE),
        "verify_us": time_us(ours(pool, block), model.DEVICE),
    }
    entry["verify/decode"] = entry["verify_us"] / entry["decode_us"]
    if modules is not None:
        entry["host_decode_us"] = time_us(host_decode(modules, pool, one), model.DEVICE)
        entry["decode/host"] = entry["decode_us"] / entry["host_decode_us"]
        entry["host_extend_us"] = time_us(
            host_extend(modules, pool, block), model.DEVICE
        )
        if bs * model.T * length <= 2**21:
            rows = host_decode(modules, pool, block)
            entry["host_rows_us"] = time_us(rows, model.DEVICE)
    keys_bytes = bs * length * model.KV_HEADS * model.DIM * 4
    entry["decode_tb_s"] = keys_bytes / entry["decode_us"] / 1e6
    return entry


def bench_attention(
    lengths: list[int], batch_sizes: list[int], budget: Budget
) -> Iterator[dict[str, Any]]:
    modules = host_attention()
    for bs in batch_sizes:
        for length in lengths:
            if not budget.allows(f"attention of {bs} x {length}"):
                continue
            entry = attention_entry(make_pool(bs * length), modules, bs, length)
            show(entry)
            yield entry
