# SPDX-License-Identifier: Apache-2.0
"""Gated delta rule over a block of draft tokens, one launch per layer.

For token t of a request, per value head (state h is [V, K], fp32):

    q, k  = q / sqrt(sum(q * q) + 1e-6), k / sqrt(sum(k * k) + 1e-6);  q = q * scale
    g     = -exp(A_log) * softplus(a + dt_bias);  beta = sigmoid(b) in b's dtype
    h     = h * exp(g);  u = (v - h @ k) * beta;  h = h + u k^T;  o = h @ q

The state stays in registers over the block. Kept of a token is what its step does to
the state: u, k and exp(g) in fp32. From them `gdn_commit` makes the state after any of
the tokens, by the same two operations an element.

Reduction order: that of the host's packed decode kernel, instruction for instruction. A
row of h lies across the lanes of one warp, 4 neighbouring columns a lane; at K = 128 a
lane adds fma(h0, k0, h1 * k1) and fma(h2, k2, h3 * k3), then lanes add by butterfly
(16, 8, 4, 2, 1). Steps run in order t = 0 .. T - 1, each on the fp32 state that the
decode kernel would have stored and loaded again.
Invariant to: bs, T, the other requests, padding rows, BLOCK_V (rows of h are
independent), and where in the pools a state lies.
Not covered: states that are not fp32, tree drafts, K that is no power of two,
16-byte-misaligned activations (their lane layout, and so their order, would differ).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_exact_kernels import arch, checks

__all__ = ["gdn_verify", "record_width"]

# Value rows per program. 8 splits one request of the 27B shape (48 heads, V = 128) into
# 768 warps, about one per warp scheduler of an sm90 or sm120 card; 32, the decode
# kernel's tile, gives 192 and leaves most schedulers idle for T steps in sequence.
_BLOCK_V = {90: 8, 120: 8}

# The decode kernel's launch: one warp, so a row never crosses a warp.
_NUM_WARPS = 1
_NUM_STAGES = 3

_HEAD_K_DIMS = (16, 32, 64, 128, 256)

_SOFTPLUS_THRESHOLD = 20.0
"""The host's decode launch passes this constant."""


@triton.jit(do_not_specialize=["T"])
def _gdn_verify_kernel(
    mixed_qkv,  # [bs * T, 2 * H * K + HV * V]
    a,  # [bs * T, HV]
    b,  # [bs * T, HV]
    A_log,  # [HV]
    dt_bias,  # [HV]
    out,  # [bs * T, HV, V]
    states,  # [slots, HV, V, K] fp32
    records,  # [rows, steps, HV * V + H * K + HV] fp32
    cache_indices,  # [bs]
    record_rows,  # [bs]
    scale,
    T,
    stride_qkv_tok: tl.constexpr,
    stride_a_tok: tl.constexpr,
    stride_b_tok: tl.constexpr,
    stride_state_slot: tl.constexpr,
    stride_record_row: tl.constexpr,
    stride_record_step: tl.constexpr,
    stride_cache_idx: tl.constexpr,
    stride_row_idx: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SOFTPLUS_THRESHOLD: tl.constexpr,
):
    i_v = tl.program_id(0)
    i_n = tl.program_id(1) // HV
    i_hv = tl.program_id(1) % HV
    i_h = i_hv // (HV // H)

    offs_k = tl.arange(0, K)
    offs_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    mask_h = mask_v[:, None] & (offs_k < K)[None, :]

    slot = tl.load(cache_indices + i_n * stride_cache_idx).to(tl.int64)
    row = tl.load(record_rows + i_n * stride_row_idx).to(tl.int64)
    first = i_n.to(tl.int64) * T
    p_out = out + (first * HV + i_hv) * V + offs_v

    if (slot < 0) | (row < 0):
        zero = tl.zeros([BLOCK_V], dtype=tl.float32).to(out.dtype.element_ty)
        for _ in range(T):
            tl.store(p_out, zero, mask=mask_v)
            p_out += HV * V
        return

    offs_h = i_hv * V * K + offs_v[:, None] * K + offs_k[None, :]
    h = tl.load(states + slot * stride_state_slot + offs_h, mask=mask_h, other=0)
    p_record = records + row * stride_record_row
    p_qkv = mixed_qkv + first * stride_qkv_tok
    p_a = a + first * stride_a_tok + i_hv
    p_b = b + first * stride_b_tok + i_hv
    A_log_val = tl.load(A_log + i_hv).to(tl.float32)
    dt_bias_val = tl.load(dt_bias + i_hv).to(tl.float32)

    # A step's inputs are loaded one step ahead: the state chain is the critical path.
    p_q = p_qkv + (i_h * K + offs_k)
    p_k = p_qkv + (H * K + i_h * K + offs_k)
    p_v = p_qkv + (2 * H * K + i_hv * V + offs_v)
    next_q = tl.load(p_q)
    next_k = tl.load(p_k)
    next_v = tl.load(p_v, mask=mask_v, other=0)
    next_a = tl.load(p_a)
    next_b = tl.load(p_b)

    for t in range(T):
        q = next_q.to(tl.float32)
        k = next_k.to(tl.float32)
        v = next_v.to(tl.float32)
        a_val = next_a.to(tl.float32)
        b_val = next_b.to(tl.float32)
        p_q += stride_qkv_tok
        p_k += stride_qkv_tok
        p_v += stride_qkv_tok
        p_a += stride_a_tok
        p_b += stride_b_tok
        more = t + 1 < T
        next_q = tl.load(p_q, mask=more & (offs_k < K), other=0)
        next_k = tl.load(p_k, mask=more & (offs_k < K), other=0)
        next_v = tl.load(p_v, mask=more & mask_v, other=0)
        next_a = tl.load(p_a, mask=more, other=0)
        next_b = tl.load(p_b, mask=more, other=0)

        q = q / tl.sqrt(tl.sum(q * q) + 1e-6)
        k = k / tl.sqrt(tl.sum(k * k) + 1e-6)
        q = q * scale

        x = a_val + dt_bias_val
        softplus = tl.where(x <= SOFTPLUS_THRESHOLD, tl.log(1.0 + tl.exp(x)), x)
        g = -tl.exp(A_log_val) * softplus
        beta = tl.sigmoid(b_val).to(b.dtype.element_ty).to(tl.float32)

        decay = tl.exp(g)
        h *= decay
        v -= tl.sum(h * k[None, :], 1)
        v *= beta
        h += v[:, None] * k[None, :]
        o = tl.sum(h * q[None, :], 1)
        tl.store(p_out, o.to(out.dtype.element_ty), mask=mask_v)
        tl.store(p_record + i_hv * V + offs_v, v, mask=mask_v)
        # Each program of a group has the same k; all of them write it.
        tl.store(p_record + (HV * V + i_h * K + offs_k), k)
        tl.store(p_record + (HV * V + H * K + i_hv), decay)
        p_out += HV * V
        p_record += stride_record_step


