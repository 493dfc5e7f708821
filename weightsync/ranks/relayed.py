"""Collectives of receivers that send together: their words go by way of the one that fetches.

They are the ranks of one sender, in processes without a process group, perhaps on several hosts.
`RelayedComm` is the RankComm of each.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from weightsync.ranks.comm import _NOTES, RankComm, _Word
from weightsync.ranks.watch import WatchOutcome
from weightsync.runtime.interpreter_exit import TorchCalls
from weightsync.transports.polled import Mailbox

_LOST_NOTE = f"{_NOTES}/lost"


class RelayedComm(RankComm):
    """The collectives of sources that fetch's receiver connects; see RankComm.

    `timeout_s` bounds every wait for another source. A source is lost when the receiver says so,
    and all are when nobody passes their words on any more.
    """

    def __init__(self, mailbox: Mailbox, *, timeout_s: float) -> None:
        self.rank = mailbox.place
        self.size = mailbox.places
        self.names = tuple(range(mailbox.places))
        self.timeout_s = timeout_s
        self.process_group = None
        self.store: Any = _Notes(mailbox)
        self._group: Any = _RelayedGroup(mailbox, timeout_s)
        self._watch: Any = _RelayedWatch(mailbox, timeout_s)
        self._rendezvous: Any = _Survivors(mailbox)
        self._kept = deque(maxlen=4)
        self._word = _Word(1)
        self._broken = None
        self._order = 0
        self.calls = TorchCalls()


class _RelayedWork:
    """A collective that has begun: `expected` are the places from which a message is to come."""

    def __init__(
        self,
        group: _RelayedGroup,
        expected: Sequence[tuple[int, torch.Tensor]] = (),
    ) -> None:
        self._group = group
        self.expected = deque(expected)
        self.error: str = ""
        self.until = time.monotonic() + group.timeout_s

    def is_completed(self) -> bool:
        self._group.receive()
        return not self.expected or bool(self.error)

    def wait(self, timeout: timedelta) -> None:
        """Raise RuntimeError where it has failed, or has not ended by then."""
        until = time.monotonic() + timeout.total_seconds()
        while not self.is_completed():
            left = until - time.monotonic()
            if left <= 0:
                raise RuntimeError("not yet")
            self._group.mailbox.wait(left)
        if self.error:
            raise RuntimeError(self.error)


class _RelayedGroup:
    """The methods of a process group of torch that RankComm uses. Messages arrive in order."""

    def __init__(self, mailbox: Mailbox, timeout_s: float) -> None:
        self.mailbox = mailbox
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._open: deque[_RelayedWork] = deque()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of further collectives."""
        self.timeout_s = timeout.total_seconds()

    def gather(self, outputs: list[torch.Tensor], own: torch.Tensor, root: int) -> _RelayedWork:
        """Bring `own` of each place to `outputs` of the root, where those of the others begin."""
        if self.mailbox.place != root:
            self.mailbox.send(root, own.numpy().tobytes())
            return self._begun(())
        outputs[root].copy_(own)
        return self._begun([(i, out) for i, out in enumerate(outputs) if i != root])

    def broadcast(self, tensor: torch.Tensor, root: int) -> _RelayedWork:
        """Overwrite `tensor` with that of the root."""
        if self.mailbox.place != root:
            return self._begun([(root, tensor)])
        body = tensor.numpy().tobytes()
        for place in range(self.mailbox.places):
            if place != root:
                self.mailbox.send(place, body)
        return self._begun(())

    def allgather(self, outputs: list[list[torch.Tensor]], own: list[torch.Tensor]) -> _RelayedWork:
        """Bring `own` of each place to all."""
        here, body = self.mailbox.place, own[0].numpy().tobytes()
        outputs[0][here].copy_(own[0])
        others = [(i, out) for i, out in enumerate(outputs[0]) if i != here]
        for place, _ in others:
            self.mailbox.send(place, body)
        return self._begun(others)

    def _begun(self, expected: Sequence[tuple[int, torch.Tensor]]) -> _RelayedWork:
        work = _RelayedWork(self, expected)
        with self._lock:
            self._open.append(work)
        return work

    def receive(self) -> None:
        """Give what has arrived to the collectives, the oldest first; fail those that cannot end.

        A later one gets nothing from a place that an earlier one waits for.
        """
        with self._lock:
            waited: set[int] = set()
            for work in self._open:
                for _ in range(len(work.expected)):
                    place, tensor = work.expected.popleft()
                    body = None if place in waited else self.mailbox.take(place)
                    if body is None:
                        waited.add(place)
                        work.expected.append((place, tensor))
                    elif len(body) != tensor.numel():
                        work.error = f"place {place} sent {len(body)} bytes, not {tensor.numel()}"
                    else:
                        tensor.copy_(
                            torch.frombuffer(bytearray(body), dtype=torch.uint8).view_as(tensor)
                        )
                lost = self.mailbox.lost if work.expected else []
                if lost:
                    work.error = work.error or f"places {lost} are lost"
                elif work.expected and time.monotonic() > work.until:
                    work.error = work.error or "not all have answered in time"
            self._open = deque(w for w in self._open if w.expected and not w.error)


class _RelayedWatch:
    """The members of RankWatch that RankComm uses, by the notes that were passed on."""

    def __init__(self, mailbox: Mailbox, timeout_s: float) -> None:
        self.limit_s = timeout_s
        self._mailbox = mailbox

    def is_set(self, key: str) -> bool:
        return self._mailbox.is_noted(key)

    @property
    def is_losing(self) -> bool:
        return self._mailbox.is_noted(_LOST_NOTE) or bool(self._mailbox.lost)

    def look_for_loss(self, timeout_s: float) -> bool:
        return self.is_losing

    def begin_wait(self) -> None:
        """Nothing: the receiver that passes words on finds who is lost."""

    def end_wait(self) -> None:
        """Nothing, as above."""

    def poll(self) -> WatchOutcome | None:
        return WatchOutcome() if self.is_losing else None

    def close(self) -> None:
        """Nothing: it has no thread."""


class _Survivors:
    """The members of StoreRendezvous that RankComm uses."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def report_alive(self) -> None:
        """Nothing: the receiver that passes words on calls all sources."""

    def missing_survivors(self, timeout_s: float) -> list[int]:
        return self._mailbox.lost


class _Notes:
    """The short notes of RankComm's store, which are passed on."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._added = 0

    def set(self, key: str, value: str) -> None:
        self._mailbox.note(f"{_NOTES}/{key}")

    def add(self, key: str, amount: int) -> int:
        """Return how often this source has added: the order among several is not known."""
        self._added += amount
        return self._added

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self._mailbox.note(f"{_NOTES}/{key}")
        return value.encode()
