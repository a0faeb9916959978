# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding on SGLang with the bits of plain decoding."""

__version__ = "0.1.0"
