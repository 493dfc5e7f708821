"""Tensors that arrived and were not asked for yet, in whatever order; pure state, one lock.

A sender's sequence numbers arrive in order, so one that is not here and not greater than the last
that came was handed out or dropped: to know that takes no memory of the past.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from weightsync.errors import ProtocolError, TransferError, TransferTimeout
from weightsync.wire.tensor_packets import TensorIpcHandle

MAX_CLEANED = 1 << 14
"""Aborted requests that are remembered, so that their late tensors do not stay."""
MAX_UNWANTED = 1 << 12
"""Tensors of one sender that were given up before they came."""
MAX_GONE = 1 << 10
"""Senders that ended and are remembered by name."""

Key = tuple[str, int]


class Payload(Protocol):
    """A tensor in the memory where it arrived."""

    def tensor(self) -> torch.Tensor:
        """Return it, once; what it lies in is given back when the last view of it is dropped."""

    def drop(self) -> None:
        """Give its memory back unseen."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A tensor that came: what its sender said of it, and where it is."""

    handle: TensorIpcHandle
    content: Payload

    @property
    def key(self) -> Key:
        """What finds it."""
        return self.handle.sender, self.handle.sequence


@dataclass(slots=True)
class SenderState:
    """What is known of one sender; `gone` says why it sends no more, "" while it does."""

    name: str
    last: int = 0
    gone: str = ""
    waiting: set[int] = field(default_factory=set)
    unwanted: set[int] = field(default_factory=set)

    def wants(self, sequence: int) -> bool:
        """Note that a tensor came; false if it was given up before."""
        self.last = max(self.last, sequence)
        wanted = sequence not in self.unwanted
        self.unwanted = {later for later in self.unwanted if later > sequence}
        return wanted


@dataclass(frozen=True, slots=True)
class Cleanup:
    """When a request was cleaned up, and which senders sent for another attempt under its id."""

    number: int
    again: set[str] = field(default_factory=set)


