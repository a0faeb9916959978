# SPDX-License-Identifier: Apache-2.0
"""One message with every reason, each complete."""

from __future__ import annotations

from pathlib import Path

from sglang_exact.reasons import GUIDE, HEADLINE, Reason, Refused, message

ROOT = Path(__file__).resolve().parents[2]

A = Reason("x=1", "x=2", "set x to 2")
B = Reason("y", "z", "use z")


def test_message_has_every_reason_once() -> None:
    assert message([A, B, A]).splitlines() == [
        HEADLINE,
        "  - found x=1; expected x=2; fix: set x to 2",
        "  - found y; expected z; fix: use z",
    ]


def test_refused_is_what_the_host_reports() -> None:
    """ServerArgs and request errors of the host are ValueErrors."""
    refused = Refused([A, B])
    assert isinstance(refused, ValueError)
    assert refused.reasons == [A, B]
    assert str(refused) == message([A, B])


def test_the_headline_names_the_guide() -> None:
    assert GUIDE in HEADLINE
    assert (ROOT / GUIDE).is_file()
