# SPDX-License-Identifier: Apache-2.0
"""Turn what a server sent into a Sample, or say why it cannot be one.

Everything here treats the server as untrusted: any bytes end in a Sample or in
BadAnswer, never in another exception.
"""

from __future__ import annotations

import contextlib
import json
import time
import unicodedata
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import msgspec
import orjson

from sglang_exact.client.answer import Counters, Sample
from sglang_exact.client.bits import float32_bits
from sglang_exact.client.typed import typed

T = TypeVar("T")
MAX_ID = 2**31
MAX_WIDTH = 4096
# Comments, and fields of an event stream that carry no answer.
NO_DATA = (b":", b"event:", b"id:", b"retry:")


class BadAnswer(ValueError):
    """The server's answer is not a complete, consistent generation."""


def clean(value: object, limit: int = 300) -> str:
    """Server text for people: one line, no control characters, bounded length."""
    text = value if isinstance(value, str) else repr(value)
    text = text[: limit * 4]
    kept = "".join(
        ch if not unicodedata.category(ch).startswith("C") else " " for ch in text
    )
    kept = " ".join(kept.split())
    return kept if len(kept) <= limit else kept[: limit - 3] + "..."


def load_json(raw: bytes) -> Any:
    """Parse JSON; also accepts the NaN and Infinity of Python's own writer.

    Raises BadAnswer for anything else.
    """
    with contextlib.suppress(orjson.JSONDecodeError):
        return orjson.loads(raw)
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        shown = clean(raw[:80].decode("utf-8", "replace"), 80)
        raise BadAnswer(f"answer is not JSON: {shown!r}") from error


def error_text(raw: bytes, limit: int = 300) -> str:
    """The message inside a server's error body, or the body itself, made printable."""
    try:
        body = load_json(raw)
    except BadAnswer:
        return clean(raw[:2000].decode("utf-8", "replace"), limit)
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and key in body:
            body = body[key]
    return clean(body, limit)


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=MAX_ID)]
Count = TokenId | None


class _Entry(msgspec.Struct, array_like=True):
    """[logprob, id, ...] of one token; what follows is not read."""

    logprob: float | None
    id: TokenId

    def bits(self) -> tuple[int | None, int]:
        return float32_bits(self.logprob), self.id


class _Finish(msgspec.Struct):
    type: str
    message: Any = None
    matched: Any = msgspec.UNSET
    length: Any = None


class _Meta(msgspec.Struct):
    completion_tokens: TokenId
    finish_reason: _Finish
    id: Any = None
    prompt_tokens: Count = None
    cached_tokens: Count = None
    output_token_logprobs: list[_Entry] | None = None
    output_top_logprobs: list[list[_Entry] | None] | None = None
    spec_verify_ct: Count = None
    spec_num_correct_drafts: Count = None
    spec_num_proposed_drafts: Count = None
    spec_correct_drafts_histogram: (
        Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_WIDTH)] | None
    ) = None
    num_retractions: Count = None


class _Generated(msgspec.Struct):
    meta_info: _Meta
    output_ids: tuple[TokenId, ...]


class _Progress(msgspec.Struct):
    completion_tokens: TokenId


class _Chunk(msgspec.Struct):
    meta_info: _Progress
    output_ids: list[TokenId]


class _Chat(msgspec.Struct):
    choices: list[dict[str, Any]]


def _read(body: Any, kind: type[T]) -> T:
    """A server's JSON as a `kind`. Raises BadAnswer."""
    if isinstance(body, dict) and "error" in body:
        raise BadAnswer(f"server reports an error: {clean(body['error'])}")
    return typed(body, kind, lambda text: BadAnswer(f"not a whole answer: {text}"))


def parse_answer(
    body: Any, *, logprobs: bool, top_k: int = 0, chunks: tuple[int, ...] = ()
) -> Sample:
    """Check a finished /generate answer and take what is compared out of it.

    `logprobs` and `top_k` say what was asked for and so has to be there.

    Raises BadAnswer where a field is missing, has another type, or contradicts another.
    """
    found = _read(body, _Generated)
    ids, meta = found.output_ids, found.meta_info
    if meta.completion_tokens != len(ids):
        raise BadAnswer(
            f"completion_tokens is {meta.completion_tokens} but {len(ids)} output_ids "
            "were sent"
        )
    values: tuple[int | None, ...] = ()
    # Also taken where they were not asked for: that they are there is a finding.
    if logprobs or meta.output_token_logprobs:
        values = _chosen(meta.output_token_logprobs, ids)
    return Sample(
        ids=ids,
        logprobs=values,
        top=_top(meta.output_top_logprobs, len(ids), top_k) if logprobs else (),
        finish=_finish(meta.finish_reason),
        prompt_tokens=meta.prompt_tokens,
        cached_tokens=meta.cached_tokens,
        counters=Counters(
            verify=meta.spec_verify_ct,
            correct=meta.spec_num_correct_drafts,
            proposed=meta.spec_num_proposed_drafts,
            histogram=meta.spec_correct_drafts_histogram or (),
            retractions=meta.num_retractions,
        ),
        chunks=chunks,
        rid=clean(meta.id, 80) if isinstance(meta.id, str) else "",
    )


def _finish(found: _Finish) -> str:
    kind = clean(found.type, 40)
    if kind == "abort":
        raise BadAnswer(f"server aborted the request: {clean(found.message)}")
    detail = found.length if found.matched is msgspec.UNSET else found.matched
    return kind if detail is None else f"{kind}:{clean(detail, 60)}"


