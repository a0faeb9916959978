# SPDX-License-Identifier: Apache-2.0
"""Bundles for hosts without a network; docs/offline.md.

    scripts/offline_bundle make --arch 120 --site SITE --out DIR    where there is one
    python3.12 DIR/unpack.py --into /opt/sglang-exact               where there is none

Exit codes of make: 0 made, 2 refused, with every reason.
"""

from __future__ import annotations

import argparse

from tools.offline import make, unpack


def main() -> int:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    make.add_arguments(verbs.add_parser("make", help="make a bundle"))
    unpack.add_arguments(verbs.add_parser("unpack", help="install one"))
    args = parser.parse_args()
    return make.main(args) if args.verb == "make" else unpack.main(args)
