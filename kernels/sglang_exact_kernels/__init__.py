# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of sglang_exact; importable without SGLang."""
