"""Keeps decode steps and weight swaps apart."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from weightsync.cuda.events import Marks
from weightsync.errors import NotReadyError, TransferError, TransferTimeout

logger = logging.getLogger(__name__)

_LOOK_S = 2e-4
OnHold = Callable[[float], None]
OnRelease = Callable[[], None]


@dataclass(slots=True, eq=False)
class _ReadScope:
    """One reader inside, with its nested blocks."""

    blocks: int = 1


class ReadWriteGate:
    """Many readers, or one holder. Who holds it keeps new readers out and waits for those inside.

    `refuse` is asked by every reader before it enters and raises where the weights may not be used.
    The hold may be taken by one thread and given back by another. `on_hold(timeout_s)` is called
    before readers are kept out, without a lock of the gate; what it raises fails the hold.
    `on_release()` is called once for every `on_hold` that returned, after readers are let in again.
    On `gpus()` a reader is inside until what its streams had been given as it left is done: the
    streams that are current where a block ends. (The waits for GPUs have not run on one yet.)
    """

    def __init__(
        self,
        refuse: Callable[[], None],
        *,
        on_hold: OnHold | None = None,
        on_release: OnRelease | None = None,
        gpus: Callable[[], Collection[torch.device]] = tuple,
    ) -> None:
        self._refuse = refuse
        self._on_hold = on_hold
        self._on_release = on_release
        self._gpus = gpus
        self._marks = Marks()
        self._condition = threading.Condition()
        self._readers = 0
        self._held_since: float | None = None
        self._inside: ContextVar[_ReadScope | None] = ContextVar("weightsync_stay", default=None)

    @property
    def held(self) -> bool:
        """Whether readers are kept out now."""
        return self._held_since is not None

    @contextmanager
    def reading(self, timeout_s: float) -> Iterator[None]:
        """Be inside for one decode step. Raises NotReadyError when refused or kept out too long.

        May be nested in one thread or task: an inner block never waits for a holder that waits for
        the outer one. Blocks may end in any order and in any thread; the last one leaves.
        """
        stay = self._inside.get()
        if stay is None or not self._join(stay):
            self._enter(timeout_s)
            stay = _ReadScope()
            self._inside.set(stay)
        try:
            yield
        finally:
            self._leave(stay)

    @property
    def held_s(self) -> float:
        """For how long readers have been kept out."""
        return time.perf_counter() - self._held_since if self._held_since is not None else 0.0

    def hold(self, timeout_s: float) -> None:
        """Keep readers out and wait until none is inside. On TransferError all go on."""
        started = time.perf_counter()
        self._stop_steps(timeout_s)
        with self._condition:
            # The step that `on_hold` waited for was generation, and no stall.
            self._held_since = time.perf_counter()
            left_s = max(timeout_s - (time.perf_counter() - started), 0.0)
            self._condition.wait_for(lambda: self._readers == 0, left_s)
            inside = self._readers
        if not inside and self._kernels_ended(started + timeout_s):
            return
        self.release()
        if not inside:
            raise TransferTimeout(
                f"the kernels of the last decode step did not end within {timeout_s:g} s; look at "
                "the GPU"
            )
        raise TransferTimeout(
            f"{inside} decode steps did not end within {timeout_s:g} s; is "
            "reading() held around more than one step?"
        )

    def _kernels_ended(self, deadline: float) -> bool:
        """Wait for what readers left behind on their streams; nobody is inside any more."""
        while not self._marks.passed():
            if time.perf_counter() > deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def release(self) -> float:
        """Let readers in again; return the seconds for which they were kept out."""
        with self._condition:
            held_s = self.held_s
            self._held_since = None
            self._condition.notify_all()
        if self._on_release is not None:
            try:
                self._on_release()
            except Exception:
                # The step that held the gate is over, however that went.
                logger.exception("on_release failed; generation may not go on")
        return held_s

    def _stop_steps(self, timeout_s: float) -> None:
        if self._on_hold is None:
            return
        try:
            self._on_hold(timeout_s)
        except TransferError:
            raise
        except Exception as exc:
            raise TransferError(
                f"generation could not be stopped: on_hold raised {type(exc).__name__}: {exc}"
            ) from exc

    def _join(self, stay: _ReadScope) -> bool:
        """Count one more block of a stay that has not ended; a task inherits ended ones too."""
        with self._condition:
            if not stay.blocks:
                return False
            stay.blocks += 1
            return True

    def _enter(self, timeout_s: float) -> None:
        with self._condition:
            if not self._condition.wait_for(lambda: self._held_since is None, timeout_s):
                self._refuse()  # knows which update it is, where weights in use have changed
                raise NotReadyError(
                    f"an update has held generation for {timeout_s:g} s; see weight_info",
                    state="UPDATING",
                )
            self._refuse()
            self._readers += 1

    def _leave(self, stay: _ReadScope) -> None:
        with self._condition:
            try:
                self._marks.put(self._gpus())
            finally:
                stay.blocks -= 1
                self._readers -= not stay.blocks
                if not self._readers:
                    self._condition.notify_all()
