"""Waiting with a bound: policies, futexes, heartbeats, and locks that any thread may close."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

from weightsync.errors import ConfigError, TransferCancelled, TransferTimeout

logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""How often a sleeping wait looks at its peer's life: also how long a lost wake-up delays it."""
CANCEL_NAP_S = 0.02
WARN_S = 60.0


class Cancel(Protocol):
    """What `threading.Event` offers, and events of multiprocessing."""

    def is_set(self) -> bool:
        """Say whether the wait is to end."""
        ...


class WaitPolicy:
    """One wait. `look` is called now and then and raises when waiting has become pointless.

    `doing` says what is waited for, `peers` raises when that will never come. `cancel` is the
    caller's, looked at often; `closing` is set by a close that also wakes the wait. A wait is
    logged every `warn_s` unless it is expected to be long (`indefinite`).
    """

    def __init__(
        self,
        doing: Callable[[], str],
        peers: Callable[[], None],
        *,
        timeout_s: float | None,
        cancel: Cancel | None = None,
        closing: Cancel | None = None,
        indefinite: bool = False,
        warn_s: float = WARN_S,
    ) -> None:
        self._doing = doing
        self._peers = peers
        self._timeout_s = timeout_s
        self._cancel = cancel
        self._closing = closing
        self._started = time.monotonic()
        self._looked = self._started
        self._warn_s = None if indefinite else warn_s
        self._warn_at = self._started + warn_s

    @property
    def nap_s(self) -> float:
        """How long to sleep at most before the next look."""
        nap_s = LOOK_S if self._cancel is None else CANCEL_NAP_S
        if self._timeout_s is None:
            return nap_s
        return min(nap_s, max(1e-4, self._started + self._timeout_s - time.monotonic()))

    def look(self, *, closed: bool = False) -> None:
        """Raise TransferCancelled, TransferTimeout, or what is known of the peers.

        `closed` says that there is news of them, so that they are looked at now.
        """
        if self._cancel is not None and self._cancel.is_set():
            raise TransferCancelled(f"called off while waiting for {self._doing()}")
        if self._closing is not None and self._closing.is_set():
            raise TransferCancelled(f"closed in this process while waiting for {self._doing()}")
        now = time.monotonic()
        if closed or now - self._looked >= LOOK_S:
            self._looked = now
            self._peers()
        if self._timeout_s is not None and now - self._started >= self._timeout_s:
            self._peers()
            raise TransferTimeout(
                f"waited {self._timeout_s:g} s for {self._doing()}; nobody is known to be dead, "
                "so wait longer, or look at what they are doing"
            )
        if self._warn_s is not None and now >= self._warn_at:
            self._warn_at += self._warn_s
            logger.warning("waiting for %s for %.0f s", self._doing(), now - self._started)


_SYS_FUTEX = 98 if platform.machine() in ("aarch64", "arm64") else 202
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF
_LOW_32 = 0xFFFFFFFF

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_futex_args = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_long,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_ulong,
)
_syscall.argtypes = _futex_args
_lock = threading.Lock()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def fence() -> None:
    """Let no later load overtake an earlier store.

    On x86-64 alone: taking a lock is a locked instruction, which is a full fence there (Intel SDM
    3A, 9.2.3.9). Elsewhere the writer's fence takes its place (weightsync.shm.store_order).
    """
    with _lock:
        pass


