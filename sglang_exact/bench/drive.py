# SPDX-License-Identifier: Apache-2.0
"""Requests in flight: who asks what, and when every token came.

Non-streamed requests go to /generate or, where the prompt is a conversation, to
/v1/chat/completions, so that the server applies its own chat template. Streamed ones go
to /generate alone: only there do ids, counters and streaming come together.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import aiohttp
import orjson

from sglang_exact.verify.client import (
    BROKEN,
    MAX_STREAM,
    Client,
    Failed,
    Lost,
    Refused,
    _named,
    _read,
    request_body,
)
from sglang_exact.verify.model import Case, Manner, Prompt, Sample
from sglang_exact.verify.wire import (
    BadAnswer,
    StreamReader,
    clean,
    load_json,
    parse_answer,
)

IDS_ONLY = Manner(logprobs=False, top=0, stream=False)
WITH_LOGPROBS = Manner(logprobs=True, top=0, stream=False)
STREAMED = Manner(logprobs=False, top=0, stream=True)
STREAMED_LOGPROBS = Manner(logprobs=True, top=0, stream=True)
# A server that fails so often in a row will not answer the rest either.
GIVE_UP = 5


class CannotRun(RuntimeError):
    """Nothing can be measured, or no more; the text says what was found, what was
    expected and how to fix it."""


class Display(Protocol):
    """Progress; `verify.console.Bar` is one."""

    def begin(self, name: str, tokens: int) -> None:
        """A part with so many tokens to go begins."""

    def advance(self, tokens: int) -> None:
        """So many tokens are done."""

    def say(self, text: str) -> None:
        """One line."""


@dataclass(frozen=True, slots=True)
class Request:
    """One greedy request: exactly one of `ids`, `text` and `messages` is set.

    `thinking` switches the chat template's reasoning on or off; None leaves the
    template's default.
    """

    id: str
    max_new_tokens: int
    ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    min_new_tokens: int | None = None
    ignore_eos: bool = False
    thinking: bool | None = None

    def body(self, manner: Manner) -> dict[str, Any]:
        """The JSON of the request."""
        if self.messages is not None:
            return self._chat_body(manner)
        prompt = Prompt(self.id, "bench", text=self.text, ids=self.ids)
        case = Case(prompt, self.max_new_tokens, ignore_eos=self.ignore_eos)
        body = request_body(case, manner)
        if self.min_new_tokens is not None:
            body["sampling_params"]["min_new_tokens"] = self.min_new_tokens
        return body

    def _chat_body(self, manner: Manner) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": "default",
            "messages": list(self.messages or ()),
            "temperature": 0,
            "max_tokens": self.max_new_tokens,
            "ignore_eos": self.ignore_eos,
            "logprobs": manner.logprobs,
            "return_token_ids": True,
            "return_meta_info": True,
        }
        if self.min_new_tokens is not None:
            body["min_tokens"] = self.min_new_tokens
        if self.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.thinking}
        return body


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request; `sample` is None where `error` says why.

    `began` and `ended` are seconds of the monotonic clock. `arrivals` holds, for a
    streamed answer, (tokens so far, seconds) of every chunk that brought tokens.
    """

    request: str
    sample: Sample | None
    error: str = ""
    began: float = 0.0
    ended: float = 0.0
    arrivals: tuple[tuple[int, float], ...] = ()

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first token; None for an answer that was not
        streamed, or whose tokens all came in one piece: that is its whole time."""
        if not self.arrivals:
            return None
        tokens, at = self.arrivals[0]
        pieces = len(self.arrivals) > 1 or tokens == 1
        return at - self.began if pieces else None

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens after the first chunk over the time since it: (n - 1) / (t_last -
        t_first) where the first chunk holds one token, as the prefill's does."""
        if len(self.arrivals) < 2:
            return None
        (first, start), (last, end) = self.arrivals[0], self.arrivals[-1]
        return (last - first) / (end - start) if end > start else None


class _TimedReader(StreamReader):
    """A stream reader that remembers when tokens came."""

    def __init__(self) -> None:
        super().__init__()
        self.arrivals: list[tuple[int, float]] = []

    def feed(self, line: bytes) -> None:
        # The clock is read before the chunk is parsed: parsing is the client's time.
        at = time.monotonic()
        known = len(self._chunks)
        super().feed(line)
        if len(self._chunks) > known:
            before = self.arrivals[-1][0] if self.arrivals else 0
            self.arrivals.append((before + self._chunks[-1], at))


