"""Links between processes: DEALER sockets of API servers, unreadable messages, failed tasks."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq
import zmq.asyncio

logger = logging.getLogger(__name__)

Take = Callable[[int, list[bytes]], None]


class DealerLinks:
    """DEALER sockets to several processes of one kind, `peer`. Use it in one event loop.

    `take` gets the index of the sender and the frames of each message that arrives.
    """

    def __init__(self, addresses: Sequence[str], take: Take, *, identity: bytes, peer: str) -> None:
        """Connect to all addresses. Called in the event loop."""
        self._context = zmq.asyncio.Context()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets: list[zmq.asyncio.Socket] = []
        for index, address in enumerate(addresses):
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, identity)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
            self._sockets.append(socket)
            self._keep(self._listen(index, take, peer)).add_done_callback(end_process)

    async def send(self, index: int, frames: Sequence[bytes]) -> None:
        """Send a message."""
        await self._sockets[index].send_multipart(frames)

    def post(self, index: int, frames: Sequence[bytes]) -> None:
        """Send a small message without waiting. It is dropped after `close`."""
        if not self._context.closed:
            self._keep(self.send(index, frames))

    def close(self) -> None:
        """Close all sockets."""
        for task in self._tasks:
            task.cancel()
        self._context.destroy(linger=0)

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task and keep a reference to it: the loop has weak references only."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _listen(self, index: int, take: Take, peer: str) -> None:
        while True:
            frames = await self._sockets[index].recv_multipart()
            with dropped(f"{peer} {index}"):
                take(index, frames)


@contextmanager
def dropped(sender: str) -> Iterator[None]:
    """Log and suppress an error of decoding, in a block that takes a message of `sender`."""
    try:
        yield
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        logger.warning("a message of %s cannot be read and is dropped: %s", sender, exc)


EXIT_CODE = 70


def end_process(task: asyncio.Task[None]) -> None:
    """End this process if the task failed. A done-callback of tasks that must not fail.

    Otherwise other processes would wait for this task for ever. The supervisor ends the other
    processes and names this one.
    """
    if task.cancelled() or task.exception() is None:
        return
    logger.critical("a task failed that must not fail", exc_info=task.exception())
    os._exit(EXIT_CODE)
