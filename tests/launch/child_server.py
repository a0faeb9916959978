# SPDX-License-Identifier: Apache-2.0
"""Start the host's server in a spawned child process, as routers and frameworks do."""

from __future__ import annotations

import multiprocessing
import sys


def serve(argv: list[str]) -> None:
    """Load the plugins and become the server."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(argv))


if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(sys.argv[1:],)
    )
    process.start()
    process.join()
    sys.exit(process.exitcode)
