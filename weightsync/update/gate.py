"""A read-write gate: excludes decode steps from weight swaps."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from weightsync.cuda.wait import Marks
from weightsync.errors import NotReadyError, TransferError, TransferTimeout, text_of
from weightsync.transports.calls import waiting_callers

logger = logging.getLogger(__name__)

_POLL_S = 2e-4
OnHold = Callable[[float], None]
OnRelease = Callable[[], None]
OnCommit = Callable[[int], object]


def _here() -> frozenset[object]:
    """Return this thread, and the asyncio task that it runs now."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        task = None
    thread = threading.current_thread()
    return frozenset([thread] if task is None else [thread, task])


@dataclass(slots=True, eq=False)
class _ReadScope:
    """One reader, and its nested blocks. It is active while it has any.

    `owners` are the thread and the asyncio task that entered the first of them, by `gate`.
    """

    blocks: set[object] = field(default_factory=set)
    owners: frozenset[object] = field(default_factory=_here)
    gate: ReadWriteGate | None = None


class _GateGroup:
    """Gates whose readers are the same: these, and which of the gates is held."""

    def __init__(
        self, lock: threading.RLock | None, on_hold: OnHold | None, on_release: OnRelease | None
    ) -> None:
        self.condition = threading.Condition(lock)
        self.readers: set[_ReadScope] = set()
        self.holders: set[ReadWriteGate] = set()
        self.marks = Marks()
        self.inside: ContextVar[_ReadScope | None] = ContextVar("weightsync_stay", default=None)
        self.gpus: list[Callable[[], Collection[torch.device]]] = []
        self._on_hold = on_hold
        self._on_release = on_release
        self._changes = threading.Lock()
        """Held while the first holder comes, or the last one leaves, with their callbacks."""

    def enter(self, gate: ReadWriteGate, timeout_s: float) -> None:
        """Count a holder; the first one stops decode steps. Raises TransferError."""
        if not self._changes.acquire(timeout=max(timeout_s, 0.0)):
            raise TransferTimeout(
                f"generation was not stopped within {timeout_s:g} s for another receiver of the set"
            )
        try:
            if not self.holders:
                self._stop_steps(timeout_s)
            with self.condition:
                self.holders.add(gate)
        finally:
            self._changes.release()

    def leave(self, gate: ReadWriteGate) -> None:
        """Remove a holder; after the last one readers enter again."""
        with self._changes:
            with self.condition:
                self.holders.discard(gate)
                is_last = not self.holders
                self.condition.notify_all()
            if is_last and self._on_release is not None:
                try:
                    self._on_release()
                except Exception:
                    # The step that held the gate is over, whatever its result.
                    logger.exception("on_release failed; generation may stay paused")

    def _stop_steps(self, timeout_s: float) -> None:
        if self._on_hold is None:
            return
        try:
            self._on_hold(timeout_s)
        except TransferError:
            raise
        except Exception as exc:
            raise TransferError(
                f"generation could not be stopped: on_hold raised {type(exc).__name__}: "
                f"{text_of(exc)}"
            ) from exc