class Mailbox:
    """The tensors of all senders; any thread may call, and none holds the lock while it waits."""

    def __init__(self, *, max_pending: int, late_s: float) -> None:
        self._max_pending = max_pending
        self._late_s = late_s
        self._changed = threading.Condition()
        self._pending: dict[Key, Arrival] = {}
        self._requests: dict[str, set[Key]] = {}
        self._senders: OrderedDict[str, SenderState] = OrderedDict()
        self._cleaned: OrderedDict[str, Cleanup] = OrderedDict()
        self._late: OrderedDict[Key, float] = OrderedDict()
        self._cleanups = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def full(self) -> bool:
        """Whether the senders have to wait before more is read from them."""
        return len(self._pending) >= self._max_pending

    def meet(self, sender: str, name: str) -> bool:
        """Note a new sender; false if one of this id was met before."""
        with self._changed:
            if sender in self._senders:
                return False
            self._senders[sender] = SenderState(name)
            return True

    def add(self, arrivals: Iterable[Arrival]) -> None:
        """Keep tensors in the order of arrival; those of requests cleaned up not for long.

        They are of the attempt that was aborted, or of another under the same id: only the latter
        are asked for. What the same sender sends after one that was asked for is of the latter.
        """
        unwanted = []
        with self._changed:
            for arrival in arrivals:
                state = self._senders[arrival.handle.sender]
                wanted = state.wants(arrival.handle.sequence)
                if self._closed or not wanted:
                    unwanted.append(arrival)
                    continue
                self._keep(arrival, state)
                if self._aborted(arrival.handle) is not None:
                    self._late[arrival.key] = time.monotonic() + self._late_s
            self._changed.notify_all()
        for arrival in unwanted:
            arrival.content.drop()

    def take(self, handle: TensorIpcHandle, timeout_s: float) -> torch.Tensor:
        """Hand out the tensor of `handle`, waiting for it if it is still to come.

        Raises TransferError at once for one that cannot come any more, TransferTimeout when it
        does not come in time, ProtocolError when another one came under its number.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            cleanups = self._cleanups
            while (arrival := self._pending.get((handle.sender, handle.sequence))) is None:
                cleanup = self._aborted(handle)
                if cleanup is not None and cleanup.number > cleanups:
                    raise _cleaned_up(handle)
                self._check_may_come(handle)
                self._wait(deadline, f"tensor {_shown(handle)} did not come", timeout_s)
            if arrival.handle != handle:
                raise ProtocolError(
                    f"tensor {_shown(handle)} is asked for, and its sender sent "
                    f"{_shown(arrival.handle)}; the handle was changed on its way"
                )
            self._forget(arrival)
            cleanup = self._aborted(handle)
            if cleanup is not None:
                cleanup.again.add(handle.sender)
        return arrival.content.tensor()

    def take_next(self, timeout_s: float) -> tuple[TensorIpcHandle, torch.Tensor]:
        """Hand out the tensor that came first. Raises TransferTimeout when none comes in time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._pending:
                self._check_open()
                self._wait(deadline, "no tensor came", timeout_s)
            arrival = next(iter(self._pending.values()))
            self._forget(arrival)
        return arrival.handle, arrival.content.tensor()

    def clean(self, request_id: str) -> int:
        """Drop the tensors of a request, those here and late ones; returns how many were here."""
        with self._changed:
            self._cleanups += 1
            self._cleaned[request_id] = Cleanup(self._cleanups)
            self._cleaned.move_to_end(request_id)
            while len(self._cleaned) > MAX_CLEANED:
                self._cleaned.popitem(last=False)
            dropped = [self._pending[key] for key in self._requests.get(request_id, ())]
            for arrival in dropped:
                self._forget(arrival)
            self._changed.notify_all()
        for arrival in dropped:
            arrival.content.drop()
        return len(dropped)

    @property
    def any_late(self) -> bool:
        """Whether `drop_late` will have something to do."""
        return bool(self._late)

    def drop_late(self, now: float) -> None:
        """Drop the tensors of requests cleaned up that came later and were not asked for."""
        dropped = []
        with self._changed:
            while self._late and next(iter(self._late.values())) <= now:
                arrival = self._pending[next(iter(self._late))]
                self._forget(arrival)
                dropped.append(arrival)
        for arrival in dropped:
            arrival.content.drop()

    def discard(self, sender: str, sequence: int) -> None:
        """Drop one tensor: now if it is here, else when it comes."""
        with self._changed:
            arrival = self._pending.get((sender, sequence))
            state = self._senders.get(sender)
            if arrival is not None:
                self._forget(arrival)
            elif state and sequence > state.last and len(state.unwanted) < MAX_UNWANTED:
                state.unwanted.add(sequence)
        if arrival is not None:
            arrival.content.drop()

    def part(self, sender: str, reason: str) -> None:
        """Note that a sender sends no more. What it sent can still be asked for."""
        with self._changed:
            self._senders[sender].gone = reason
            gone = [key for key, state in self._senders.items() if state.gone and not state.waiting]
            for key in gone[:-MAX_GONE]:
                del self._senders[key]
            self._changed.notify_all()

    def waiting_of(self, sender: str) -> int:
        """Return how many tensors of a sender are here."""
        state = self._senders.get(sender)
        return len(state.waiting) if state else 0

    def drop_all_of(self, sender: str) -> int:
        """Drop what a sender left behind; returns how many."""
        with self._changed:
            state = self._senders.get(sender)
            left = [self._pending[sender, number] for number in state.waiting] if state else []
            for arrival in left:
                self._forget(arrival)
        for arrival in left:
            arrival.content.drop()
        return len(left)

    def close(self) -> None:
        """Drop everything; those who wait get a TransferError. Idempotent."""
        with self._changed:
            self._closed = True
            left = list(self._pending.values())
            for arrival in left:
                self._forget(arrival)
            self._changed.notify_all()
        for arrival in left:
            arrival.content.drop()

    def _keep(self, arrival: Arrival, state: SenderState) -> None:
        self._pending[arrival.key] = arrival
        state.waiting.add(arrival.handle.sequence)
        if arrival.handle.request_id is not None:
            self._requests.setdefault(arrival.handle.request_id, set()).add(arrival.key)

    def _forget(self, arrival: Arrival) -> None:
        del self._pending[arrival.key]
        self._late.pop(arrival.key, None)
        self._senders[arrival.handle.sender].waiting.discard(arrival.handle.sequence)
        request_id = arrival.handle.request_id
        if request_id is not None:
            keys = self._requests[request_id]
            keys.discard(arrival.key)
            if not keys:
                del self._requests[request_id]

    def _aborted(self, handle: TensorIpcHandle) -> Cleanup | None:
        """Return the cleanup that a tensor may be too late for; None after another attempt's."""
        if handle.request_id is None:
            return None
        cleanup = self._cleaned.get(handle.request_id)
        return None if cleanup is None or handle.sender in cleanup.again else cleanup

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError("this tensor queue is closed")

    def _check_may_come(self, handle: TensorIpcHandle) -> None:
        self._check_open()
        state = self._senders.get(handle.sender)
        if state is None:
            raise TransferError(
                f"tensor {_shown(handle)} is of a sender that this queue never met, or long "
                "forgot; each message must go to the queue that its tensors went to"
            )
        if handle.sequence <= state.last and self._aborted(handle) is not None:
            raise _cleaned_up(handle)
        if handle.sequence <= state.last:
            raise TransferError(
                f"tensor {_shown(handle)} was handed out or dropped before; each is handed out once"
            )
        if state.gone:
            raise TransferError(
                f"tensor {_shown(handle)} will not come: sender {state.name} {state.gone}"
            )

    def _wait(self, deadline: float, what: str, timeout_s: float) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TransferTimeout(
                f"{what} in {timeout_s:.1f} s; {len(self._pending)} others are here, of "
                f"{sum(not state.gone for state in self._senders.values())} living senders"
            )
        self._changed.wait(remaining)


def _cleaned_up(handle: TensorIpcHandle) -> TransferError:
    return TransferError(f"tensor {_shown(handle)} was dropped: its request was cleaned up")


def _shown(handle: TensorIpcHandle) -> str:
    request = "" if handle.request_id is None else f" of request {handle.request_id[:80]!r}"
    return f"{handle.tensor_id[:80]!r}{request} ({handle.dtype}{handle.shape})"
