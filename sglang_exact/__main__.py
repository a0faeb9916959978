# SPDX-License-Identifier: Apache-2.0
"""`python -m sglang_exact` is `sglang-exact`."""

from __future__ import annotations

from sglang_exact.cli import main

if __name__ == "__main__":
    main()
