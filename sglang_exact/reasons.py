# SPDX-License-Identifier: Apache-2.0
"""Why a set-up is refused: found, expected, fix; every reason at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

GUIDE = "docs/troubleshooting.md"
"""Where every message of this package is explained, in the repository."""

HEADLINE = f"sglang_exact cannot run this setup (see {GUIDE}):"


class Reason(NamedTuple):
    """One reason for a refusal, in words a user can act on."""

    found: str
    expected: str
    fix: str

    def __str__(self) -> str:
        return f"found {self.found}; expected {self.expected}; fix: {self.fix}"


class Refused(ValueError):
    """Raised where the host reports errors itself (argument checks, requests).

    `reasons` holds every reason; the text is the one message a user sees.
    """

    def __init__(self, reasons: Iterable[Reason]) -> None:
        self.reasons = list(reasons)
        super().__init__(message(self.reasons))


def message(reasons: Iterable[Reason]) -> str:
    """The refusal text: a headline, then one line per distinct reason."""
    lines = dict.fromkeys(str(reason) for reason in reasons)
    return "\n".join([HEADLINE, *(f"  - {line}" for line in lines)])
