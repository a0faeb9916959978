# SPDX-License-Identifier: Apache-2.0
"""The one client of a server: ids or a conversation in, a Sample with times out.

The native /generate is used wherever it can be: only there do token ids, streaming and
the per-request speculation counters come together.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from types import TracebackType
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

import aiohttp
import orjson
from aiohttp.http_exceptions import HttpProcessingError

from sglang_exact.client.answer import (
    CHAT,
    GENERATE,
    IDS_ONLY,
    Answer,
    Case,
    Options,
    Request,
    Sample,
)
from sglang_exact.client.wire import (
    BadAnswer,
    StreamReader,
    choice_of,
    clean,
    error_text,
    load_json,
    parse_answer,
)

# The longest event-stream line: cumulative chunks of 4096 tokens with top-5 logprobs
# stay under 4 MB.
READ_BUFFER = 16 * 2**20
MAX_BODY = 64 * 2**20
# A stream repeats what it sent before in every chunk.
MAX_STREAM = 2**33
MAX_ERROR = 64 * 2**10
# Seconds for what generates nothing, or one token.
SHORT_S = 60.0
READY_S = 10.0
# Whatever aiohttp raises over bytes that are no proper answer.
BROKEN = (aiohttp.ClientError, HttpProcessingError, OSError, ValueError)
_VOCAB = re.compile(r"range is \[0, (\d{1,9})\)")


# What a server answers that will not serve a request, whenever it is asked. Any other
# 4xx (a key that has expired, a rate limit, a wrong path) is no word on the request.
UNSERVED = (400, 413, 422)


class Refused(RuntimeError):
    """The server answered with a 4xx `status`.

    `unserved`: it says that it does not serve such a request at all.
    """

    def __init__(self, text: str, status: int = 400):
        super().__init__(text)
        self.unserved = status in UNSERVED


class Failed(RuntimeError):
    """No usable answer, and asking again is not expected to help."""


class Lost(RuntimeError):
    """The connection broke or the server is starting; it may come back."""


def redact_url(url: str) -> str:
    """`url` without user, password and query; "***" for what is no address."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "***"
    host = parts.hostname or ""
    if ":" in host:
        host = f"[{host}]"
    return urlunsplit((parts.scheme, host + port, parts.path.rstrip("/"), "", ""))


def secrets_of(key: str | None, url: SplitResult) -> tuple[str, ...]:
    """Every form in which the key, or the login of an address, may come back."""
    forms = {key or "", url.password or ""}
    if url.password:
        user, password = unquote(url.username or ""), unquote(url.password)
        login = f"{user}:{password}".encode("latin-1", "replace")
        forms |= {password, base64.b64encode(login).decode()}
    return tuple(sorted(forms - {""}, key=len, reverse=True))


