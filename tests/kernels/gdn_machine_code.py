# SPDX-License-Identifier: Apache-2.0
"""Compile gdn_verify and the host's decode kernel and compare what they store.

Run as a script, in a process without TRITON_INTERPRET: prints one JSON object that
test_gdn_verify_sass.py checks.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import aot
import sass
from sglang.kernels.ops.attention.fla import fused_recurrent

from sglang_exact_kernels import gdn_commit, gdn_verify

H, HV, V = 16, 48, 128


def decode(capability: int, block_v: int, K: int, dtype: str) -> str:
    state, qkv = HV * V * K, 2 * H * K + HV * V
    return aot.compile_sass(
        fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode_kernel,
        {
            **dict.fromkeys(("mixed_qkv", "a", "b", "o"), f"*{dtype}"),
            **dict.fromkeys(("A_log", "dt_bias", "h0", "ht"), "*fp32"),
            "ssm_state_indices": "*i32",
            "scale": "fp32",
        },
        {
            "stride_mixed_qkv_tok": qkv,
            "stride_a_tok": HV,
            "stride_b_tok": HV,
            "stride_init_state_token": state,
            "stride_final_state_token": state,
            "stride_indices_seq": 1,
            "H": H,
            "HV": HV,
            "K": K,
            "V": V,
            "BK": K,
            "BV": block_v,
            "SOFTPLUS_THRESHOLD": 20.0,
            "USE_QK_L2NORM_IN_KERNEL": True,
        },
        capability,
        num_warps=1,
        num_stages=3,
    )


def verify(capability: int, block_v: int, K: int, dtype: str) -> str:
    state, qkv = HV * V * K, 2 * H * K + HV * V
    width = gdn_verify.record_width(H, HV, K, V)
    return aot.compile_sass(
        gdn_verify._gdn_verify_kernel,
        {
            **dict.fromkeys(("mixed_qkv", "a", "b", "out"), f"*{dtype}"),
            **dict.fromkeys(("A_log", "dt_bias", "states", "records"), "*fp32"),
            "cache_indices": "*i32",
            "record_rows": "*i32",
            "scale": "fp32",
            "T": "i32",
        },
        {
            "stride_qkv_tok": qkv,
            "stride_a_tok": HV,
            "stride_b_tok": HV,
            "stride_state_slot": state,
            "stride_record_row": 8 * width,
            "stride_record_step": width,
            "stride_cache_idx": 1,
            "stride_row_idx": 1,
            "H": H,
            "HV": HV,
            "K": K,
            "V": V,
            "BLOCK_V": block_v,
            "SOFTPLUS_THRESHOLD": gdn_verify._SOFTPLUS_THRESHOLD,
        },
        capability,
        num_warps=gdn_verify._NUM_WARPS,
        num_stages=gdn_verify._NUM_STAGES,
    )


def fla_step(capability: int, block_v: int) -> str:
    """The host's unpacked kernel (beta not rounded): close, but other operations."""
    names = ("q", "k", "v", "beta", "o")
    return aot.compile_sass(
        fused_recurrent.fused_recurrent_gated_delta_rule_fwd_kernel,
        {
            **dict.fromkeys(names, "*bf16"),
            **dict.fromkeys(("g", "h0", "ht"), "*fp32"),
            "scale": "fp32",
            "T": "i32",
        },
        {
            "cu_seqlens": None,
            "B": 1,
            "H": H,
            "HV": HV,
            "K": 128,
            "V": V,
            "BK": 128,
            "BV": block_v,
            "USE_INITIAL_STATE": True,
            "STORE_FINAL_STATE": True,
            "IS_BETA_HEADWISE": False,
            "USE_QK_L2NORM_IN_KERNEL": True,
            "IS_VARLEN": False,
            "IS_KDA": False,
        },
        capability,
        num_warps=1,
        num_stages=3,
    )


def commit(capability: int, block_v: int, K: int) -> str:
    return aot.compile_sass(
        gdn_commit._gdn_commit_kernel,
        {
            **dict.fromkeys(("states", "records"), "*fp32"),
            **dict.fromkeys(("cache_indices", "record_rows"), "*i32"),
            "last_steps": "*i64",
            **dict.fromkeys((f"stride_state_{n}" for n in ("layer", "slot")), "i32"),
            **dict.fromkeys(
                (f"stride_record_{n}" for n in ("layer", "row", "step")), "i32"
            ),
        },
        {"H": H, "HV": HV, "K": K, "V": V, "BLOCK_V": block_v},
        capability,
        num_warps=gdn_commit._NUM_WARPS,
        num_stages=3,
    )


def state_expressions(code: str) -> set[Any]:
    """Distinct stored state values, with u = (v - h k) * beta, k and the decay cut.

    Wide tiles pass u through shared memory, narrow ones keep it in registers.
    """
    return {sass.rewritten(x, _cut_u) for x, _ in sass.stored_state(code)}


def _cut_u(tree: Any) -> Any:
    if tree[0] == "load" and tree[1] == "LDS":
        return ("u",)
    if tree[0] == "FMUL" and any(
        "F2F.BF16.F32" in repr(sass.expand(x, 4)) for x in tree[1:]
    ):
        return ("u",)
    return None


def compare(capability: int) -> dict[str, Any]:
    block_v = gdn_verify._BLOCK_V[capability]
    found: dict[str, Any] = {"capability": capability, "cases": {}}
    for K, dtype in ((128, "bf16"), (128, "fp32")):
        theirs = decode(capability, block_v, K, dtype)
        ours = verify(capability, block_v, K, dtype)
        want, state = sass.stored_values(theirs)[0], sass.stored_state(theirs)
        kept = {x for x, _ in state}
        outputs = Counter({x: n for x, n in want.items() if x[4] not in kept})
        passes = sass.stored_values(ours, state)
        found["cases"][f"K{K} {dtype}"] = {
            "stored": sum(want.values()),
            "outputs": sum(outputs.values()),
            "passes": len(passes),
            # All that decode stores but the state, which the second pass starts from.
            "equal": [not outputs - p for p in passes],
            "ops_equal": sass.float_ops(ours) == sass.float_ops(theirs),
            "ops": sum(sass.float_ops(ours).values()),
        }
    wide, narrow = (
        state_expressions(decode(capability, width, 128, "bf16"))
        for width in (32, block_v)
    )
    found["row_expressions"] = [len(wide), len(narrow), wide == narrow]
    ops = sass.float_ops(commit(capability, gdn_commit._BLOCK_V, 128))
    found["commit_ops"] = sorted({op.split(".")[0] for op in ops})
    theirs = decode(capability, block_v, 128, "bf16")
    other: Counter[Any] = Counter()
    for stored in sass.stored_values(fla_step(capability, block_v)):
        other |= stored
    found["control_equal"] = not sass.stored_values(theirs)[0] - other
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps({c: compare(int(c)) for c in sys.argv[1:]}) + "\n")
