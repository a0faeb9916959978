#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check and time candidate tiles of the small-M GEMM on this machine's GPU."""

from tools import run
from tools.kernels import options

run("kernels.small_m", options.sweep())