class ReadWriteGate:
    """Many readers, or one holder. The holder blocks new readers and waits for the active ones.

    Gates that stand `beside` each other have the same readers: a reader of one enters when none of
    them is held, and blocks the holder of any. Each has a `refuse` of its own. The callbacks are
    those of the first: `on_hold` for the first holder, `on_release` after the last one.

    Every reader calls `refuse` before it enters; it raises where the weights may not be used. One
    thread may hold the gate and another release it. `on_hold(timeout_s)` is called before readers
    are blocked; an error of it fails the hold. `on_release()` is called once for every `on_hold`
    that returned, after readers may enter again.

    `lock` guards the gate, and is held while `refuse` runs. The other callbacks run without it, and
    no method may be called with it.

    On `gpus()` a reader stays active until the work queued on its streams is done: the streams that
    are current where a block ends.
    """

    def __init__(
        self,
        refuse: Callable[[], None],
        *,
        lock: threading.RLock | None = None,
        on_hold: OnHold | None = None,
        on_release: OnRelease | None = None,
        gpus: Callable[[], Collection[torch.device]] = tuple,
        beside: ReadWriteGate | None = None,
    ) -> None:
        self._refuse = refuse
        self._group: _GateGroup = (
            _GateGroup(lock, on_hold, on_release) if beside is None else beside._group
        )
        self._group.gpus.append(gpus)
        self._condition = self._group.condition
        self._held_since: float | None = None

    @property
    def held(self) -> bool:
        """Whether this gate blocks readers now."""
        return self._held_since is not None

    @contextmanager
    def reading(self, timeout_s: float) -> Iterator[None]:
        """Be a reader for one decode step. Raises NotReadyError when refused or blocked too long.

        May be nested in one thread or task: an inner block never waits for a holder that waits for
        the outer block. Blocks may end in any order and in any thread; the last one ends the read.
        """
        # Inside `try` from the first line: an interrupt may come at any point.
        block, scope = object(), self._group.inside.get()
        try:
            if scope is None or not self._join(scope, block):
                scope = _ReadScope()
                self._enter(scope, block, timeout_s)
                self._group.inside.set(scope)
            yield
        finally:
            if scope is not None and block in scope.blocks:
                self._leave(scope, block)

    @property
    def held_s(self) -> float:
        """Seconds for which readers have been blocked; 0 while the gate is not held."""
        return time.perf_counter() - self._held_since if self._held_since is not None else 0.0

    def hold(self, timeout_s: float) -> None:
        """Block readers and wait until none is active, at most `timeout_s` seconds.

        Raises TransferError, after which readers are not blocked any more: TransferTimeout, or at
        once where an active reader waits for what this call is part of.
        """
        self._refuse_to_wait_for_callers()
        started = time.perf_counter()
        self._group.enter(self, timeout_s)
        try:
            with self._condition:
                # The time that `on_hold` waited for a decode step is generation, not stall.
                self._held_since = time.perf_counter()
                left_s = max(timeout_s - (time.perf_counter() - started), 0.0)
                self._condition.wait_for(lambda: not self._group.readers, left_s)
                inside = len(self._group.readers)
            if not inside and self._kernels_ended(started + timeout_s):
                return
        except BaseException:
            self.release()
            raise
        self.release()
        if not inside:
            raise TransferTimeout(
                f"the kernels of the last decode step did not end within {timeout_s:g} s; look at "
                "the GPU"
            )
        steps = "1 decode step" if inside == 1 else f"{inside} decode steps"
        raise TransferTimeout(
            f"{steps} did not end within {timeout_s:g} s; is reading() held around more than one "
            "step?"
        )

    def _refuse_to_wait_for_callers(self) -> None:
        """Raise TransferError where a reader in this process waits for this call."""
        callers = waiting_callers()
        with self._condition:
            waits = any(not scope.owners.isdisjoint(callers) for scope in self._group.readers)
        if waits:
            raise TransferError(
                "weights were sent inside a reading() block of the receiver that they are for, by "
                "the thread or the task that is in it: each would wait for the other; send them "
                "after the block"
            )

    def _kernels_ended(self, deadline: float) -> bool:
        """Wait for the work that former readers queued on their streams; False at the deadline."""
        while not self._group.marks.passed():
            if time.perf_counter() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def release(self) -> float:
        """Let readers enter again; return the seconds for which they were blocked."""
        with self._condition:
            since, self._held_since = self._held_since, None
        self._group.leave(self)
        return time.perf_counter() - since if since is not None else 0.0

    def _join(self, scope: _ReadScope, block: object) -> bool:
        """Count one more block of an active scope; False for an ended one that a task inherited."""
        with self._condition:
            if not scope.blocks:
                return False
            if scope.gate is not self:
                self._refuse()
            scope.blocks.add(block)
            return True

    def _enter(self, scope: _ReadScope, block: object, timeout_s: float) -> None:
        with self._condition:
            if not self._condition.wait_for(lambda: not self._group.holders, timeout_s):
                self._refuse()  # names the update, where the weights in use have changed
                raise NotReadyError(
                    f"an update has held generation for {timeout_s:g} s; see weight_info",
                    state="UPDATING",
                )
            self._refuse()
            scope.blocks.add(block)
            scope.gate = self
            self._group.readers.add(scope)

    def _leave(self, scope: _ReadScope, block: object) -> None:
        with self._condition:
            try:
                self._group.marks.put({gpu for gpus in self._group.gpus for gpu in gpus()})
            finally:
                if scope.blocks <= {block}:
                    self._group.readers.discard(scope)
                scope.blocks.discard(block)
                if not scope.blocks:
                    scope.owners = frozenset()  # a context keeps the scope, and that of a task it
                if not self._group.readers:
                    self._condition.notify_all()
