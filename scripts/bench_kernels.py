#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time the overlay's kernels beside the host's, in one run."""

from tools import run
from tools.kernels import options

run("kernels.run", options.bench())