def sleep_on(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the low half of the u64 at `address` is that of `value`, or until `timeout_s`.

    Also returns on a signal or for no reason at all: look again. The comparison is the kernel's
    and comes after everything that this thread stored before.
    """
    whole = int(timeout_s)
    limit = _Timespec(whole, int((timeout_s - whole) * 1e9))
    code = _syscall(_SYS_FUTEX, address, _WAIT, value & _LOW_32, ctypes.addressof(limit), None, 0)
    if code < 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def wake(address: int) -> None:
    """Wake every process that sleeps on `address`."""
    _syscall(_SYS_FUTEX, address, _WAKE, _ALL, None, None, 0)


INTERVAL_S = 0.25


@contextmanager
def beating(beat: Callable[[], None]) -> Iterator[None]:
    """Call `beat` now and then from another thread until the block ends."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(INTERVAL_S):
            beat()

    thread = threading.Thread(target=run, name="weightsync-heartbeat", daemon=True)
    try:
        # Inside, since Ctrl-C may come while it waits for the thread, which would beat for ever.
        thread.start()
        yield
    finally:
        done.set()
        if thread.is_alive():
            thread.join()


class Heartbeat:
    """Calls the bound method `beat` now and then, until `close` or until its object is gone.

    Not while the bound method `at_work` returns False, where that is given.
    """

    def __init__(
        self, beat: Callable[[], None], *, at_work: Callable[[], bool] | None = None
    ) -> None:
        self._beat = weakref.WeakMethod(beat)
        self._at_work = at_work and weakref.WeakMethod(at_work)
        self._done = threading.Event()
        self._thread = threading.Thread(
            target=_run,
            args=(self._done, self._beat, self._at_work),
            name="weightsync-heartbeat",
            daemon=True,
        )
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether `beat` is not called any more."""
        return not self._thread.is_alive()

    def close(self, timeout_s: float | None = None) -> None:
        """End it; `beat` is not called any more when this returns. Idempotent.

        With `timeout_s`, one that is at work may outlast this: `ended` tells. The garbage
        collector may call it in any thread, in the heartbeat's own too.
        """
        self._done.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)


def _run(
    done: threading.Event,
    beat: weakref.WeakMethod[Callable[[], None]],
    at_work: weakref.WeakMethod[Callable[[], bool]] | None,
) -> None:
    while not done.wait(INTERVAL_S):
        call, asked = beat(), at_work() if at_work is not None else _always
        if call is None or asked is None:
            return
        if asked():
            call()
        del call, asked


def _always() -> bool:
    return True


class ClosableLock:
    """One call at a time is inside (`with lock:`); `close`, from any thread, ends it and the rest.

    Calls that wait, that come later or that were waiting for the lock raise TransferCancelled: the
    one inside asks `is_set()` now and then, and `wake` interrupts its sleep. `release` runs once,
    when no call is inside. A signal handler may close what its own thread is inside of: then
    that call runs `release` at its end. Neither function may refer to the lock's owner, or the
    owner that is forgotten without `close` would live until the next garbage collection.
    """

    def __init__(self, what: str, *, wake: Callable[[], None], release: Callable[[], None]) -> None:
        self._what = what
        self._wake = wake
        self._release = release
        self._lock = threading.RLock()
        self._inside = self._closed = self._released = False

    def is_set(self) -> bool:
        """Say whether `close` was called."""
        return self._closed

    def error(self) -> TransferCancelled:
        """Return what calls raise once this is closed."""
        return TransferCancelled(f"this {self._what} was closed in this process; open another one")

    def acquire(self, timeout_s: float = -1) -> bool:
        """Go inside, or return False after `timeout_s`. Raises TransferCancelled once closed."""
        if not self._lock.acquire(timeout=timeout_s):
            if self._closed:
                raise self.error()
            return False
        if self._closed or self._inside:
            self._lock.release()
            if self._closed:
                raise self.error()
            raise ConfigError(f"this thread is inside another call of this {self._what}")
        self._inside = True
        return True

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Go outside; what `acquire` asks for afterwards."""
        self._inside = False
        self._lock.release()
        if self._closed:
            self._release_once()

    def close(self) -> None:
        """End the call that is inside, and release; returns when that is done. Idempotent."""
        self._closed = True
        self._wake()
        self._release_once()

    def _release_once(self) -> None:
        with self._lock:
            if not (self._inside or self._released):
                self._released = True
                self._release()