class Client:
    """Talks to one server.

    `key` is sent as a bearer token and cut out of every message that comes back, of
    which `shown` characters are kept.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout: float = 1800,
        shown: int = 300,
    ):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"server address {clean(redact_url(url))!r}: expected http://HOST:PORT"
            )
        # The OpenAI base URL is what people have at hand; the native one is above it.
        self._base = url.rstrip("/").removesuffix("/v1")
        self.url = redact_url(self._base)
        self._key = key
        self._secrets = secrets_of(key, parts)
        self._timeout, self._shown = timeout, shown
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        # Nothing compressed: a small answer cannot become a huge one.
        headers = {"Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=READ_BUFFER,
            timeout=aiohttp.ClientTimeout(total=self._timeout, sock_connect=30),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def scrub(self, text: str) -> str:
        """`text` without the API key or the address's password, should it hold one."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    @contextlib.asynccontextmanager
    async def _ask(
        self, path: str, body: Any = None, *, seconds: float | None = None, **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response to GET `path`, or to POST of `body` as JSON.

        What can go wrong on the wire becomes Lost or Failed.
        """
        if self._session is None:
            raise RuntimeError("Client is used outside its `async with` block")
        if body is not None:
            more["headers"] = {"Content-Type": "application/json"}
            more["data"] = orjson.dumps(body)
        if seconds is not None:
            more["timeout"] = aiohttp.ClientTimeout(total=seconds)
        method = "GET" if body is None else "POST"
        try:
            # Not followed: another address is another server, and the API key is for
            # the one that was given.
            async with self._session.request(
                method, self._base + path, allow_redirects=False, **more
            ) as response:
                yield response
        except BadAnswer as error:
            raise Failed(self.scrub(str(error))) from error
        except TimeoutError as error:
            limit = self._timeout if seconds is None else seconds
            raise Failed(f"no complete answer within {limit:g} s") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise Lost(self.scrub(_named(error))) from error
        except BROKEN as error:
            raise Failed(self.scrub(_named(error))) from error

    async def get_json(self, path: str) -> Any:
        """GET `path` as JSON; None where the server has no such thing.

        Raises Refused (another API key) or Lost.
        """
        try:
            async with self._ask(path, seconds=SHORT_S) as response:
                if response.status in (401, 403):
                    raise Refused(await self._error(response))
                if response.status != 200:
                    return None
                raw = await _read(response)
                try:
                    return load_json(raw)
                except BadAnswer:
                    return None
        except Failed as error:
            raise Lost(str(error)) from error

    async def request(self, path: str, body: Any = None) -> bytes:
        """What GET `path`, or POST of `body`, is answered with; raises as `post_json`.

        A Lost or Failed has a cause where no whole answer came.
        """
        async with self._ask(path, body) as response:
            await self._check_status(response)
            return await _read(response)

    async def post_json(self, path: str, body: dict[str, Any]) -> Any:
        """POST `body`, the answer as JSON.

        Raises Refused (4xx), Lost (connection broken, 503) or Failed.
        """
        async with self._ask(path, body) as response:
            await self._check_status(response)
            return load_json(await _read(response))

    async def is_ready(self) -> bool:
        """Whether the server takes requests now; generates nothing."""
        try:
            async with self._ask("/ready", seconds=READY_S) as response:
                if response.status != 404:
                    return response.status == 200
            return await self.get_json("/model_info") is not None
        except (Lost, Refused, Failed):
            return False

    async def flush(self) -> str | None:
        """Empty the prefix cache; the reason as text if the server did not."""
        try:
            async with self._ask(
                "/flush_cache", {}, seconds=SHORT_S, params={"timeout": "30"}
            ) as response:
                return None if response.status == 200 else await self._error(response)
        except (Lost, Failed) as error:
            return str(error)

    async def vocab_size(self) -> int | None:
        """Ask for an impossible id's logprob: the refusal names the vocabulary size."""
        body = {
            "input_ids": [1],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "token_ids_logprob": [2**31 - 1],
        }
        try:
            async with self._ask(GENERATE, body, seconds=SHORT_S) as response:
                match = _VOCAB.search(await self._error(response))
        except (Lost, Failed):
            return None
        return int(match[1]) if match else None

    async def generate(self, asked: Case | Request, options: Options) -> Sample:
        """One generation.

        Raises Refused (4xx), Lost (connection broken, 503: may come back) or Failed
        (anything else that is not a complete answer).
        """
        began = time.monotonic()
        body: Any = None
        async with self._ask(asked.path(), asked.body(options)) as response:
            await self._check_status(response)
            if options.stream:
                sample = await _read_stream(response, options, began)
            else:
                body = load_json(await _read(response))
                found = choice_of(body) if asked.path() == CHAT else body
                sample = parse_answer(
                    found, logprobs=options.logprobs, top_k=options.top
                )
            _check_prompt(asked.sent_ids(), sample)
        if isinstance(asked, Request) and body is not None:
            self.heard(asked, body)
        took = time.monotonic() - began
        return replace(sample, finish=self.scrub(sample.finish), latency_s=took)

    async def ask(self, request: Request, options: Options = IDS_ONLY) -> Answer:
        """One request; never raises for what a server does."""
        try:
            return Answer(request.id, await self.generate(request, options))
        except (Refused, Failed, Lost) as error:
            return Answer(request.id, None, str(error))

    def heard(self, request: Request, answer: Any) -> None:
        """Called with the JSON of every complete answer that is not streamed; for a
        subclass that wants more of it than the ids."""

    async def _check_status(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 200:
            return
        text = await self._error(response)
        if response.status == 503:
            raise Lost(text)
        if 400 <= response.status < 500:
            raise Refused(text, response.status)
        raise Failed(text)

    async def _error(self, response: aiohttp.ClientResponse) -> str:
        """Status and message of an answer that is none, for people."""
        if 300 <= response.status < 400:
            # Not followed: the API key is for the address that was given.
            target = redact_url(clean(response.headers.get("Location", "")))
            return self.scrub(
                f"{response.status}: the server redirects to {target!r}; pass the "
                "address it really has"
            )
        raw = await _head(response, MAX_ERROR)
        # Before it is cut, or the cut would leave a part of the key.
        for secret in self._secrets:
            raw = raw.replace(secret.encode("utf-8", "surrogateescape"), b"***")
        return self.scrub(f"{response.status}: {error_text(raw, self._shown)}")

    async def wait_ready(self, timeout: float) -> bool:
        """Poll until the server answers again; False if it does not in `timeout` s."""
        until = time.monotonic() + timeout
        pause = 0.05
        while time.monotonic() < until:
            try:
                if await self.get_json("/model_info") is not None:
                    return True
                if await self.get_json("/server_info") is not None:
                    return True
            except (Lost, Refused):
                pass
            await asyncio.sleep(pause)
            pause = min(pause * 2, 5.0)
        return False


def _check_prompt(sent: int, sample: Sample) -> None:
    """Raise BadAnswer if the server read less of the prompt than was sent."""
    read = sample.prompt_tokens
    if read is not None and read < sent:
        raise BadAnswer(f"prompt_tokens is {read} but {sent} input_ids were sent")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > MAX_BODY:
            raise BadAnswer(f"answer is larger than {MAX_BODY} bytes")
        parts.append(part)
    return b"".join(parts)


async def _head(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The beginning of a body."""
    raw = b""
    async for part in response.content.iter_any():
        raw += part
        if len(raw) >= limit:
            break
    return raw[:limit]


async def _read_stream(
    response: aiohttp.ClientResponse, options: Options, began: float
) -> Sample:
    reader, size = StreamReader(began), 0
    async for line in response.content:
        size += len(line)
        if size > MAX_STREAM:
            raise BadAnswer(f"the stream is longer than {MAX_STREAM} bytes")
        reader.feed(line)
        if reader.done:
            break
    return reader.finish(logprobs=options.logprobs, top_k=options.top)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {clean(str(error) or 'no detail', 200)}"
