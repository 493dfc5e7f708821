"""Worker threads of the routes: their number has a limit, also where clients come and go."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from tests.transports.scripted import STATUS, ScriptedReceiver
from weightsync.server.dispatcher import AsyncDispatcher
from weightsync.server.threads import run_limited
from weightsync.wire.messages import Status

WAIT_S = 30.0
LIMIT = 8


class Slow(ScriptedReceiver):
    """Its status waits until `let_go`; `inside` are the calls that run, and `most` were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = self.most = self.done = 0
        self._lock = threading.Lock()

    def status(self) -> Status:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        assert self.let_go.wait(WAIT_S)
        with self._lock:
            self.inside -= 1
            self.done += 1
        return STATUS


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(int(WAIT_S / 0.01)):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"waited {WAIT_S} s")


def test_calls_that_clients_left_count_until_they_end() -> None:
    receiver = Slow()

    async def run() -> None:
        dispatcher = AsyncDispatcher(receiver)
        for _ in range(3):
            tasks = [asyncio.create_task(dispatcher.read(receiver.status)) for _ in range(LIMIT)]
            await until(lambda: receiver.inside == LIMIT)
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(error) for error in ended} == {asyncio.CancelledError}
        assert receiver.inside == LIMIT
        receiver.let_go.set()
        assert await dispatcher.read(receiver.status) == STATUS

    asyncio.run(run())
    assert receiver.most == LIMIT


def test_an_error_and_a_result_reach_the_handler() -> None:
    async def run() -> None:
        limiter = anyio.CapacityLimiter(1)
        assert await run_limited(limiter, divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await run_limited(limiter, divmod, 7, 0)

    asyncio.run(run())


def test_the_end_of_the_loop_waits_for_no_call() -> None:
    let_go, entered = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        let_go.wait(WAIT_S)

    async def run() -> None:
        task: asyncio.Task[Any] = asyncio.create_task(run_limited(anyio.CapacityLimiter(1), hold))
        await until(entered.is_set)
        task.cancel()

    begin = time.monotonic()
    try:
        asyncio.run(run())
        assert time.monotonic() - begin < WAIT_S / 2
    finally:
        let_go.set()