class BenchClient(Client):
    """The verifier's client with conversations and token timestamps."""

    async def ask(self, request: Request, manner: Manner = IDS_ONLY) -> Answer:
        """One request; never raises for what a server does."""
        began = time.monotonic()
        try:
            sample, arrivals = await self._post(request, manner)
        except (Refused, Failed, Lost) as error:
            return Answer(request.id, None, str(error), began, time.monotonic())
        ended = time.monotonic()
        sample = replace(sample, latency_s=ended - began)
        return Answer(request.id, sample, "", began, ended, tuple(arrivals))

    async def is_ready(self) -> bool:
        """Whether the server takes requests now; generates nothing."""
        try:
            async with self._open().get(
                self._base + "/ready",
                timeout=aiohttp.ClientTimeout(total=10),
                allow_redirects=False,
            ) as response:
                if response.status != 404:
                    return response.status == 200
            return await self.get_json("/model_info") is not None
        except (*BROKEN, Lost, Refused):
            return False

    async def prompt_ids(self, text: str) -> tuple[int, ...]:
        """The server's token ids of a text, as its /generate reads it.

        Raises CannotRun if the server does not give them.
        """
        body = {
            "text": text,
            "sampling_params": {
                "max_new_tokens": 1,
                "temperature": 0,
                "ignore_eos": True,
            },
            "return_prompt_token_ids": True,
        }
        try:
            answer = await self.post_json("/generate", body)
        except (Refused, Failed, Lost) as error:
            raise CannotRun(f"server {self.url}: {error}") from error
        ids = answer.get("prompt_token_ids") if isinstance(answer, dict) else None
        if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
            raise CannotRun(
                f"server {self.url}: found no prompt_token_ids in its answer; expected "
                "SGLang 0.5.23; fix: give the prompt as token ids"
            )
        return tuple(ids)

    async def post_json(self, path: str, body: dict[str, Any]) -> Any:
        """POST `body`, the answer as JSON.

        Raises Refused (4xx), Lost (connection broken, 503) or Failed.
        """
        with self._failures():
            async with self._send(path, body) as response:
                await self._check_status(response)
                return load_json(await _read(response))

    async def _post(
        self, request: Request, manner: Manner
    ) -> tuple[Sample, list[tuple[int, float]]]:
        body = request.body(manner)
        if request.messages is None and manner.stream:
            with self._failures():
                async with self._send("/generate", body) as response:
                    await self._check_status(response)
                    return await _read_timed(response, manner)
        if manner.stream:
            raise ValueError("a conversation cannot be streamed with token ids")
        chat = request.messages is not None
        path = "/v1/chat/completions" if chat else "/generate"
        answer = await self.post_json(path, body)
        with self._failures():
            found = _choice(answer) if chat else answer
            sample = parse_answer(found, logprobs=manner.logprobs)
        self.heard(request, answer)
        return sample, []

    def heard(self, request: Request, answer: Any) -> None:
        """Called with the JSON of every complete answer that is not streamed; for a
        subclass that wants more of it than the ids."""

    def _send(self, path: str, body: dict[str, Any]) -> Any:
        return self._open().post(
            self._base + path,
            data=orjson.dumps(body),
            headers={"Content-Type": "application/json"},
            # Another address is another server: not the one that is measured.
            allow_redirects=False,
        )

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn what can go wrong on the wire into the verifier's three errors."""
        try:
            yield
        except BadAnswer as error:
            raise Failed(self.scrub(str(error))) from error
        except TimeoutError as error:
            raise Failed(f"no complete answer within {self._timeout:g} s") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise Lost(self.scrub(_named(error))) from error
        except BROKEN as error:
            raise Failed(self.scrub(_named(error))) from error


async def _read_timed(
    response: aiohttp.ClientResponse, manner: Manner
) -> tuple[Sample, list[tuple[int, float]]]:
    reader, size = _TimedReader(), 0
    async for line in response.content:
        size += len(line)
        if size > MAX_STREAM:
            raise BadAnswer(f"the stream is longer than {MAX_STREAM} bytes")
        reader.feed(line)
        if reader.done:
            break
    sample = reader.finish(logprobs=manner.logprobs, top_k=manner.top)
    return sample, reader.arrivals


def _choice(body: Any) -> dict[str, Any]:
    """The one choice of a chat answer, in the shape of a /generate answer."""
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


def shorter(answer: Answer, tokens: int) -> str:
    """Why an answer that ignores the end token is not one of `tokens`; "" if it is."""
    found = len(answer.sample.ids) if answer.sample else tokens
    if found == tokens:
        return ""
    return f"found {found} tokens, expected {tokens}: the speed is of another length"


@dataclass(frozen=True, slots=True)
class Load:
    """The answers of one load, in the order of the requests; `wall_s` from the first
    request sent to the last answer complete."""

    answers: tuple[Answer, ...]
    wall_s: float

    @property
    def samples(self) -> list[Sample]:
        """The answers that are complete."""
        return [a.sample for a in self.answers if a.sample is not None]

    @property
    def errors(self) -> list[str]:
        """What the failed requests said, each text once."""
        return list(dict.fromkeys(a.error for a in self.answers if a.sample is None))

    @property
    def tokens(self) -> int:
        """Completion tokens of all complete answers."""
        return sum(len(sample.ids) for sample in self.samples)

    @property
    def tok_s(self) -> float | None:
        """Output tokens per second of wall time; None if nothing was answered."""
        return self.tokens / self.wall_s if self.tokens and self.wall_s else None


async def drive(
    client: BenchClient,
    requests: Sequence[Request],
    concurrency: int,
    *,
    manner: Manner = IDS_ONLY,
    done: Callable[[Answer], None] | None = None,
) -> Load:
    """Ask every request, at most `concurrency` at a time, in order.

    `done` is called after each answer. Raises CannotRun after GIVE_UP failures in a
    row.
    """
    todo = deque(enumerate(requests))
    answers: dict[int, Answer] = {}
    failed = 0

    async def worker() -> None:
        nonlocal failed
        while todo and failed < GIVE_UP:
            place, request = todo.popleft()
            answer = await client.ask(request, manner)
            answers[place] = answer
            failed = 0 if answer.sample is not None else failed + 1
            if done is not None:
                done(answer)

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(worker())
    wall = time.monotonic() - began
    load = Load(tuple(answers[place] for place in sorted(answers)), wall)
    if failed >= GIVE_UP or not load.samples:
        raise CannotRun(
            f"server {client.url}: found {failed} failed requests in a row "
            f"({'; '.join(load.errors[:3])}); expected answers; fix: look into the "
            "server's log"
        )
    return load
