# SPDX-License-Identifier: Apache-2.0
"""Show what one steady decode or verify step does on the GPU: waits, allocations, code
loads, graph launches and the costliest kernels.

    scripts/profile_steps --url http://127.0.0.1:30000 --traces DIR --out FILE
        [--in-flight 1] [--steps 20] [--ids FILE]

Talks to a running server on this machine; --traces is a folder both can use. --ids is
JSON, a list of token id lists; without it seeded random ids of 256 tokens are asked.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from sglang_exact.bench import provenance
from sglang_exact.client.blocking import Client
from tools.proof import trace


def find_trace(folder: Path, deadline: float) -> Path:
    """The finished trace in `folder`.

    Raises:
        RuntimeError: none came in time.
    """
    size = -1
    while time.monotonic() < deadline:
        for path in folder.glob("**/*.trace.json*"):
            # The host writes in place: finished when it stops growing.
            now = path.stat().st_size
            if now and now == size:
                return path
            size = now
        time.sleep(1.0)
    raise RuntimeError(
        f"found no finished trace under {folder}, expected one. Fix: check that the "
        "server can write there, and that requests ran long enough (--new)."
    )


def profile(
    client: Client, prompts: list[list[int]], args: argparse.Namespace
) -> trace.Steps:
    """Profile `args.steps` steps while the prompts are decoded."""
    folder = Path(args.traces).resolve() / uuid.uuid4().hex[:8]
    folder.mkdir(parents=True)
    work = threading.Thread(
        target=client.generate_many,
        args=(prompts, args.new),
        kwargs={"concurrency": len(prompts), "return_logprob": False},
    )
    work.start()
    time.sleep(args.settle)
    body: dict[str, Any] = {
        "output_dir": str(folder),
        "num_steps": args.steps,
        "activities": ["CPU", "GPU"],
        "with_stack": False,
        "record_shapes": False,
    }
    client.request("/start_profile", body)
    found = find_trace(folder, time.monotonic() + args.timeout)
    work.join()
    return trace.summarise(trace.read_events(found), args.steps)


def main(args: argparse.Namespace) -> int:
    """Profile; 0, or 2 where nothing came of it."""
    if args.ids:
        prompts = json.loads(Path(args.ids).read_text())[: args.in_flight]
    else:
        rng = random.Random(1)
        prompts = [
            [rng.randrange(1000, args.vocab - 1000) for _ in range(256)]
            for _ in range(args.in_flight)
        ]
    client = Client(args.url)
    try:
        server = client.info().get("sglang_exact")
        steps = profile(client, prompts, args)
    except (RuntimeError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    result = {
        "command": " ".join(["scripts/profile_steps", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "gpus": provenance.gpus(),
        "server": server,
        "in_flight": args.in_flight,
        **steps.record(),
    }
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{steps.span_us:.0f} us a step, GPU busy {steps.busy_us:.0f} us; "
        f"{steps.kernels:g} kernels, {steps.graph_launches:g} graph launches\n"
        f"waits {steps.waits}; allocations {steps.allocations}; loads {steps.loads}"
    )
    for name, us, launches in steps.top:
        print(f"{us:9.1f} us {launches:7.2f} x  {name}")
    return 0
