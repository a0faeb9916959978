# SPDX-License-Identifier: Apache-2.0
"""A server that sends raw bytes: whatever HTTP allows, and what it does not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


class HostileServer:
    """Answers every request with `answer(path, writer)`; keeps the heads it got.

    Use as an async context manager.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.heads: list[str] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> HostileServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._server is not None:
            self._server.close()

    @property
    def url(self) -> str:
        if self._server is None:
            raise RuntimeError("HostileServer is used outside its `async with` block")
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(
            ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
        ):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            await self.answer(head.split(" ")[1], writer)
            await writer.drain()
        writer.close()


def head(status: str = "200 OK", **headers: str) -> bytes:
    """Status line and headers; underscores in names become dashes."""
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode()


def fixed(raw: bytes) -> Answer:
    """The same bytes for every request, then the end of the connection."""

    async def answer(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)

    return answer


def endless(start: bytes, piece: bytes, pause_s: float = 0.0) -> Answer:
    """`start`, then `piece` for ever."""

    async def answer(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        while not writer.is_closing():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)

    return answer
