"""Waits with a timeout: wait policies, futexes, heartbeats, and locks that any thread may close."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from weightsync.errors import ConfigError, TransferCancelled, TransferTimeout

logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""Interval of the liveness check during a sleeping wait; also the delay after a lost wake-up."""
CANCEL_NAP_S = 0.02
WARN_S = 60.0


class Cancel(Protocol):
    """Cancellation flag: `threading.Event`, an event of multiprocessing, or any such object."""

    def is_set(self) -> bool:
        """Return whether the wait must end."""
        ...


class WaitPolicy:
    """Timeout, cancellation and liveness check of one wait.

    The waiting loop calls `look` between sleeps of `nap_s`; `look` raises to end the wait. `doing`
    returns the condition for messages. `peers` checks the peers and raises when the condition can
    never come true. `cancel` is the caller's flag, polled often. `closing` is set by a close that
    also wakes the wait. A long wait is logged every `warn_s`, unless it is `indefinite`.
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
        self._checked_at = self._started
        self._warn_s = None if indefinite else warn_s
        self._warn_at = self._started + warn_s

    @property
    def nap_s(self) -> float:
        """Longest sleep before the next `look`, in seconds."""
        nap_s = LOOK_S if self._cancel is None else CANCEL_NAP_S
        if self._timeout_s is None:
            return nap_s
        return min(nap_s, max(1e-4, self._started + self._timeout_s - time.monotonic()))

    def look(self, *, closed: bool = False) -> None:
        """Raise TransferCancelled, TransferTimeout, or what `peers` raises; else return.

        `closed`: a peer signalled its end, so check the peers now.
        """
        if self._cancel is not None and self._cancel.is_set():
            raise TransferCancelled(f"cancelled while waiting for {self._doing()}")
        if self._closing is not None and self._closing.is_set():
            raise TransferCancelled(f"closed in this process while waiting for {self._doing()}")
        now = time.monotonic()
        if closed or now - self._checked_at >= LOOK_S:
            self._checked_at = now
            self._peers()
        if self._timeout_s is not None and now - self._started >= self._timeout_s:
            self._peers()
            raise TransferTimeout(
                f"waited {self._timeout_s:g} s for {self._doing()}; no peer is known to be dead, "
                "so raise the timeout, or find out why the peers make no progress"
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
    """Order later loads after earlier stores, on x86-64.

    To take a lock is a locked instruction, which is a full fence on x86-64 (Intel SDM 3A, 9.2.3.9).
    On other processors the writer's fence replaces it (weightsync.shm.store_order).
    """
    with _lock:
        pass


def sleep_on(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the low half of the u64 at `address` equals that of `value`, or for `timeout_s`.

    May return early, on a signal or spuriously, so the caller checks its condition again. The
    kernel makes the comparison, after all earlier stores of this thread.
    """
    whole = int(timeout_s)
    limit = _Timespec(whole, int((timeout_s - whole) * 1e9))
    code = _syscall(_SYS_FUTEX, address, _WAIT, value & _LOW_32, ctypes.addressof(limit), None, 0)
    if code < 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def wake(address: int) -> None:
    """Wake all threads, in every process, that sleep on `address`."""
    _syscall(_SYS_FUTEX, address, _WAKE, _ALL, None, None, 0)


INTERVAL_S = 0.25
"""Time between two heartbeats, in seconds."""


class Heartbeat:
    """Calls the bound method `beat` every `INTERVAL_S`, until `close` or until its object is freed.

    While the bound method `at_work`, if given, returns False, `beat` is not called. The first error
    of `beat` is logged, and it is called again.
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
        """True when `beat` is no longer called."""
        return not self._thread.is_alive()

    def close(self, timeout_s: float | None = None) -> None:
        """Stop the heartbeat; `beat` is no longer called when this returns. Idempotent.

        With `timeout_s`, a running `beat` may outlast this call; see `ended`. The garbage collector
        may call `close` in any thread, the heartbeat's own thread included.
        """
        self._done.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)


def _run(
    done: threading.Event,
    beat: weakref.WeakMethod[Callable[[], None]],
    at_work: weakref.WeakMethod[Callable[[], bool]] | None,
) -> None:
    failed = False
    while not done.wait(INTERVAL_S):
        call, condition = beat(), at_work() if at_work is not None else _always
        if call is None or condition is None:
            return
        try:
            if condition():
                call()
        except Exception:  # the next one may succeed, and others depend on this thread
            if not failed:
                logger.warning("a heartbeat failed", exc_info=True)
            failed = True
        del call, condition


def _always() -> bool:
    return True


class ClosableLock:
    """A lock that admits one call at a time; `close`, from any thread, ends all calls.

    After `close`, the call inside, calls that wait for the lock and later calls raise
    TransferCancelled. The call inside polls `is_set()`, and `wake` interrupts its sleep. `release`
    runs once, when no call is inside. If a signal handler closes the lock that its own thread
    holds, the interrupted call runs `release` at its end. Neither function may refer to the lock's
    owner: an owner dropped without `close` would then live until the next garbage collection.
    """

    def __init__(self, what: str, *, wake: Callable[[], None], release: Callable[[], None]) -> None:
        self._what = what
        self._wake = wake
        self._release = release
        self._lock = threading.RLock()
        self._inside = self._closed = self._released = False

    def is_set(self) -> bool:
        """Return whether `close` was called."""
        return self._closed

    def error(self) -> TransferCancelled:
        """Return the error that calls raise after `close`."""
        return TransferCancelled(f"this {self._what} was closed in this process; open another one")

    def acquire(self, timeout_s: float = -1) -> bool:
        """Take the lock, or return False after `timeout_s`. Raises TransferCancelled if closed.

        Raises ConfigError when this thread already holds the lock.
        """
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
        """Give the lock back. Called once after each successful `acquire`."""
        self._inside = False
        self._lock.release()
        if self._closed:
            self._release_once()

    def close(self) -> None:
        """End the call that is inside and run `release`; return when both are done. Idempotent."""
        self._closed = True
        self._wake()
        self._release_once()

    def _release_once(self) -> None:
        with self._lock:
            if not (self._inside or self._released):
                self._released = True
                self._release()
