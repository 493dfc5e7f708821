"""The writing end of a message queue: which way a message takes, and who is waited for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec

from weightsync.errors import ConfigError, PeerLostError
from weightsync.samehost.closable_lock import ClosableLock
from weightsync.samehost.janitor import cleanup_stale
from weightsync.samehost.message_codec import BYTES_BODY
from weightsync.samehost.message_layout import (
    INLINE,
    INLINE_NBYTES,
    SLOT,
    SOCKET,
    MessageRingLayout,
)
from weightsync.samehost.message_parts import Encoded, buffer_offset, write_around
from weightsync.samehost.message_ring import MessageRingWriter
from weightsync.samehost.message_sockets import (
    LOCAL,
    READY,
    REMOTE,
    Publisher,
    own_address,
    socket_path,
)
from weightsync.samehost.patience import Cancel, WaitPolicy

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often a writer that never waits looks whether its readers live."""


class QueueHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a reader needs to open a queue: plain data, to be sent by any way there is."""

    local_reader_ranks: tuple[int, ...] = ()
    remote_reader_ranks: tuple[int, ...] = ()
    writer_rank: int | None = None
    control: str | None = None
    data: str | None = None
    slots: int = 0
    slot_nbytes: int = 0
    remote_endpoint: str | None = None
    spin_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class WriterTerms:
    """What a queue is made for; see `MessageQueue`."""

    local_ranks: tuple[int, ...]
    remote_ranks: tuple[int, ...]
    slots: int
    slot_nbytes: int
    connect_ip: str | None
    writer_rank: int | None
    drop_dead_readers: bool
    spin_s: float

    def __post_init__(self) -> None:
        """Raise ConfigError for what cannot be."""
        ranks = (*self.local_ranks, *self.remote_ranks)
        if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0:
            raise ConfigError(
                f"the readers have ranks {list(ranks)}; give one or more, each once, none negative"
            )
        if self.slots < 1 or self.slot_nbytes < 1:
            raise ConfigError(f"{self.slots} slots of {self.slot_nbytes} bytes make no queue")


class Writer:
    """Owns the segments and the socket. Safe to use from several threads.

    `lock.close()` ends the calls that wait, lets readers read to the end, and releases everything.
    """

    def __init__(self, terms: WriterTerms) -> None:
        self.terms = terms
        self._count = 0
        self._looked = time.monotonic()
        self._all_there = False
        self._ring: MessageRingWriter | None = None
        cleanup_stale()
        if terms.local_ranks:
            layout = MessageRingLayout(terms.slots, terms.slot_nbytes, len(terms.local_ranks))
            self._ring = MessageRingWriter(layout, spin_s=terms.spin_s)
        try:
            self._publisher = Publisher(
                path=socket_path(self._ring.control.name) if self._ring else None,
                connect_ip=(terms.connect_ip or own_address()) if terms.remote_ranks else None,
                window_nbytes=terms.slots * terms.slot_nbytes,
            )
        except BaseException:
            if self._ring:
                self._ring.close()
            raise
        self._publisher.remote = terms.remote_ranks
        self.lock = ClosableLock(
            "message queue",
            wake=self._ring.interrupt if self._ring else lambda: None,
            release=partial(_release, self._publisher, self._ring),
        )

    def handle(self) -> QueueHandle:
        """Return what readers open."""
        return QueueHandle(
            local_reader_ranks=self.terms.local_ranks,
            remote_reader_ranks=self.terms.remote_ranks,
            writer_rank=self.terms.writer_rank,
            control=self._ring.control.name if self._ring else None,
            data=self._ring.data.name if self._ring else None,
            slots=self.terms.slots,
            slot_nbytes=self.terms.slot_nbytes,
            remote_endpoint=self._publisher.tcp_endpoint,
            spin_s=self.terms.spin_s,
        )

    def send(self, message: Encoded, timeout_s: float | None, cancel: Cancel | None) -> None:
        """Send one message to all, or, when this raises, to none."""
        timeout_s = self._enter(timeout_s, cancel)
        try:
            patience = self._ready_for(message.nbytes, timeout_s, cancel)
            if self._ring is not None:
                self._put(self._ring, message, patience)
            if self._publisher.remote:
                self._publisher.send(REMOTE, self._count, message)
            self._count += 1
        finally:
            self.lock.leave()

    @contextmanager
    def write_in_place(
        self, nbytes: int | None, timeout_s: float | None, cancel: Cancel | None
    ) -> Iterator[memoryview]:
        """Yield `nbytes` writable bytes, by default all that a slot takes; sent at the end."""
        most = self.terms.slot_nbytes - buffer_offset(BYTES_BODY)
        nbytes = most if nbytes is None else nbytes
        if not 0 <= nbytes <= most:
            raise ConfigError(f"{nbytes} bytes are to be written in a slot, which takes {most}")
        whole = buffer_offset(BYTES_BODY) + nbytes
        timeout_s = self._enter(timeout_s, cancel)
        try:
            patience = self._ready_for(whole, timeout_s, cancel)
            if self._ring is None:
                view = write_around(memoryview(bytearray(whole)), BYTES_BODY)
                yield view
            else:
                if not self._ring.record_free:
                    self._ring.wait_record(patience())
                slot = self._ring.wait_slot(patience())
                view = write_around(self._ring.slot(slot, whole), BYTES_BODY)
                yield view
                self._ring.publish(SLOT, whole, slot)
            if self._publisher.remote:
                self._publisher.send(REMOTE, self._count, Encoded(BYTES_BODY, [view], []))
            self._count += 1
        finally:
            self.lock.leave()

    def wait_until_ready(self, timeout_s: float | None) -> None:
        """Return when every reader has opened its end; then theirs return too."""
        timeout_s = self._enter(timeout_s, None)
        try:
            self._wait_joined(self._patience(self._missing, timeout_s)())
            if self._ring is not None:
                self._ring.announce_ready()
            if self._publisher.remote:
                self._publisher.announce(READY)
        finally:
            self.lock.leave()

    def drop_reader(self, rank: int) -> None:
        """Go on without a reader; it will find out. Raises ConfigError when there is none."""
        with self.lock:
            if rank not in self._readers():
                raise ConfigError(f"rank {rank} is none of the readers, {self._readers()}")
            self._drop(rank)

    def _enter(self, timeout_s: float | None, cancel: Cancel | None) -> float | None:
        """Go inside the lock, which another thread may hold; return what is left of the time."""
        if self.lock.acquire(0):
            return timeout_s
        started = time.monotonic()
        patience = WaitPolicy(
            lambda: "another thread's message to be sent",
            lambda: None,
            timeout_s=timeout_s,
            cancel=cancel,
            closing=self.lock,
        )
        while not self.lock.acquire(patience.nap_s):
            patience.look()
        return None if timeout_s is None else max(0.0, started + timeout_s - time.monotonic())

    def _ready_for(
        self, nbytes: int, timeout_s: float | None, cancel: Cancel | None
    ) -> Callable[[], WaitPolicy]:
        """Wait until readers elsewhere can be sent `nbytes`; return the call's patience."""
        if time.monotonic() - self._looked > LOOK_S:
            self._look_at_readers()
        patience = self._patience(self._awaited, timeout_s, cancel)
        if self._publisher.remote:
            self._wait_joined(patience())
            self._publisher.wait_window(nbytes, patience())
        return patience

    def _put(
        self, ring: MessageRingWriter, message: Encoded, patience: Callable[[], WaitPolicy]
    ) -> None:
        if not ring.record_free:
            ring.wait_record(patience())
        nbytes = message.nbytes
        if nbytes <= INLINE_NBYTES:
            message.write(ring.inline(nbytes))
            ring.publish(INLINE, nbytes)
        elif nbytes <= self.terms.slot_nbytes:
            slot = ring.wait_slot(patience())
            message.write(ring.slot(slot, nbytes))
            ring.publish(SLOT, nbytes, slot)
        else:
            self._wait_joined(patience())
            ring.wait_post(patience())
            self._publisher.send(LOCAL, self._count, message)
            ring.publish(SOCKET, nbytes)

    def _patience(
        self, doing: Callable[[], str], timeout_s: float | None, cancel: Cancel | None = None
    ) -> Callable[[], WaitPolicy]:
        """Return what makes the patience of one call, once it is needed."""
        made: list[WaitPolicy] = []

        def get() -> WaitPolicy:
            if not made:
                made.append(
                    WaitPolicy(
                        doing,
                        self._look_at_readers,
                        timeout_s=timeout_s,
                        cancel=cancel,
                        closing=self.lock,
                    )
                )
            return made[0]

        return get

    def _wait_joined(self, patience: WaitPolicy) -> None:
        if self._all_there:
            return
        self._publisher.wait_joined(self._expected, patience)
        self._all_there = True

    def _expected(self) -> set[tuple[bytes, int]]:
        """Return the subscriptions of the readers that were not dropped."""
        local = {(LOCAL, rank) for rank in self._local()}
        return local | {(REMOTE, rank) for rank in self._publisher.remote}

    def _local(self) -> list[int]:
        return [self.terms.local_ranks[place] for place in self._ring.active] if self._ring else []

    def _readers(self) -> list[int]:
        return [*self._local(), *self._publisher.remote]

    def _missing(self) -> str:
        gone = self._expected() - self._publisher.joined
        return f"reader {_listed(rank for _, rank in gone)} to open this queue"

    def _awaited(self) -> str:
        if self._expected() - self._publisher.joined and not self._all_there:
            return self._missing()
        behind = list(self._publisher.behind())
        if self._ring is not None:
            behind += [self.terms.local_ranks[p] for p in self._ring.behind(self._count)]
        return f"reader {_listed(behind)} to read what was sent"

    def _look_at_readers(self) -> None:
        """Raise PeerLostError naming the readers that are gone, or go on without them."""
        self._looked = time.monotonic()
        self._publisher.pump()
        lost = dict(self._publisher.lost)
        if self._ring is not None:
            lost |= {self.terms.local_ranks[p]: how for p, how in self._ring.lost().items()}
        if not lost:
            return
        cleanup_stale()
        named = "; ".join(f"reader {rank} is gone: {how}" for rank, how in sorted(lost.items()))
        if not self.terms.drop_dead_readers:
            raise PeerLostError(
                f"{named}. Start the group anew, or make the queue with drop_dead_readers=True "
                "to go on without readers that are lost",
                ranks=sorted(lost),
            )
        logger.warning("%s; the message queue goes on without", named)
        for rank in lost:
            self._drop(rank)

    def _drop(self, rank: int) -> None:
        if self._ring is not None and rank in self.terms.local_ranks:
            self._ring.evict(self.terms.local_ranks.index(rank))
        else:
            self._publisher.drop(rank)
        if not self._readers():
            raise PeerLostError("no reader is left", ranks=(rank,))


def _release(publisher: Publisher, ring: MessageRingWriter | None) -> None:
    publisher.hide()  # a socket without its segment would be a dead owner's
    if ring is not None:
        ring.close()
    publisher.close()


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks)) or "(none)"
