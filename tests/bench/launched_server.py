# SPDX-License-Identifier: Apache-2.0
"""A fake server as a program: launched_server.py PORT DRAFT_TOKENS [LIE].

Draft tokens 1 is plain decoding; the lie `dies` ends before it answers.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "verify"))

from bench_server import BenchServer  # noqa: E402
from fake_server import Lies  # noqa: E402


async def main(port: str, tokens: str, lie: str = "") -> None:
    if lie == "dies":
        sys.exit(f"out of memory with {tokens} draft tokens")
    width = int(tokens) if lie != "other-width" else 9
    server = BenchServer(
        speculative=width > 1,
        width=width,
        step_s=float(os.environ.get("STEP_S", "0.001")),
        lies=Lies({lie} if lie else set()),
        port=int(port),
        process=os.getpid(),
    )
    async with server:
        Path(f"up-{os.getpid()}").touch()
        await asyncio.sleep(600)


asyncio.run(main(*sys.argv[1:]))
