#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""health.py [URL]: exit status 0 when the server answers GET /health with 200.

/health needs no key and generates one token. The launcher opens it only after every
rank has attested, so a healthy server is an attested one. SGLANG_EXACT_... variables
are not read: the port comes from HEALTH_PORT (30000).
"""

from __future__ import annotations

import os
import sys
import urllib.request
from collections.abc import Sequence

TIMEOUT_S = 20.0


def main(argv: Sequence[str]) -> int:
    """Ask once."""
    port = os.environ.get("HEALTH_PORT", "30000")
    url = argv[0] if argv else f"http://127.0.0.1:{port}/health"
    # A proxy of the container is for downloads, not for its own server.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=TIMEOUT_S) as answer:
            return 0 if answer.status == 200 else 1
    except (OSError, ValueError) as error:
        sys.stderr.write(f"health: {url}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
