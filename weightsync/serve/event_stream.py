"""Answers that end when their client goes away: whole ones, and server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from weightsync.errors import WeightSyncError
from weightsync.serve.completions import closing, end_tasks

T = TypeVar("T")

GONE_STATUS = 499
"""What logs show for a client that did not wait; nobody reads the answer."""


class ClientGoneError(Exception):
    """The client hung up: nobody wants the answer."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns. Its body has been read; a client that goes away cancels it.

    Raises ClientGoneError then, and what `work` raises.
    """
    return await _first_of(work, request.receive)


async def _first_of(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError("the client hung up")
        return working.result()
    finally:
        await end_tasks([working, watching])


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: `events` yields whole ones, and is closed whatever happens.

    They are what `event` makes, and must not raise: the status is sent before the first.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Called by the ASGI server."""
        async with closing(self._events):
            try:
                await _first_of(self._send_all(send), receive)
            except WeightSyncError:
                raise  # the engine's; a timeout among them is an OSError too
            except (ClientGoneError, OSError):
                return

    async def _send_all(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def event(data: bytes) -> bytes:
    """Return one server-sent event of a line of data."""
    return b"data: " + data + b"\n\n"


async def begun(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Wait for the first event, so that an error before it can still become a status.

    Raises what `events` raises before its first; the generator returned yields all of them.
    """
    first = await anext(events, None)

    async def every() -> AsyncGenerator[bytes, None]:
        async with closing(events):
            if first is not None:
                yield first
            async for item in events:
                yield item

    return every()
