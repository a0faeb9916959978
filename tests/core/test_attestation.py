# SPDX-License-Identifier: Apache-2.0
"""Every rank says the same, or the server is not ready."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_exact import attestation, compat
from sglang_exact.reasons import Reason
from sglang_exact.settings import Settings


def rank(number: int, **changes: object) -> dict[str, Any]:
    return {"rank": number, "digest": "d", "hooks": ["a"], "gpu": "H", **changes}


def test_equal_ranks() -> None:
    assert attestation.rank_reasons([rank(0), rank(1)]) == []


@pytest.mark.parametrize("records", [[], [None], [rank(0), None]])
def test_missing_rank(records: list[dict[str, Any] | None]) -> None:
    (reason,) = attestation.rank_reasons(records)
    assert "no attestation from rank(s)" in reason.found


@pytest.mark.parametrize("change", [{"digest": "e"}, {"hooks": []}, {"gpu": "B"}])
def test_rank_that_differs(change: dict[str, object]) -> None:
    (reason,) = attestation.rank_reasons([rank(0), rank(1), rank(2, **change)])
    assert "rank 2 attests something else" in reason.found


def test_numerics() -> None:
    """`bitwise` needs the pins, every hook and a GPU."""
    on = Settings(enable=True)
    assert attestation.numerics(on, "cuda:0", True) == attestation.BITWISE
    assert attestation.numerics(on, "cpu", True) == attestation.UNVERIFIED
    off = on._replace(disabled_hooks=("gdn_verify",))
    assert attestation.numerics(off, "cuda:0", True) == attestation.UNVERIFIED
    waived = on._replace(allow_unpinned_host=True)
    assert attestation.numerics(waived, "cuda:0", False) == attestation.UNVERIFIED


@pytest.mark.parametrize("changed", [False, True])
def test_a_changed_host_is_never_bitwise(
    monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    """The pinned version with one changed function, let in by the waiver."""
    reasons = [Reason("another source", "its pin", "reinstall")] if changed else []
    monkeypatch.setattr(compat, "reasons", lambda names: reasons)
    on = Settings(enable=True, allow_unpinned_host=True)
    found = attestation.record(on, {"device": "cuda:0"})
    assert found["host_pinned"] is not changed
    assert (found["numerics"] == attestation.BITWISE) is not changed


def test_log_line_shows_test_settings() -> None:
    found = {
        "version": "1", "numerics": "unverified", "hooks": ["a", "b"],
        "host_version": "0.5.23", "host_pinned": True, "digest": "0123456789abcdef",
        "test_settings": {"oracle": True},
    }  # fmt: skip
    line = attestation.log_line(found)
    assert line == (
        "sglang_exact 1: unverified, 2 hooks, host 0.5.23 (pinned), digest "
        "0123456789ab, TEST SETTINGS {'oracle': True}"
    )


def test_digest_is_of_the_source() -> None:
    assert attestation.digest() == attestation.digest()
    assert len(attestation.digest()) == 64
