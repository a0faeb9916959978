# SPDX-License-Identifier: Apache-2.0
"""One server of a proof, and one pass over the prompts on it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Phase(NamedTuple):
    """One pass over prompts: oracle rate, requests in flight, how many prompts.

    `prompts` 0 asks each once. `text` names them, and what is asked with them: one of
    `TEXTS`. In a `first` turn a drafter that learns from answers knows none yet, and
    may draft nothing right. `whole` asks for that many tokens, a context's rest, as
    chats without max_tokens do; each request ends at a token of its plain answer.
    """

    rate: float = 0.8
    concurrency: int = 8
    prompts: int = 24
    logprobs: bool = True
    text: str = "random"
    first: bool = False
    whole: int = 0


class Arm(NamedTuple):
    """One server of a proof, and what is asked of it.

    Attributes:
        name: of the arm.
        title: for readers; goes into its results.
        drafter: its name in `drafters.DRAFTERS`; None for plain decoding.
        draft_tokens: verified per block.
        mode, deterministic: of `Server`.
        disable: hooks to leave out, joined by commas.
        phases: what is asked, in this order; each proof has phases of its own kind.
        records: sets of prompts to which its answers are what others are held against.
        reference: arm whose answers its own are compared with.
        equal: what is expected of its answers; None compares and expects nothing.
        requests: in flight at most; 0 for the proof's own number.
        oracle: drafts are the oracle's; without it the drafter's own.
        flags: further ones of the host, after and over the shared ones.
        env: further variables.
        fresh: start with empty caches.
        overlap: overlap scheduling; on is the host's default.
        refusal: what the server says when it refuses to start, as it shall.
        cache: prefixes are cached, and each phase has to find some.
    """

    name: str
    title: str
    drafter: str | None = None
    draft_tokens: int = 8
    mode: str = "exact"
    deterministic: bool = True
    disable: str = ""
    phases: tuple[Any, ...] = ()
    records: tuple[str, ...] = ()
    reference: str = "plain"
    equal: bool | None = True
    requests: int = 0
    oracle: bool = True
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    fresh: bool = False
    overlap: bool = True
    refusal: str = ""
    cache: bool = False

    @property
    def drawn(self) -> bool:
        """Whether an oracle draws its drafts."""
        return self.drafter is not None and self.oracle
