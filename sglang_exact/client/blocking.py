# SPDX-License-Identifier: Apache-2.0
"""Token ids in, token ids and exact log-probabilities out, over the host's HTTP API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sglang_exact.client import http
from sglang_exact.client.bits import float32_bits
from sglang_exact.client.wire import load_json

T = TypeVar("T")


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


class Client:
    """Talks to one running server, a call at a time; any number of threads may call.

    `url` is without a trailing slash, `timeout_s` of one request.
    """

    def __init__(self, url: str, timeout_s: float = 300.0) -> None:
        self.url, self.timeout_s = url, timeout_s

    def _run(self, work: Callable[[http.Client], Coroutine[Any, Any, T]]) -> T:
        async def whole() -> T:
            timeout = self.timeout_s
            async with http.Client(self.url, timeout=timeout, shown=2000) as client:
                return await work(client)

        return asyncio.run(whole())

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """GET `path`, or POST `body` as JSON; the decoded answer, None if it is none.

        Raises:
            RuntimeError: the server answered with an error status; its text is in
                the message.
            OSError: no connection, or no whole answer.
        """
        try:
            text = self._run(lambda client: client.request(path, body))
        except (http.Refused, http.Failed, http.Lost) as error:
            if error.__cause__ is not None:
                raise ConnectionError(f"{path}: {error}") from error
            raise RuntimeError(f"{path}: found HTTP {error}, expected 200") from error
        return load_json(text) if text.strip().startswith((b"{", b"[")) else None

    def is_ready(self) -> bool:
        """Whether the server accepts requests; generates nothing."""
        return self._run(lambda client: client.is_ready())

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

        `extra` are further top-level fields of the request, `sampling` its sampling
        parameters. Raises RuntimeError where the server refused or failed.
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
