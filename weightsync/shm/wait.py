"""Waits with a timeout: the wait loop, its policies, futexes, heartbeats, and a closable lock."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from weightsync.errors import ConfigError, TransferCancelled, TransferTimeout

logger = logging.getLogger(__name__)

SPIN_S = 0.0001
"""How long a wait spins with sched_yield before it sleeps: the cost of two or three wake-ups. Where
more processes want to run than there are cores, longer spins lose more than they gain."""
POLL_S = 0.01
"""Longest sleep of a wait with a `check`; also the delay after a lost wake-up."""
HEARTBEAT_TIMEOUT_FACTOR = 30
"""Factor on the timeout for a peer that sends heartbeats but makes no progress."""
LIVENESS_CHECK_S = 0.25
"""Interval of a `WaitPolicy`'s check of its peers, and its longest sleep."""
CANCEL_POLL_S = 0.02
WARN_S = 60.0
_MAX_STEP_S = 0.25
"""Longest step of a wait that counts in full. A longer one means that this process was stopped."""
_SPINS = 32

Check = Callable[[], None]
"""Called during a wait; raises to end it."""
Poll = Callable[[], float]
"""Called between the sleeps of a wait: raises to end it, or returns the longest next sleep."""


def wait(
    ready: Callable[[], bool],
    poll: Poll,
    *,
    spin_s: float = 0.0,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Return when `ready` is true: spin for `spin_s`, then poll and sleep in turns.

    A spin longer than POLL_S polls, too. `sleep` gets the seconds that `poll` returned, and may
    return early.
    """
    if spin_s:
        for _ in range(_SPINS):
            if ready():
                return
        now = time.monotonic()
        spin_until, poll_at = now + spin_s, now + POLL_S
        while now < spin_until:
            os.sched_yield()
            if ready():
                return
            now = time.monotonic()
            if now >= poll_at:
                poll()
                poll_at = now + POLL_S
    while not ready():
        sleep(poll())


class PeerProgress:
    """Polls the peers of one wait. `late` returns the message for the peers that are late.

    `counters` returns the progress and heartbeat counters of each peer that the wait depends on. A
    peer is late after `timeout_s` without a change of either counter, or after
    HEARTBEAT_TIMEOUT_FACTOR times `timeout_s` with heartbeats only. One late peer ends the wait.
    Time in which this process itself was stopped (SIGSTOP, a suspended machine) does not count.
    """

    def __init__(
        self,
        counters: Callable[[], Mapping[int, tuple[int, int]]],
        late: Callable[[list[int]], str],
        *,
        check: Check,
        timeout_s: float,
    ) -> None:
        self._counters = counters
        self._late = late
        self._check = check
        self._timeout_s = timeout_s
        self._now = 0.0
        self._polled_at = time.monotonic()
        self._peers: dict[int, _PeerState] = {}

    def poll(self) -> float:
        """Call `check`; return the longest next sleep. Raises TransferTimeout for a late peer."""
        clock = time.monotonic()
        now = self._now = self._now + min(clock - self._polled_at, _MAX_STEP_S)
        self._polled_at = clock
        self._check()
        timeout_s = self._timeout_s
        current: dict[int, _PeerState] = {}
        for peer, (progress, beats) in self._counters().items():
            state = current[peer] = self._peers.setdefault(peer, _PeerState())
            if progress != state.progress:
                state.progress_at = state.beat_at = now
            elif beats != state.beats:
                state.beat_at = now
            state.progress, state.beats = progress, beats
        peers = current.items()
        if late := [peer for peer, state in peers if now - state.beat_at > timeout_s]:
            # Peers that stopped at about the same time are reported together.
            late = [peer for peer, state in peers if now - state.beat_at > timeout_s / 2]
        else:
            limit_s = HEARTBEAT_TIMEOUT_FACTOR * timeout_s
            late = [peer for peer, state in peers if now - state.progress_at > limit_s]
        if late:
            raise TransferTimeout(self._late(late))
        return POLL_S


@dataclass(slots=True)
class _PeerState:
    """The last counters of one peer, and the times of their last changes."""

    progress: int = -1
    beats: int = -1
    progress_at: float = 0.0
    beat_at: float = 0.0


class Cancel(Protocol):
    """Cancellation flag: `threading.Event`, an event of multiprocessing, or any such object."""

    def is_set(self) -> bool:
        """Return whether the wait must end."""
        ...


class WaitPolicy:
    """Timeout, cancellation and liveness check of one wait of a queue.

    `condition` describes what the wait is for, in messages. `check_peers` raises when the condition
    can never come true. `cancel` is the caller's flag, polled often. `closing` is set by a close
    that also wakes the wait. A long wait is logged every `warn_s`, unless it is `indefinite`.
    """

    def __init__(
        self,
        condition: Callable[[], str],
        check_peers: Check,
        *,
        timeout_s: float | None,
        cancel: Cancel | None = None,
        closing: Cancel | None = None,
        indefinite: bool = False,
        warn_s: float = WARN_S,
    ) -> None:
        self._condition = condition
        self._check_peers = check_peers
        self._timeout_s = timeout_s
        self._cancel = cancel
        self._closing = closing
        self._started = time.monotonic()
        self._checked_at = self._started
        self._warn_s = None if indefinite else warn_s
        self._warn_at = self._started + warn_s

    def poll(self, *, closed: bool = False) -> float:
        """Return the longest sleep before the next poll, in seconds.

        Raises TransferCancelled, TransferTimeout, and what `check_peers` raises. `closed`: a peer
        signalled its end, so check the peers now.
        """
        if self._cancel is not None and self._cancel.is_set():
            raise TransferCancelled(f"cancelled while waiting for {self._condition()}")
        if self._closing is not None and self._closing.is_set():
            raise TransferCancelled(f"closed in this process while waiting for {self._condition()}")
        now = time.monotonic()
        if closed or now - self._checked_at >= LIVENESS_CHECK_S:
            self._checked_at = now
            self._check_peers()
        if self._timeout_s is not None and now - self._started >= self._timeout_s:
            self._check_peers()
            raise TransferTimeout(
                f"waited {self._timeout_s:g} s for {self._condition()}; no peer is known to be "
                "dead, so raise the timeout, or find out why the peers make no progress"
            )
        if self._warn_s is not None and now >= self._warn_at:
            self._warn_at += self._warn_s
            logger.warning("waiting for %s for %.0f s", self._condition(), now - self._started)
        sleep_s = LIVENESS_CHECK_S if self._cancel is None else CANCEL_POLL_S
        if self._timeout_s is None:
            return sleep_s
        return min(sleep_s, max(1e-4, self._started + self._timeout_s - now))


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
_short_syscall = ctypes.PyDLL(None).syscall  # keeps the interpreter's lock
_syscall.argtypes = _short_syscall.argtypes = _futex_args
_short_syscall.restype = ctypes.c_long
_lock = threading.RLock()  # a signal handler may come in between


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
    _short_syscall(_SYS_FUTEX, address, _WAKE, _ALL, None, None, 0)


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

    def __exit__(self, *_: object) -> None:
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
