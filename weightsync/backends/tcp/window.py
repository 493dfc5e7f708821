"""The newest chunks of an update in one process, for the hosts that read them from here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from weightsync.backends.tcp.connection import FrameKind, nothing
from weightsync.errors import TransferTimeout


@dataclass(frozen=True, slots=True)
class Pieces:
    """A chunk in several places: the position in it, address and bytes of each, zeros between.

    `device` is the index of their GPU, None in host memory.
    """

    places: Sequence[tuple[int, int, int]]
    device: int | None = None

    def __len__(self) -> int:
        """Return the bytes up to the end of the last piece."""
        if not self.places:
            return 0
        position, _, nbytes = self.places[-1]
        return position + nbytes


Data = memoryview | Pieces
Read = Callable[[int], Data]
"""Returns a chunk."""
_LOOK_S = 0.2
_MOST_S = 30.0
NO_BYTES = memoryview(b"")


@dataclass(slots=True, eq=False)
class Cursor:
    """One host that reads: `place` says which, `at` is the chunk that it gets next.

    `stop` ends a send to it from any thread.
    """

    place: int
    epoch: int
    at: int
    stop: Callable[[], None]
    is_sending: bool = False


@dataclass(slots=True, eq=False)
class _Chain:
    """Hosts that read from each other, of which the nearest is waited for until `hold_until`."""

    followers: list[int]
    hold_until: float


@dataclass(frozen=True, slots=True)
class Offer:
    """The next frame of a cursor: a chunk, or another kind where there is none."""

    kind: FrameKind
    chunk: int = 0
    chunks: int = 0
    fingerprints: Sequence[int] = ()
    data: Data = NO_BYTES


class ChunkWindow:
    """The last `slots` chunks of the newest update; any number of hosts read them.

    The one thread that fills it calls `begin`, then `make_room` and `offer` for each chunk, then
    `complete`. `make_room` waits for the hosts that read, and for the nearest follower of each
    chain, as long as `hold_s`: that host may come late, or take the place of one that died. It does
    not wait for
    hosts that are lost (`lose`), or that have asked for a chunk which is no longer here. `again`
    reads a chunk that is no longer in the window. A process whose update fails for itself calls
    `fail`, and one that learns that the sender gave it up, `abort`.
    """

    def __init__(self, slots: int, hold_s: float) -> None:
        self.slots = slots
        self._hold_s = hold_s
        self._changed = threading.Condition()
        self._cursors: set[Cursor] = set()
        self._close_now = False
        self._lost: set[tuple[int, int]] = set()
        self._reset(0, 0, [], None)

    def _reset(
        self, epoch: int, chunks: int, chains: Sequence[Sequence[int]], again: Read | None
    ) -> None:
        self.epoch = epoch
        self._chunks = chunks
        self._lost = {(of, place) for of, place in self._lost if of >= epoch}
        hold_until = time.monotonic() + self._hold_s
        self._chains = [
            _Chain([place for place in chain if (epoch, place) not in self._lost], hold_until)
            for chain in chains
            if chunks
        ]
        self.members = tuple(place for chain in chains for place in chain)
        self._nearest = {chain[0] for chain in chains if chain}
        self._again = again
        self._left_out: Mapping[int, Container[int]] = {}
        self._data: dict[int, Data] = {}
        self._fingerprints: list[Sequence[int]] = []
        self._ended: FrameKind | None = None

    def begin(
        self,
        epoch: int,
        chunks: int,
        chains: Sequence[Sequence[int]],
        again: Read | None = None,
        left_out: Mapping[int, Container[int]] | None = None,
    ) -> None:
        """Begin an update. Hosts that still read an older one lose it.

        The first host of each of the `chains` reads here, and each other one from the nearest host
        before it that works. Nothing is sent any more from the memory of the older update when this
        returns. `left_out` are chunks, by host, of which it gets the fingerprints alone.
        """
        with self._changed:
            self._end_sends()
            self._reset(epoch, chunks, chains, again)
            self._left_out = left_out or {}
            self._changed.notify_all()

    def make_room(self, chunk: int, check: Callable[[], None]) -> None:
        """Wait until the memory of chunk `chunk - slots` may be overwritten, and forget it."""
        last = chunk - self.slots
        while True:
            with self._changed:
                if last < 0 or self._is_free(last):
                    self._data.pop(last, None)
                    return
                self._changed.wait(_LOOK_S)
            check()

    def _is_free(self, chunk: int) -> bool:
        if any(cursor.at <= chunk for cursor in self._cursors):
            return False
        if self._close_now:
            return True
        here, now = {cursor.place for cursor in self._cursors}, time.monotonic()
        return all(
            not chain.followers or chain.followers[0] in here or now > chain.hold_until
            for chain in self._chains
        )

    def _chain_of(self, place: int) -> _Chain | None:
        """Return the chain in which a host is waited for."""
        return next((chain for chain in self._chains if place in chain.followers), None)

    def offer(self, chunk: int, data: Data, fingerprints: Sequence[int]) -> None:
        """Add a chunk, whose memory stays as it is until `make_room` says that it is free."""
        with self._changed:
            self._data[chunk] = data
            self._fingerprints.append(fingerprints)
            self._changed.notify_all()

    def complete(self, check: Callable[[], None]) -> None:
        """Wait until the hosts that read, and the nearest followers, have all chunks."""
        while True:
            with self._changed:
                if self._is_free(self._chunks - 1):
                    return
                self._changed.wait(_LOOK_S)
            check()

    def fail(self) -> None:
        """End the update in this process alone: its readers go to other sources."""
        self._end(FrameKind.FAILED)

    def abort(self) -> None:
        """End the update for all hosts that read it here."""
        self._end(FrameKind.ABORTED)

    def release(self) -> None:
        """Let go of the memory of all chunks, which is about to be used otherwise."""
        with self._changed:
            self._data.clear()
            self._again = None
            self._end_sends()
            self._changed.notify_all()

    def _end_sends(self) -> None:
        """Stop what is being sent, and wait until nothing is; drop all hosts that read."""
        cursors, self._cursors = self._cursors, set()
        for cursor in cursors:
            if cursor.is_sending:
                cursor.stop()
        until = time.monotonic() + _MOST_S
        while any(cursor.is_sending for cursor in cursors):
            if time.monotonic() > until:
                raise TransferTimeout("a chunk of the last update is still being read")
            self._changed.wait(_LOOK_S)

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self._close_now = True
            self._ended = self._ended or FrameKind.FAILED
            self._data.clear()
            self._changed.notify_all()

    def _end(self, kind: FrameKind) -> None:
        with self._changed:
            self._ended = self._ended or kind
            self._changed.notify_all()

    # Threads that serve

    def attach(
        self,
        place: int,
        epoch: int,
        first: int,
        *,
        is_next: bool,
        stop: Callable[[], None] = nothing,
    ) -> Cursor | None:
        """Return a cursor of the host at `place`, None until the update that it asks for is here.

        With `is_next` that is the first update after `epoch` in which `place` is the first of a
        chain: a host that comes later in it reads from the one before, and leaves this connection.
        """
        with self._changed:
            comes = self.epoch > epoch and place in self._nearest
            if not (comes if is_next else self.epoch >= epoch):
                self._changed.wait(_LOOK_S)
                return None
            cursor = Cursor(place, self.epoch if is_next else epoch, first, stop)
            if cursor.epoch == self.epoch:
                if self._is_gone(first):
                    self._drop_from(place)
                else:
                    self._cursors.add(cursor)
                    self._drop_before(place)
            return cursor

    def _is_gone(self, chunk: int) -> bool:
        """Whether a chunk was here, and cannot be had any more."""
        is_old = chunk < len(self._fingerprints) and chunk not in self._data
        return is_old and self._again is None

    def _drop_from(self, place: int) -> None:
        """Do not wait for a host that reads from another source, and serves those after it."""
        if (chain := self._chain_of(place)) is not None:
            chain.followers = chain.followers[: chain.followers.index(place)]
            self._changed.notify_all()

    def _drop_before(self, place: int) -> None:
        """Wait no more for followers that are nearer than the one that came."""
        # One that comes later finds what is in the window, or goes to another source.
        if (chain := self._chain_of(place)) is not None:
            chain.followers = chain.followers[chain.followers.index(place) :]
            self._changed.notify_all()

    def lose(self, place: int, epoch: int) -> None:
        """Do not wait in update `epoch`, which may begin later, for a host that is lost.

        Where it reads here its connection shows when it is gone. A host that comes is served.
        """
        with self._changed:
            if any(cursor.place == place for cursor in self._cursors):
                return
            if epoch > self.epoch:
                self._lost.add((epoch, place))
            elif epoch == self.epoch and (chain := self._chain_of(place)) is not None:
                chain.followers.remove(place)
                self._changed.notify_all()

    def detach(self, cursor: Cursor) -> None:
        """Forget a cursor. After a host that was lost the window waits for the next follower.

        A host that has all chunks serves those that follow it.
        """
        with self._changed:
            self._cursors.discard(cursor)
            cursor.is_sending = False
            self._changed.notify_all()
            if any(other.place == cursor.place for other in self._cursors):
                return  # it has connected again
            chain = self._chain_of(cursor.place)
            if cursor.epoch == self.epoch and chain is not None:
                if cursor.at >= self._chunks:
                    chain.followers.clear()
                else:
                    chain.followers.remove(cursor.place)
                    chain.hold_until = time.monotonic() + self._hold_s

    def next(self, cursor: Cursor) -> Offer | None:
        """Return what this host gets next; None after a short wait without anything."""
        with self._changed:
            if cursor.epoch != self.epoch:
                return Offer(FrameKind.GONE)
            if self._ended is not None:
                return Offer(self._ended)
            if cursor.at >= len(self._fingerprints):
                self._changed.wait(_LOOK_S)
                return None
            at, again = cursor.at, self._again
            data = self._data.get(at)
            if at in self._left_out.get(cursor.place, ()):
                data = NO_BYTES
            if data is None and again is None:
                return Offer(FrameKind.GONE)
            fingerprints = self._fingerprints[at]
            cursor.is_sending = True
        if data is None and again is not None:
            data = again(at)
        return Offer(FrameKind.CHUNK, at, self._chunks, fingerprints, data or NO_BYTES)

    def sent(self, cursor: Cursor) -> bool:
        """Note that this host has its chunk; return whether it was the last one."""
        with self._changed:
            cursor.at += 1
            cursor.is_sending = False
            self._changed.notify_all()
            return cursor.at >= self._chunks