def record_width(num_k_heads: int, HV: int, K: int, V: int) -> int:
    """Floats that are kept of a token: u [HV, V], k [num_k_heads, K], exp(g) [HV].

    In whole vectors of 16 bytes, so that every record is aligned.
    """
    return -(-(HV * V + num_k_heads * K + HV) // 4) * 4


class _Call(NamedTuple):
    mixed_qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    ssm_states: torch.Tensor
    cache_indices: torch.Tensor
    records: torch.Tensor
    record_rows: torch.Tensor
    out: torch.Tensor | None


_ROWS, _STATES = ("mixed_qkv", "a", "b"), ("ssm_states", "records")
_DIMS = {**dict.fromkeys(_ROWS, 2), "ssm_states": 4, "records": 3}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _layout_reasons(call: _Call, T: int, num_k_heads: int) -> list[str]:
    """Dimensions, dtypes, unit strides, alignment, device."""
    tensors = call._asdict()
    # A misaligned state would be laid out, and so reduced, in another order.
    aligned = {name: tensors[name] for name in ("mixed_qkv", *_STATES)}
    expected = [
        *((f"{name} dims", tensors[name].ndim, dims) for name, dims in _DIMS.items()),
        *((f"{n} last stride", tensors[n].stride()[-1:], (1,)) for n in _ROWS),
        *((f"{n} dtype", tensors[n].dtype, torch.float32) for n in _STATES),
    ]
    if call.mixed_qkv.dtype not in _FLOATS:
        expected.append(("mixed_qkv dtype", call.mixed_qkv.dtype, _FLOATS))
    counts = (("num_draft_tokens", T, 1, None), ("num_k_heads", num_k_heads, 1, None))
    reasons = checks.device_reasons(tensors) + checks.misaligned(aligned)
    return reasons + checks.mismatches(expected) + checks.outside(counts)


def _shape_reasons(call: _Call, T: int, H: int) -> list[str]:
    """Shapes and strides of tensors whose dimensions are as they should be."""
    bs = call.cache_indices.numel()
    _, HV, V, K = call.ssm_states.shape
    rows, steps = call.records.shape[:2]
    inner = (V * K, K, 1)
    shapes = {
        "mixed_qkv": (bs * T, 2 * H * K + HV * V),
        "a": (bs * T, HV),
        "b": (bs * T, HV),
        "A_log": (HV,),
        "dt_bias": (HV,),
        "cache_indices": (bs,),
        "record_rows": (bs,),
        "records": (rows, steps, record_width(H, HV, K, V)),
    }
    contiguous = [("A_log", call.A_log), ("dt_bias", call.dt_bias)]
    expected = [
        ("ssm_states inner strides", call.ssm_states.stride()[1:], inner),
        ("records last stride", call.records.stride(2), 1),
        ("HV % num_k_heads", HV % H, 0),
    ]
    if K not in _HEAD_K_DIMS:
        expected.append(("head_k_dim", K, _HEAD_K_DIMS))
    if call.out is not None:
        shapes["out"] = (1, bs * T, HV, V)
        contiguous.append(("out", call.out))
        expected.append(("out dtype", call.out.dtype, call.mixed_qkv.dtype))
    given = call._asdict()
    expected += [
        (f"{n} shape", tuple(given[n].shape), want) for n, want in shapes.items()
    ]
    expected += [(f"{n} contiguous", t.is_contiguous(), True) for n, t in contiguous]
    steps_reasons = checks.outside([("records steps", steps, T, None)])
    return checks.mismatches(expected) + steps_reasons


def _check(call: _Call, T: int, num_k_heads: int) -> None:
    """Raise ValueError with every reason why this call is refused."""
    reasons = _layout_reasons(call, T, num_k_heads)
    dims = (call.ssm_states.ndim, call.records.ndim)
    if dims == (4, 3) and T >= 1 and num_k_heads >= 1:
        reasons += _shape_reasons(call, T, num_k_heads)
    checks.refuse("gdn_verify", reasons)


def gdn_verify(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    records: torch.Tensor,
    record_rows: torch.Tensor,
    num_draft_tokens: int,
    num_k_heads: int,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gated delta rule of `num_draft_tokens` tokens per request, each step recorded.

    mixed_qkv            [bs * T, 2 * num_k_heads * K + HV * V], q | k | v, rows 16-byte
                         aligned, any row stride
    a, b                 [bs * T, HV] gate and beta logits, unit last stride
    A_log, dt_bias       [HV]
    ssm_states           [slots, HV, V, K] fp32, read only
    cache_indices        [bs] slot of each request; negative marks a padding row
    records              [rows, steps >= T, record_width(...)] fp32; row record_rows[r],
                         step t receives what draft token t of request r adds to the
                         state: u [HV, V], k [H, K], exp(g) [HV]
    Returns [1, bs * T, HV, V] in mixed_qkv's dtype (`out` if given). Padding rows give
    zeros and store nothing. Raises ValueError, before any launch, with every reason why
    the call is refused. No host synchronisation; allocates nothing but the output.
    """
    call = _Call(
        mixed_qkv,
        a,
        b,
        A_log,
        dt_bias,
        ssm_states,
        cache_indices,
        records,
        record_rows,
        out,
    )
    _check(call, num_draft_tokens, num_k_heads)
    if out is None:
        bs, (HV, V) = cache_indices.numel(), ssm_states.shape[1:3]
        out = mixed_qkv.new_empty(1, bs * num_draft_tokens, HV, V)
    _launch(call._replace(out=out), num_draft_tokens, num_k_heads, scale)
    return out


def _launch(call: _Call, T: int, num_k_heads: int, scale: float) -> None:
    bs = call.cache_indices.numel()
    _, HV, V, K = call.ssm_states.shape
    block_v = min(triton.next_power_of_2(V), arch.pick(_BLOCK_V, call.mixed_qkv.device))
    _gdn_verify_kernel[(triton.cdiv(V, block_v), bs * HV)](
        call.mixed_qkv,
        call.a,
        call.b,
        call.A_log,
        call.dt_bias,
        call.out,
        call.ssm_states,
        call.records,
        call.cache_indices,
        call.record_rows,
        scale,
        T,
        stride_qkv_tok=call.mixed_qkv.stride(0),
        stride_a_tok=call.a.stride(0),
        stride_b_tok=call.b.stride(0),
        stride_state_slot=call.ssm_states.stride(0),
        stride_record_row=call.records.stride(0),
        stride_record_step=call.records.stride(1),
        stride_cache_idx=call.cache_indices.stride(0),
        stride_row_idx=call.record_rows.stride(0),
        H=num_k_heads,
        HV=HV,
        K=K,
        V=V,
        BLOCK_V=block_v,
        SOFTPLUS_THRESHOLD=_SOFTPLUS_THRESHOLD,
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
    )
