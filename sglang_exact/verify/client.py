# SPDX-License-Identifier: Apache-2.0
"""HTTP side of the verifier: one class per server, native endpoints only.

/generate is used and not the OpenAI endpoints: only there do token ids, streaming and
the per-request speculation counters come together.
"""

from __future__ import annotations

import asyncio
import base64
import re
import time
from dataclasses import replace
from types import TracebackType
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

import aiohttp
import orjson
from aiohttp.http_exceptions import HttpProcessingError

from sglang_exact.verify.model import Case, Manner, Sample
from sglang_exact.verify.wire import (
    BadAnswer,
    StreamReader,
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

    `key` is sent as a bearer token and cut out of every message that comes back.
    """

    def __init__(self, url: str, *, key: str | None = None, timeout: float = 1800):
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
        self._timeout = timeout
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

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("Client is used outside its `async with` block")
        return self._session

    async def get_json(self, path: str) -> Any:
        """GET `path` as JSON; None where the server has no such thing."""
        try:
            async with self._open().get(
                self._base + path,
                timeout=aiohttp.ClientTimeout(total=60),
                allow_redirects=False,
            ) as response:
                if response.status in (401, 403):
                    raise Refused(await self._error(response))
                raw = await _read(response) if response.status == 200 else b""
                return load_json(raw) if response.status == 200 else None
        except BadAnswer:
            return None
        except BROKEN as error:
            raise Lost(self.scrub(_named(error))) from error

    async def flush(self) -> str | None:
        """Empty the prefix cache; the reason as text if the server did not."""
        try:
            async with self._open().post(
                self._base + "/flush_cache",
                params={"timeout": "30"},
                timeout=aiohttp.ClientTimeout(total=60),
                allow_redirects=False,
            ) as response:
                if response.status == 200:
                    return None
                return await self._error(response)
        except BROKEN as error:
            return self.scrub(_named(error))

    async def vocab_size(self) -> int | None:
        """Ask for an impossible id's logprob: the refusal names the vocabulary size."""
        body = {
            "input_ids": [1],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "token_ids_logprob": [2**31 - 1],
        }
        try:
            async with self._open().post(
                self._base + "/generate",
                json=body,
                timeout=aiohttp.ClientTimeout(total=60),
                allow_redirects=False,
            ) as response:
                match = _VOCAB.search(await self._error(response))
        except BROKEN:
            return None
        return int(match[1]) if match else None

    async def generate(self, case: Case, manner: Manner) -> Sample:
        """One generation.

        Raises Refused (4xx), Lost (connection broken, 503: may come back) or Failed
        (anything else that is not a complete answer).
        """
        began = time.monotonic()
        try:
            async with self._open().post(
                self._base + "/generate",
                data=orjson.dumps(request_body(case, manner)),
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as response:
                await self._check_status(response)
                if manner.stream:
                    sample = await _read_stream(response, manner)
                else:
                    body = load_json(await _read(response))
                    sample = parse_answer(
                        body, logprobs=manner.logprobs, top_k=manner.top
                    )
            _check_prompt(case, sample)
        except BadAnswer as error:
            raise Failed(self.scrub(str(error))) from error
        except TimeoutError as error:
            raise Failed(f"no complete answer within {self._timeout:g} s") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise Lost(self.scrub(_named(error))) from error
        except BROKEN as error:
            raise Failed(self.scrub(_named(error))) from error
        took = time.monotonic() - began
        return replace(sample, finish=self.scrub(sample.finish), latency_s=took)

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
        return self.scrub(f"{response.status}: {error_text(raw)}")

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


def request_body(case: Case, manner: Manner) -> dict[str, Any]:
    """The JSON of one POST /generate."""
    params: dict[str, Any] = {
        "temperature": case.temperature,
        "max_new_tokens": case.max_new_tokens,
        "ignore_eos": case.ignore_eos,
    }
    if case.seed is not None:
        params["sampling_seed"] = case.seed
    if case.stop_ids is not None:
        params["stop_token_ids"] = list(range(*case.stop_ids))
    if case.sampling:
        params |= orjson.loads(case.sampling)
    body: dict[str, Any] = {"sampling_params": params, "stream": manner.stream}
    if case.prompt.ids is not None:
        body["input_ids"] = list(case.prompt.ids)
    else:
        body["text"] = case.prompt.text
    if manner.logprobs:
        # -1: logprobs of the output only, so that the prefix cache stays usable.
        body |= {
            "return_logprob": True,
            "top_logprobs_num": manner.top,
            "logprob_start_len": -1,
        }
    return body


def _check_prompt(case: Case, sample: Sample) -> None:
    """Raise BadAnswer if the server read less of the prompt than was sent."""
    sent, read = len(case.prompt.ids or ()), sample.prompt_tokens
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


async def _read_stream(response: aiohttp.ClientResponse, manner: Manner) -> Sample:
    reader, size = StreamReader(), 0
    async for line in response.content:
        size += len(line)
        if size > MAX_STREAM:
            raise BadAnswer(f"the stream is longer than {MAX_STREAM} bytes")
        reader.feed(line)
        if reader.done:
            break
    return reader.finish(logprobs=manner.logprobs, top_k=manner.top)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {clean(str(error) or 'no detail', 200)}"
