# SPDX-License-Identifier: Apache-2.0
"""Ports for servers: free, and never one that the kernel hands out by itself."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sglang_exact.client import process as ports

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_a_port_is_free_and_in_the_range() -> None:
    found = {ports.free_port() for _ in range(20)}
    assert len(found) > 1
    for port in found:
        assert port in ports.RANGE
        with socket.socket() as s:
            s.bind(("127.0.0.1", port))


def test_the_kernel_hands_out_none_of_them() -> None:
    """Control: a port that it picks itself lies elsewhere."""
    if not EPHEMERAL.exists():
        pytest.skip("needs Linux")
    lowest = int(EPHEMERAL.read_text().split()[0])
    assert max(ports.RANGE) < 32_768
    if lowest < 32_768:
        pytest.skip(f"this machine hands out ports from {lowest} on")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        assert s.getsockname()[1] not in ports.RANGE


def test_a_taken_port_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        taken = s.getsockname()[1]
        monkeypatch.setattr(ports, "_TRIES", 1)
        monkeypatch.setattr(ports, "RANGE", range(taken, taken + 1))
        with pytest.raises(OSError, match=f"between {taken} and .* expected a free"):
            ports.free_port()
