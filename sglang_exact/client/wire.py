# SPDX-License-Identifier: Apache-2.0
"""Turn what a server sent into a Sample, or say why it cannot be one.

Everything here treats the server as untrusted: any bytes end in a Sample or in
BadAnswer, never in another exception.
"""

from __future__ import annotations

import json
import time
import unicodedata
from dataclasses import replace
from typing import Any

import orjson

from sglang_exact.client.answer import Counters, Sample
from sglang_exact.client.bits import float32_bits

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
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        shown = clean(raw[:80].decode("utf-8", "replace"), 80)
        raise BadAnswer(f"answer is not JSON: {shown!r}") from error


def error_text(raw: bytes) -> str:
    """The message inside a server's error body, or the body itself, made printable."""
    try:
        body = load_json(raw)
    except BadAnswer:
        return clean(raw[:2000].decode("utf-8", "replace"))
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and key in body:
            body = body[key]
    return clean(body)


def parse_answer(
    body: Any, *, logprobs: bool, top_k: int = 0, chunks: tuple[int, ...] = ()
) -> Sample:
    """Check a finished /generate answer and take what is compared out of it.

    `logprobs` and `top_k` say what was asked for and so has to be there.

    Raises BadAnswer where a field is missing, has another type, or contradicts another.
    """
    if isinstance(body, dict) and "error" in body:
        raise BadAnswer(f"server reports an error: {clean(body['error'])}")
    if not isinstance(body, dict) or not isinstance(body.get("meta_info"), dict):
        raise BadAnswer("answer has no meta_info object")
    meta = body["meta_info"]
    ids = _ids(body.get("output_ids"))
    finish = _finish(meta.get("finish_reason"))
    completion = _count(meta, "completion_tokens")
    if completion is None:
        raise BadAnswer("meta_info has no completion_tokens")
    if completion != len(ids):
        raise BadAnswer(
            f"completion_tokens is {completion} but {len(ids)} output_ids were sent"
        )
    values: tuple[int | None, ...] = ()
    top: tuple[tuple[tuple[int | None, int], ...], ...] = ()
    # Also taken where they were not asked for: that they are there is a finding.
    if logprobs or meta.get("output_token_logprobs"):
        values = _chosen(meta.get("output_token_logprobs"), ids)
    if logprobs:
        top = _top(meta.get("output_top_logprobs"), len(ids), top_k)
    return Sample(
        ids=ids,
        logprobs=values,
        top=top,
        finish=finish,
        prompt_tokens=_count(meta, "prompt_tokens"),
        cached_tokens=_count(meta, "cached_tokens"),
        counters=_counters(meta),
        chunks=chunks,
        rid=clean(meta["id"], 80) if isinstance(meta.get("id"), str) else "",
    )


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise BadAnswer("answer has no output_ids list")
    for item in value:
        if type(item) is not int or not 0 <= item < MAX_ID:
            raise BadAnswer(f"output_ids holds {clean(item, 40)}, not a token id")
    return tuple(value)


def _finish(value: Any) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise BadAnswer("answer has no finish_reason: the generation is not complete")
    kind = clean(value["type"], 40)
    if kind == "abort":
        raise BadAnswer(f"server aborted the request: {clean(value.get('message'))}")
    detail = value.get("matched", value.get("length"))
    return kind if detail is None else f"{kind}:{clean(detail, 60)}"


def _count(meta: dict[str, Any], key: str) -> int | None:
    value = meta.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < MAX_ID:
        raise BadAnswer(f"meta_info.{key} is {clean(value, 40)}, not a count")
    return value


def _number(value: Any) -> float | None:
    if value is None or (type(value) in (int, float)):
        try:
            return None if value is None else float(value)
        except OverflowError as error:
            raise BadAnswer("a logprob is too large for a number") from error
    raise BadAnswer(f"a logprob is {clean(value, 40)}, not a number")


def _pair(value: Any) -> tuple[int | None, int]:
    if not isinstance(value, list) or len(value) < 2:
        raise BadAnswer(f"a logprob entry is {clean(value, 60)}, not [logprob, id]")
    if type(value[1]) is not int or not 0 <= value[1] < MAX_ID:
        raise BadAnswer(f"a logprob entry names id {clean(value[1], 40)}")
    return float32_bits(_number(value[0])), value[1]


def _chosen(value: Any, ids: tuple[int, ...]) -> tuple[int | None, ...]:
    if not isinstance(value, list):
        raise BadAnswer("logprobs were asked for and output_token_logprobs is missing")
    if len(value) != len(ids):
        raise BadAnswer(f"{len(value)} logprobs were sent for {len(ids)} output_ids")
    pairs = [_pair(item) for item in value]
    for position, (pair, token) in enumerate(zip(pairs, ids, strict=True)):
        if pair[1] != token:
            raise BadAnswer(
                f"at position {position} the logprob belongs to id {pair[1]}, "
                f"output_ids says {token}"
            )
    return tuple(bits for bits, _ in pairs)


def _top(
    value: Any, length: int, top_k: int
) -> tuple[tuple[tuple[int | None, int], ...], ...]:
    if value is None and not top_k:
        return ()
    if not isinstance(value, list) or len(value) != length:
        raise BadAnswer("output_top_logprobs does not cover every output position")
    return tuple(sort_top([_pair(item) for item in _row(row, top_k)]) for row in value)


def _row(row: Any, top_k: int) -> list[Any]:
    if row is not None and not isinstance(row, list):
        raise BadAnswer(f"a top-logprob row is {clean(row, 40)}, not a list")
    found = row or []
    # A shorter list on both sides would be equal without having been looked at.
    if top_k and len(found) != top_k:
        raise BadAnswer(f"a top-logprob row has {len(found)} entries, expected {top_k}")
    return found


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


def _counters(meta: dict[str, Any]) -> Counters:
    histogram = meta.get("spec_correct_drafts_histogram")
    if histogram is not None and not (
        isinstance(histogram, list)
        and len(histogram) <= MAX_WIDTH
        and all(type(item) is int and 0 <= item < MAX_ID for item in histogram)
    ):
        raise BadAnswer("spec_correct_drafts_histogram is not a list of counts")
    return Counters(
        verify=_count(meta, "spec_verify_ct"),
        correct=_count(meta, "spec_num_correct_drafts"),
        proposed=_count(meta, "spec_num_proposed_drafts"),
        histogram=tuple(histogram or ()),
        retractions=_count(meta, "num_retractions"),
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
        body = load_json(payload)
        if isinstance(body, dict) and "error" in body:
            raise BadAnswer(f"server reports an error: {clean(body['error'])}")
        if not isinstance(body, dict) or not isinstance(body.get("meta_info"), dict):
            raise BadAnswer("a stream chunk has no meta_info object")
        self._take(body, at)

    def _take(self, body: dict[str, Any], at: float) -> None:
        ids, meta = list(_ids(body.get("output_ids"))), body["meta_info"]
        total = _count(meta, "completion_tokens")
        if total is None:
            raise BadAnswer("a stream chunk has no completion_tokens")
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
            part = meta.get(key)
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
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise BadAnswer(f"chat answer has no choices: {clean(body, 80)}")
    choice = choices[0]
    if "response_token_ids" not in choice or "meta_info" not in choice:
        raise BadAnswer(
            "chat answer has no response_token_ids and meta_info; expected an SGLang "
            "server that knows return_token_ids and return_meta_info"
        )
    return {
        "output_ids": choice["response_token_ids"],
        "meta_info": choice["meta_info"],
    }
