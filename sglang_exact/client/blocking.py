# SPDX-License-Identifier: Apache-2.0
"""Token ids in, token ids and exact log-probabilities out, over the host's HTTP API."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sglang_exact.client.bits import float32_bits


@dataclass(frozen=True)
class Completion:
    """One finished request.

    Attributes:
        ids: generated token ids.
        logprobs: float32 bits of each id's log-probability; empty if not asked for.
        finish_reason: "length", "stop" or "abort".
        spec_verify_ct: target verifications; 0 without speculation.
        completion_tokens: generated tokens.
        acceptance_length: completion_tokens / spec_verify_ct, None without speculation.
        raw: the whole JSON answer.
    """

    ids: tuple[int, ...]
    logprobs: tuple[int, ...]
    finish_reason: str
    spec_verify_ct: int
    completion_tokens: int
    acceptance_length: float | None
    raw: Mapping[str, Any] = field(repr=False, compare=False)


def completion_of(answer: Mapping[str, Any]) -> Completion:
    """Read one answer of POST /generate.

    Raises RuntimeError for a log-probability that is not finite: it proves nothing.
    """
    meta = answer["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    verify_ct = int(meta.get("spec_verify_ct") or 0)
    bits = tuple(float32_bits(pair[0]) for pair in pairs)
    if None in bits:
        raise RuntimeError(
            f"found a log-probability that is not finite at token {bits.index(None)}, "
            "expected a number"
        )
    tokens = int(meta["completion_tokens"])
    reason = meta["finish_reason"]
    return Completion(
        ids=tuple(answer["output_ids"]),
        logprobs=tuple(b for b in bits if b is not None),
        finish_reason=reason["type"] if isinstance(reason, Mapping) else str(reason),
        spec_verify_ct=verify_ct,
        completion_tokens=tokens,
        acceptance_length=tokens / verify_ct if verify_ct else None,
        raw=answer,
    )


_READY_S = 10.0


class Client:
    """Talks to one running server.

    Args:
        url: base URL, without a trailing slash.
        timeout_s: of one request.
    """

    def __init__(self, url: str, timeout_s: float = 300.0) -> None:
        self.url = url
        self.timeout_s = timeout_s
        # A proxy of the environment has no business with a local server.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def request(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """GET `path`, or POST `body` as JSON; the decoded answer, None if empty.

        Args:
            path, body: what is asked for.
            timeout_s: of this request, if not the client's own.

        Raises:
            RuntimeError: the server answered with an error status; its text is in
                the message.
            OSError: no connection.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        try:
            seconds = self.timeout_s if timeout_s is None else timeout_s
            with self._opener.open(request, timeout=seconds) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:2000]
            raise RuntimeError(
                f"{path}: found HTTP {error.code}, expected 200: {detail}"
            ) from error
        return json.loads(text) if text.strip().startswith((b"{", b"[")) else None

    def is_ready(self) -> bool:
        """Whether the server accepts requests; generates nothing."""
        try:
            self.request("/ready", timeout_s=min(self.timeout_s, _READY_S))
        except (OSError, RuntimeError):
            return False
        return True

    def info(self) -> dict[str, Any]:
        """GET /server_info."""
        answer: dict[str, Any] = self.request("/server_info")
        return answer

    def flush_cache(self) -> None:
        """Empty the prefix cache, once the last request has left."""
        self.request("/flush_cache?timeout=30", {})

    def generate(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int,
        *,
        return_logprob: bool = True,
        extra: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Completion:
        """Generate from token ids; greedy and past end tokens unless told otherwise.

        Args:
            input_ids: prompt.
            max_new_tokens: at most as many.
            return_logprob: ask for the log-probability of each generated token.
            extra: further top-level fields of the request.
            **sampling: sampling parameters; temperature 0 and ignore_eos by default.

        Raises:
            RuntimeError: the server refused or failed.
        """
        parameters = {"temperature": 0, "ignore_eos": True, **sampling}
        parameters["max_new_tokens"] = max_new_tokens
        body = {
            "input_ids": list(input_ids),
            "sampling_params": parameters,
            "return_logprob": return_logprob,
            **(extra or {}),
        }
        return completion_of(self.request("/generate", body))

    def generate_many(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        concurrency: int = 1,
        **options: Any,
    ) -> list[Completion]:
        """`generate` for each prompt, at most `concurrency` at a time, in order."""
        with ThreadPoolExecutor(max_workers=concurrency) as pool:
            return list(
                pool.map(
                    lambda ids: self.generate(ids, max_new_tokens, **options), prompts
                )
            )
