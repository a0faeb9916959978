# SPDX-License-Identifier: Apache-2.0
"""A TCP port for a server that starts later."""

from __future__ import annotations

import random
import socket

RANGE = range(20_000, 32_000)
"""Below what Linux hands out by itself (ip_local_port_range, from 32768 on)."""

_TRIES = 200


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that nobody listens on, and that nobody is given by chance.

    A port that the kernel picks may be handed out again, to the store or the message
    sockets of the very server that it was picked for: that server needs seconds
    before it listens, and then ends because its address is taken.

    Raises:
        OSError: none was found free.
    """
    for port in random.SystemRandom().sample(RANGE, _TRIES):
        with socket.socket() as s:
            try:
                s.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(
        f"found {_TRIES} ports of {host} between {RANGE.start} and {RANGE.stop} all in "
        "use, expected a free one; fix: stop what listens there"
    )
