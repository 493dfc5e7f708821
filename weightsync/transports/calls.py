"""Calls in flight to receivers: each in a daemon thread, abandoned when its peer shows no life."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
_Work = tuple[Callable[[], T], Future[T], tuple[object, ...]]
"""A call, the future of its result, and who waits for it."""

LOOK_S = 0.05
"""Seconds between two checks of the calls in flight."""
_STANDSTILL_S = 1.0
"""A longer time between two checks means that this process did not run."""
_EXIT_S = 1.0
_EXIT_REPLY_S = 0.1
_exit_deadline: float | None = None


_callers = threading.local()


def waiting_callers() -> tuple[object, ...]:
    """Return the callers that wait for what this thread does now, this thread included.

    These are threads, and tasks of asyncio.
    """
    others: tuple[object, ...] = getattr(_callers, "waiting", ())
    return (threading.current_thread(), *others)


@contextmanager
def waited_for_by(callers: tuple[object, ...]) -> Iterator[None]:
    """Run the block in this thread on behalf of threads and tasks that wait for it."""
    before = getattr(_callers, "waiting", ())
    _callers.waiting = callers
    try:
        yield
    finally:
        _callers.waiting = before


class CallThreads(Generic[T]):
    """A pool of daemon threads for calls. Interpreter exit does not wait for them.

    It would wait for a ThreadPoolExecutor's threads, as long as a call to a stopped peer takes.
    """

    def __init__(self) -> None:
        self._idle: deque[SimpleQueue[_Work[T] | None]] = deque()
        self._closed = False

    def submit(self, call: Callable[[], T], future: Future[T]) -> None:
        """Run `call` in a thread and settle `future`, unless it was settled meanwhile.

        Callbacks of `future` run in that thread before its next call, so they must not wait.

        Raises RuntimeError where no thread can be started: at interpreter exit, from Python 3.12.
        """
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue[_Work[T] | None]()
            threading.Thread(
                target=self._run, args=(inbox,), name="weightsync-call", daemon=True
            ).start()
        inbox.put((call, future, waiting_callers()))

    def close(self) -> None:
        """End idle threads; the others end after their call."""
        self._closed = True
        while self._idle:
            with suppress(IndexError):  # another thread took it
                self._idle.pop().put(None)

    def _run(self, inbox: SimpleQueue[_Work[T] | None]) -> None:
        while (work := inbox.get()) is not None:
            call, future, callers = work
            try:
                with waited_for_by(callers):
                    answer = call()
            except BaseException as exc:  # noqa: BLE001 # raised by Future.result
                self._set_idle(inbox)
                with suppress(InvalidStateError):
                    future.set_exception(exc)
                del exc
            else:
                self._set_idle(inbox)
                with suppress(InvalidStateError):
                    future.set_result(answer)
                del answer
            del call, future, callers, work

    def _set_idle(self, inbox: SimpleQueue[_Work[T] | None]) -> None:
        """Offer a thread for the next call. Before its result is set: who waits calls at once."""
        self._idle.append(inbox)
        if self._closed:
            self.close()


@dataclass(slots=True, eq=False)
class InFlightCall(Generic[T]):
    """One call in flight, and the time of its peer's last sign of life.

    A sign of life is a change of `beat()`, a value that grows while the peer lives (None where it
    cannot be observed), or a reply to `probe`, which checks whether the peer executes a step (None:
    the call is not probed). A live peer that executes no step has lost the call, or its reply was
    lost: later signs do not count.

    `give_up(lost, over)` makes the result of a call whose peer gave no sign for `timeout_s`, or,
    with `over`, did not reply within `limit_s`, which signs do not extend. Calls to the same `peer`
    share their signs.
    """

    peer: object
    future: Future[T]
    timeout_s: float
    limit_s: float
    beat: Callable[[], Hashable | None]
    probe: Callable[[Future[bool | None]], None] | None
    give_up: Callable[[bool, bool], T]
    began_s: float = 0.0
    heard_s: float = 0.0
    seen: Hashable | None = None
    lost: bool = False
    asked_s: float = 0.0
    asked: Future[bool | None] | None = None

    def look(self, now: float) -> None:
        """Record signs of life, send a probe, or abandon the call; `now` in seconds."""
        seen = self.beat()
        if seen != self.seen:
            self.seen = seen
            if not self.lost:
                self.heard_s = now
        if self.asked is not None and self.asked.done():
            busy, self.asked = self.asked.result(), None
            self.lost = busy is False
            if busy:
                self.heard_s = now
        over = now - self.began_s > self.limit_s
        if over or now - self.heard_s > self.timeout_s:
            with suppress(InvalidStateError):
                self.future.set_result(self.give_up(self.lost, over))
        elif self.probe and self.asked is None and now - self.asked_s > self.timeout_s / 4:
            self.asked, self.asked_s = Future(), now
            self.probe(self.asked)


class InFlightCalls(Generic[T]):
    """All calls in flight of one sender. Time in which this process was stopped does not count."""

    def __init__(self) -> None:
        self._flying: dict[int, InFlightCall[T]] = {}
        self._now = 0.0
        self._looked = time.monotonic()

    def add(self, flight: InFlightCall[T]) -> None:
        """Add a call to the supervised ones."""
        self._advance()
        beside = [f.heard_s for f in self._in_flight() if f.peer is flight.peer]
        flight.heard_s = max(beside, default=self._now)
        flight.began_s = flight.asked_s = self._now
        flight.seen = flight.beat()
        self._flying[id(flight)] = flight
        # The result may be an error, whose frames keep tensors alive: it is not kept here.
        flight.future.add_done_callback(partial(self._forget, id(flight)))

    def look(self) -> None:
        """Abandon calls whose peers show no life. Cheap: called in every wait."""
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._advance()
        for flight in self._in_flight():
            flight.look(self._now)

    def _in_flight(self) -> list[InFlightCall[T]]:
        return [f for f in list(self._flying.values()) if not f.future.done()]

    def _forget(self, key: int, _: Future[T]) -> None:
        self._flying.pop(key, None)

    def _advance(self) -> None:
        here = time.monotonic()
        self._now += min(here - self._looked, _STANDSTILL_S)
        self._looked = here


def exiting() -> bool:
    """Whether the interpreter exits, and this runs in a function of atexit."""
    main = threading.main_thread()
    return threading.current_thread() is main and not main.is_alive()


def exit_left_s() -> float:
    """Seconds left for what `exiting` code may still wait for: one second for all senders together.

    Never less than it takes a live peer to reply: a stopped one does not use up the time of others.
    """
    global _exit_deadline  # noqa: PLW0603  # of this process
    now = time.monotonic()
    _exit_deadline = _exit_deadline or now + _EXIT_S
    return max(_exit_deadline - now, _EXIT_REPLY_S)
