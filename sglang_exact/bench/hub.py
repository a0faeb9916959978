# SPDX-License-Identifier: Apache-2.0
"""`python -m sglang_exact.bench.hub REPO CONFIG SPLIT`: rows as JSON lines on stdout.

A program of its own because the hub's client imports much and retries long.
"""

from __future__ import annotations

import sys

import orjson


def main() -> None:
    """Write every row of the split."""
    repo, config, split = sys.argv[1:]
    try:
        from datasets import load_dataset
    except ImportError:
        sys.exit("the package datasets is not installed")
    rows = load_dataset(repo, config or None, split=split)
    for row in rows:
        sys.stdout.buffer.write(orjson.dumps(row) + b"\n")


if __name__ == "__main__":
    main()
