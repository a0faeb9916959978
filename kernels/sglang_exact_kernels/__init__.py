# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of sglang_exact; importable without SGLang.

| module | what it is for |
|---|---|
| gdn_verify | the gated delta rule over a block of drafts, with decode's bits |
| gdn_commit | the states after the accepted part of a block |
| decode_attention, decode_attention_kernels | attention of decode and verify rows |
| prefill_attention, prefill_attention_kernels | attention of prompts, however cut |
| prefill_attention_sm90 | the same on a copy of the keys, in Gluon |
| small_m_gemm, tiles | linear layers of few rows, and the static table of its tiles |
| reference | what each op promises: fp64, and single steps in the promised order |
| invariance, race_stress | comparison as integers: subsets of rows, repeated calls |
| checks | what launches check first, and how they refuse |
| arch | the only reader of compute capability |
"""