def _chosen(found: list[_Entry] | None, ids: tuple[int, ...]) -> tuple[int | None, ...]:
    if found is None:
        raise BadAnswer("logprobs were asked for and output_token_logprobs is missing")
    if len(found) != len(ids):
        raise BadAnswer(f"{len(found)} logprobs were sent for {len(ids)} output_ids")
    for position, (entry, token) in enumerate(zip(found, ids, strict=True)):
        if entry.id != token:
            raise BadAnswer(
                f"at position {position} the logprob belongs to id {entry.id}, "
                f"output_ids says {token}"
            )
    return tuple(float32_bits(entry.logprob) for entry in found)


def _top(
    found: list[list[_Entry] | None] | None, length: int, top_k: int
) -> tuple[tuple[tuple[int | None, int], ...], ...]:
    if found is None and not top_k:
        return ()
    if found is None or len(found) != length:
        raise BadAnswer("output_top_logprobs does not cover every output position")
    rows = [row or [] for row in found]
    # A shorter list on both sides would be equal without having been looked at.
    for row in rows:
        if top_k and len(row) != top_k:
            raise BadAnswer(
                f"a top-logprob row has {len(row)} entries, expected {top_k}"
            )
    return tuple(sort_top([entry.bits() for entry in row]) for row in rows)


def sort_top(
    pairs: list[tuple[int | None, int]],
) -> tuple[tuple[int | None, int], ...]:
    """Highest logprob first, ties by id, values that are not finite last.

    Logprobs are at most 0, so the larger bit pattern is the smaller value; +0.0 sorts
    before -0.0.
    """
    return tuple(
        sorted(pairs, key=lambda pair: (pair[0] is None, pair[0] or 0, pair[1]))
    )


class StreamReader:
    """Collects the chunks of a streamed /generate answer.

    The host sends cumulative chunks, or deltas with --incremental-streaming-output; the
    two are told apart by completion_tokens, which is cumulative in both. `began` is the
    time.monotonic() that arrivals count from.
    """

    def __init__(self, began: float = 0.0) -> None:
        self._began = began
        self._arrivals: list[tuple[int, float]] = []
        self._ids: list[int] = []
        self._lists: dict[str, list[Any]] = {}
        self._last: dict[str, Any] | None = None
        self._chunks: list[int] = []
        self.done = False

    def feed(self, line: bytes) -> None:
        """Take one line of the event stream. Raises BadAnswer for a bad one."""
        # The clock is read before the chunk is parsed: parsing is the client's time.
        at = time.monotonic() - self._began
        line = line.strip()
        if not line or line.startswith(NO_DATA):
            return
        if not line.startswith(b"data:"):
            shown = clean(line[:60].decode("utf-8", "replace"))
            raise BadAnswer(f"not an event-stream line: {shown!r}")
        payload = line[5:].strip()
        if payload == b"[DONE]":
            self.done = True
            return
        self._take(load_json(payload), at)

    def _take(self, body: dict[str, Any], at: float) -> None:
        found = _read(body, _Chunk)
        ids, total = found.output_ids, found.meta_info.completion_tokens
        cumulative = len(ids) == total
        if not cumulative and len(self._ids) + len(ids) != total:
            raise BadAnswer(
                f"a stream chunk brings {len(ids)} ids after {len(self._ids)} "
                f"and says {total} in all"
            )
        if cumulative and ids[: len(self._ids)] != self._ids:
            raise BadAnswer("a later stream chunk changed tokens already sent")
        fresh = total - len(self._ids)
        if fresh:
            self._chunks.append(fresh)
            self._arrivals.append((total, at))
        self._ids = ids if cumulative else self._ids + ids
        for key in ("output_token_logprobs", "output_top_logprobs"):
            part = body["meta_info"].get(key)
            if isinstance(part, list):
                whole = cumulative and len(part) >= total
                self._lists[key] = part if whole else self._lists.get(key, []) + part
        self._last = body

    def finish(self, *, logprobs: bool, top_k: int = 0) -> Sample:
        """The whole answer. Raises BadAnswer if the stream ended early."""
        if self._last is None:
            raise BadAnswer("the stream ended before any token")
        if not self.done:
            raise BadAnswer("the stream ended without [DONE]: answer cut off")
        meta = {**self._last["meta_info"], **self._lists}
        body = {"output_ids": self._ids, "meta_info": meta}
        sample = parse_answer(
            body, logprobs=logprobs, top_k=top_k, chunks=tuple(self._chunks)
        )
        return replace(sample, arrivals=tuple(self._arrivals))


def choice_of(body: Any) -> dict[str, Any]:
    """The one choice of a chat answer, in the shape of a /generate answer.

    Raises BadAnswer for anything else.
    """
    choices = _read(body, _Chat).choices
    if not choices:
        raise BadAnswer(f"chat answer has no choices: {clean(body, 80)}")
    if "response_token_ids" not in choices[0] or "meta_info" not in choices[0]:
        raise BadAnswer(
            "chat answer has no response_token_ids and meta_info; expected an SGLang "
            "server that knows return_token_ids and return_meta_info"
        )
    return {
        "output_ids": choices[0]["response_token_ids"],
        "meta_info": choices[0]["meta_info"],
    }
