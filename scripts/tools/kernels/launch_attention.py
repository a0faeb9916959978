# SPDX-License-Identifier: Apache-2.0
"""Launch decode attention twice, then once between profiler marks: ours, the host's.

    ncu --clock-control none --profile-from-start off --section SpeedOfLight \\
        python scripts/launch_attention --requests 32 --keys 32768

Shapes are the 27B model's, one row a request. Needs an importable SGLang.
"""

from __future__ import annotations

import argparse
import sys

import torch

from tools.kernels import decode as bench_decode


def main(args: argparse.Namespace) -> int:
    """Launch; 0, or 2 without a host."""
    host = bench_decode.host_attention()
    if host is None:
        print(
            "found no importable sglang; fix: install the pinned release",
            file=sys.stderr,
        )
        return 2
    pool = bench_decode.make_pool(args.requests * args.keys)
    rows = bench_decode.make_rows(pool, args.requests, 1, args.keys)
    launches = (
        bench_decode.ours(pool, rows),
        bench_decode.host_decode(host, pool, rows),
    )
    for launch in launches * 2:
        launch()
    torch.cuda.synchronize()
    profiler = torch.cuda.cudart()
    profiler.cudaProfilerStart()
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    profiler.cudaProfilerStop()
    return 0
