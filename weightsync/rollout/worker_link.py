"""A worker's talk beside its steps: with its engine core, and with API servers about weights.

One thread runs an event loop with both sockets; what blocks runs in threads of a pool.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from weightsync.errors import TransferError, TransferTimeout
from weightsync.rollout.worker_crew import worker_identity
from weightsync.rollout.worker_messages import (
    CoreWord,
    Done,
    Hello,
    Hold,
    Notice,
    PauseCall,
    ResumeCall,
    Standing,
    Welcome,
)
from weightsync.wire.problem import Problem, encode_problem, from_problem, to_problem

logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""How often a worker looks whether its standing has changed by itself (a sender died, say)."""
PAUSE_TIMEOUT_S = 660.0
MAX_CALLS = 64

_word_decoder: msgspec.msgpack.Decoder[CoreWord] = msgspec.msgpack.Decoder(CoreWord)

Handle = Callable[[str, bytes], bytes]
"""Answers one call of an API server; raises what is sent back as a problem document."""
Look = Callable[[], Standing]


class WorkerLink:
    """Both sockets of a worker. `handle` and `look` are given to `serve` once there is a receiver.

    Any thread but its own may call the blocking methods.
    """

    def __init__(self, rank: int, *, core_address: str, control_address: str) -> None:
        self._rank = rank
        self._core_address = core_address
        self._control_address = control_address
        self._calls: dict[int, asyncio.Future[Done]] = {}
        self._welcome: asyncio.Future[Welcome] | None = None
        self._next_call = 0
        self._said: Standing | None = None
        self._pool = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="weights")
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="worker link", daemon=True)
        self._thread.start()
        self._ready.wait()

    def hello(self, hello: Hello, timeout_s: float) -> Welcome:
        """Introduce this worker to its core. Raises TransferTimeout when it does not answer."""
        welcome: Welcome = self._wait(self._introduce(hello), timeout_s, "hello")
        return welcome

    def serve(self, handle: Handle, look: Look) -> None:
        """Answer API servers from now on, and tell the core whenever `look` says something new."""
        self._look = look
        self._wait(self._begin(handle), 10.0, "serve")

    def hold(self, timeout_s: float) -> None:
        """Have the core begin no step; returns when none is at work.

        Called by the receiver before weights in use change. Raises TransferTimeout.
        """
        self._wait(self._call(lambda call: Hold(call=call)), timeout_s, "hold")

    def release(self, standing: Standing) -> None:
        """Give the hold back; called when the weights are whole again, or never will be."""
        self._loop.call_soon_threadsafe(self._tell_standing, standing)

    def pause(self, mode: Any) -> None:
        """Pause the whole replica; returns when what `mode` waits for is over."""
        call = self._call(lambda call: PauseCall(call=call, mode=mode))
        self._wait(call, PAUSE_TIMEOUT_S, "pause")

    def resume(self) -> None:
        """Have the whole replica go on."""
        self._wait(self._call(lambda call: ResumeCall(call=call)), PAUSE_TIMEOUT_S, "resume")

    def close(self) -> None:
        """End both sockets. Calls that wait raise."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5.0)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _wait(self, work: Any, timeout_s: float, what: str) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            answer = future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise TransferError(f"worker {self._rank} ends; {what} was given up") from None
        except TimeoutError:
            future.cancel()
            raise TransferTimeout(
                f"worker {self._rank}: the engine core did not answer {what} within {timeout_s:g} s"
            ) from None
        if isinstance(answer, Done) and answer.problem is not None:
            problem = msgspec.json.decode(answer.problem, type=Problem)
            raise from_problem(problem, peer="engine core")
        return answer

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._open()
            self._ready.set()
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._context.destroy(linger=100)
            self._loop.close()

    def _open(self) -> None:
        self._context = zmq.asyncio.Context()
        self._core = self._context.socket(zmq.DEALER)
        self._core.setsockopt(zmq.IDENTITY, worker_identity(self._rank))
        self._core.connect(self._core_address)
        self._control = self._context.socket(zmq.ROUTER)
        self._control.bind(self._control_address)
        self._spawn(self._listen_to_core())

    def _spawn(self, work: Any) -> None:
        """Run a task that lasts as long as the process: without it the worker is of no use."""
        self._loop.create_task(work).add_done_callback(_or_die)

    async def _begin(self, handle: Handle) -> None:
        self._spawn(self._listen_to_api(handle))
        self._spawn(self._look_again())

    async def _introduce(self, hello: Hello) -> Welcome:
        self._welcome = self._loop.create_future()
        await self._tell(hello)
        return await self._welcome

    async def _call(self, make: Callable[[int], Notice]) -> Done:
        self._next_call += 1
        call = self._next_call
        answer: asyncio.Future[Done] = self._loop.create_future()
        self._calls[call] = answer
        try:
            await self._tell(make(call))
            return await answer
        finally:
            del self._calls[call]

    async def _tell(self, notice: Notice) -> None:
        await self._core.send(msgspec.msgpack.encode(notice))

    async def _listen_to_core(self) -> None:
        while True:
            word = _word_decoder.decode(await self._core.recv())
            if isinstance(word, Welcome):
                if self._welcome is not None and not self._welcome.done():
                    self._welcome.set_result(word)
            elif word.call in self._calls and not self._calls[word.call].done():
                self._calls[word.call].set_result(word)

    async def _listen_to_api(self, handle: Handle) -> None:
        while True:
            owner, call, name, body = await self._control.recv_multipart()
            self._loop.create_task(self._answer(handle, owner, call, name.decode(), body))

    async def _answer(
        self, handle: Handle, owner: bytes, call: bytes, name: str, body: bytes
    ) -> None:
        try:
            reply = await self._loop.run_in_executor(self._pool, handle, name, body)
        except Exception as exc:  # noqa: BLE001  # the edge: each error becomes a document
            failed = encode_problem(to_problem(exc))
            await self._control.send_multipart([owner, call, b"problem", failed])
        else:
            await self._control.send_multipart([owner, call, b"reply", reply])
        self._tell_if_changed()

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._tell_if_changed()

    def _tell_if_changed(self) -> None:
        standing = self._look()
        if standing != self._said or standing.clear_cache:
            self._tell_standing(standing)

    def _tell_standing(self, standing: Standing) -> None:
        self._said = msgspec.structs.replace(standing, released=False, clear_cache=False)
        self._loop.create_task(self._tell(standing))


def _or_die(task: asyncio.Task[None]) -> None:
    if task.cancelled() or task.exception() is None:
        return
    logger.critical("a worker's link failed", exc_info=task.exception())
    os._exit(70)  # the main thread waits for steps, and nobody else would notice
