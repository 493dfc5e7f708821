"""A receiving host in the chain: chunks from the rank before, into the ring, to the next rank."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from weightsync.backends.base import Check
from weightsync.backends.gloo.group import (
    HEADER_LANE,
    GroupRendezvous,
    PrivateGroup,
    Work,
    data_lane,
    end_at_exit,
)
from weightsync.backends.gloo.header import ChunkHeader, patience_s
from weightsync.backends.gloo.payload import GroupInfo
from weightsync.errors import ProtocolError, TransferError, TransferTimeout, WeightSyncError
from weightsync.shm.ring import NETWORK, Control, RingWriter
from weightsync.shm.wait import Heartbeat
from weightsync.weights.layout import runs_per_chunk


class Downstream:
    """Heads by their index, chunks by the place where they lie; for the link's thread alone.

    Without a next host, and once `cut_off` was called because it takes no more, nothing is sent.
    """

    def __init__(
        self,
        group: PrivateGroup,
        info: GroupInfo,
        cut_off: Callable[[TransferError], None],
    ) -> None:
        self._group = group
        self._next = info.rank + 1
        self._sends = self._next < len(info.members)
        self._patience_s = patience_s(info.timeout_s, info.rank, len(info.members))
        self._cut_off = cut_off
        self._heads: dict[int, Work] = {}
        self._chunks: dict[int, Work] = {}

    def send_head(self, index: int, buffer: torch.Tensor) -> None:
        """Send a head; `buffer` is in use until `settle_head`."""
        self._send(self._heads, index, lambda: self._group.send(buffer, self._next, HEADER_LANE))

    def send(self, place: int, memory: torch.Tensor, chunk: int) -> None:
        """Send a chunk, `uint8[nbytes]`; `memory` is in use until `settle`."""
        self._send(
            self._chunks, place, lambda: self._group.send(memory, self._next, data_lane(chunk))
        )

    def settle_head(self, index: int) -> None:
        """Return when this head is sent, or cannot be."""
        self._settle(self._heads, index)

    def settle(self, place: int) -> None:
        """Return when what lies at `place` is sent, or cannot be."""
        self._settle(self._chunks, place)

    def settle_chunks(self) -> None:
        """Return when all chunks are sent, or cannot be."""
        for place in list(self._chunks):
            self.settle(place)

    def settle_all(self) -> None:
        """Return when everything is sent, or cannot be."""
        self.settle_chunks()
        for index in list(self._heads):
            self.settle_head(index)

    def forget_chunks(self) -> None:
        """The group breaks: no chunk is at work any more."""
        self._chunks.clear()

    def forget(self) -> None:
        """The group is over: nothing is at work any more, and nobody is told of anything."""
        self._heads.clear()
        self._chunks.clear()
        self._cut_off = _ignore  # a cycle would keep all of it until the next collection

    def _send(self, sent: dict[int, Work], key: int, start: Callable[[], Work]) -> None:
        if not self._sends:
            return
        try:
            sent[key] = start()
        except TransferError as exc:
            self._stop(exc)

    def _settle(self, sent: dict[int, Work], key: int) -> None:
        pending = sent.pop(key, None)
        if pending is None or not self._sends:
            return
        try:
            pending.wait(self._patience_s)
        except TransferError as exc:
            self._stop(exc)

    def _stop(self, exc: TransferError) -> None:
        self._sends = False
        self._cut_off(exc)


def _ignore(exc: TransferError) -> None:
    pass


@dataclass(slots=True, eq=False)
class RelayUpdate:
    """`sizes` of the update's chunks, the reader places, the sender's count.

    `done` is set when all of it was read here and sent on, or when `error` says why not.
    """

    epoch: int
    base: int
    readers: Sequence[int]
    sizes: Sequence[int]
    done: threading.Event = field(default_factory=threading.Event)
    error: WeightSyncError | None = None

    def fail(self, error: WeightSyncError) -> None:
        """The first failure counts."""
        self.error = self.error or error
        self.done.set()


logger = logging.getLogger(__name__)

_HEADS = 6
_IN_FLIGHT = 3
_POLL_S = 0.02
_JOIN_S = 5.0
_ASK_S = 0.05


@dataclass(slots=True)
class _InFlight:
    """A chunk on its way in; `slot` None: into a scratch buffer."""

    chunk: int
    last: bool
    fingerprints: list[int]
    memory: torch.Tensor
    place: int
    relay_update: RelayUpdate | None
    pending: Work


class ChainRelay:
    """The threads of one member; from its construction until `close`."""

    def __init__(
        self,
        meeting: GroupRendezvous,
        group: PrivateGroup,
        info: GroupInfo,
        control: Control,
        slots: Sequence[torch.Tensor],
        run_nbytes: int,
    ) -> None:
        self.failure: WeightSyncError | None = None
        self._meeting = meeting
        self._group = group
        self._rank = info.rank
        self._size = len(info.members)
        self._members = info.members
        self._timeout_s = info.timeout_s
        self._control = control
        self._writer = RingWriter(control, pace=NETWORK)
        self._slots = list(slots)
        self._slot_nbytes = slots[0].numel()
        self._depth = min(_IN_FLIGHT, len(slots))
        self._scratch: list[torch.Tensor] = []
        room = runs_per_chunk(self._slot_nbytes, run_nbytes)
        self._heads = [ChunkHeader(room) for _ in range(_HEADS)]
        self._downstream = Downstream(group, info, self._cut_off)
        self._arriving: deque[_InFlight] = deque()
        self._changed = threading.Condition()
        self._wanted: RelayUpdate | None = None
        self._current: RelayUpdate | None = None
        self._epoch = 0
        self._closing = False
        self._progress = time.monotonic()
        self._asked = 0.0
        self._shown: list[int] = []
        self._thread = threading.Thread(target=self._run, name="weightsync-link", daemon=True)
        self._thread.start()
        self._heartbeat = Heartbeat(self._show_signs)
        end_at_exit(self)

    def take_in(self, relay_update: RelayUpdate) -> None:
        """Put the update that comes next into the ring. Raises what broke the group."""
        with self._changed:
            if self.failure is not None:
                raise self.failure
            if self._wanted is not None:
                self._wanted.fail(TransferError("another update took its place"))
            self._wanted, self._progress = relay_update, time.monotonic()
            self._changed.notify_all()

    def check(self, relay_update: RelayUpdate) -> None:
        """Raise why this update cannot be completed: an error, or no progress for too long."""
        if relay_update.error is not None:
            raise relay_update.error
        silent = time.monotonic() - self._progress
        if silent > self._timeout_s and not relay_update.done.is_set():
            raise TransferTimeout(
                f"{self._who(self._rank - 1)} sent nothing for {silent:.3g} s; the update is "
                "given up"
            )

    def end(self, timeout_s: float) -> None:
        """Leave the group, and wait that long for the threads to end. Idempotent.

        Either of them may be asking the store of a sender that is stopped.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._group.abort()
        self._heartbeat.close(max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def close(self, free: Callable[[], None]) -> None:
        """Leave the group, end the threads, and `free` what they used: later, if one ends late."""
        self.end(_JOIN_S)
        if self._heartbeat.ended and not self._thread.is_alive():
            self._let_go(free)
            return
        logger.warning("a thread of a private group does not end; its ring stays until it does")
        ended = threading.Thread(
            target=self._end_late, args=(free,), name="weightsync-late", daemon=True
        )
        ended.start()

    def _end_late(self, free: Callable[[], None]) -> None:
        self._heartbeat.close()
        self._thread.join()
        self._let_go(free)

    def _show_signs(self) -> None:
        """The sender sees none of this host's readers by itself, and a busy one may not answer."""
        signs = [self._control.signs(reader) for reader in range(self._control.readers)]
        if signs != self._shown:
            self._shown = signs
            self._meeting.show(self._rank, signs)

    def _let_go(self, free: Callable[[], None]) -> None:
        self._group.close()
        self._slots.clear()
        self._scratch.clear()
        self._downstream.forget()
        self._current = self._wanted = None
        # The frames of what ended it hold what was at work, and so the group's sockets.
        self.failure = TransferError("the private group was left")
        free()

    def _run(self) -> None:
        try:
            posted = self._post_head(0)
            turn = 0
            while True:
                head = self._heads[turn % _HEADS]
                self._from_before(posted)
                self._progress = time.monotonic()
                posted = self._post_head(turn + 1)
                self._downstream.send_head(turn % _HEADS, head.buffer)
                if head.leaves:
                    return self._leave()
                self._handle(head)
                turn += 1
        except TransferError as exc:
            self._end(exc if self._closing else self._meeting.report(exc))
        except WeightSyncError as exc:
            self._end(exc)
        except Exception as exc:  # noqa: BLE001 # whatever it is, who waits must hear of it
            self._end(TransferError(f"the private group's thread failed: {exc!r}"))

    def _leave(self) -> None:
        """Orderly: the next host is told before the connections end."""
        self._land(0)
        self._downstream.settle_all()
        self._closing = True
        self._end(TransferError("the sender left its private group"))

    def _end(self, error: WeightSyncError) -> None:
        if not self._closing:
            logger.info("epoch %d of the private group ends: %s", self._epoch, error)
        with self._changed:
            self.failure = error
            for relay_update in (self._current, self._wanted):
                if relay_update is not None and not relay_update.done.is_set():
                    relay_update.fail(error)
        self._arriving.clear()
        self._downstream.forget_chunks()
        self._group.abort()

    def _handle(self, head: ChunkHeader) -> None:
        if head.epoch != self._epoch:
            self._land(0)
            self._turn_to(head.epoch)
        if head.aborts:
            self._land(0)
            self._drop(TransferError("the update was given up by its sender"))
            # A next host that died is found now, not in the next update.
            self._downstream.settle_all()
            return
        if head.nbytes > self._slot_nbytes:
            raise ProtocolError(f"a chunk of {head.nbytes} bytes does not fit the ring")
        if head.nbytes == 0:
            self._complete(self._current)
            return
        self._accept(head)
        self._land(0 if head.last else self._depth - 1)

    def _accept(self, head: ChunkHeader) -> None:
        """Make the next chunk's room known to the rank before."""
        place = self._place(head)
        buffer = self._slots[place] if place >= 0 else self._scratch[-place - 1]
        # All of it: Gloo ends the process of whoever is sent more than it waits for.
        pending = self._receive(
            lambda: self._group.receive(buffer, self._rank - 1, data_lane(head.chunk))
        )
        self._arriving.append(
            _InFlight(
                chunk=head.chunk,
                last=head.last,
                fingerprints=head.fingerprints,
                memory=buffer[: head.nbytes],
                place=place,
                relay_update=self._current if place >= 0 else None,
                pending=pending,
            )
        )

    def _land(self, left: int) -> None:
        """Wait until only `left` chunks are on their way."""
        while len(self._arriving) > left:
            arrival = self._arriving.popleft()
            self._from_before(arrival.pending, self._timeout_s)
            self._progress = time.monotonic()
            relay_update = arrival.relay_update
            if relay_update is not None and relay_update.error is None:
                room = self._control.entries // self._control.slots
                self._control.write_fingerprints(arrival.place * room, arrival.fingerprints)
                self._writer.publish(arrival.chunk)
            self._downstream.send(arrival.place, arrival.memory, arrival.chunk)
            if arrival.last:
                self._complete(relay_update)

    def _turn_to(self, epoch: int) -> None:
        """The stream is at another update: find out what this host wants of it."""
        self._drop(TransferError("the sender went on to another update"))
        self._epoch = epoch
        deadline = time.monotonic() + self._patience(at_ring=True)
        while not self._awaits(epoch) and time.monotonic() < deadline:
            if self._meeting.given_up(epoch):  # outside the lock: the answer may take a while
                return
        with self._changed:
            wanted = self._wanted
            if wanted is None or wanted.epoch != epoch:
                return
            self._wanted = None
            self._current = wanted
        try:
            self._writer.follow(
                wanted.readers, len(wanted.sizes), epoch=wanted.epoch, base=wanted.base
            )
        except TransferError as exc:
            self._drop(exc)

    def _awaits(self, epoch: int) -> bool:
        """Wait a moment for word of this update or a later one; return whether there is any."""
        with self._changed:
            wanted = self._wanted
            if self._closing or (wanted is not None and wanted.epoch >= epoch):
                return True
            self._changed.wait(_POLL_S)
            return False

    def _drop(self, error: WeightSyncError) -> None:
        if self._current is not None and not self._current.done.is_set():
            self._current.fail(error)
        self._current = None

    def _place(self, head: ChunkHeader) -> int:
        """Return the slot of a chunk once it is free, or the scratch buffer as -1, -2."""
        relay_update = self._current
        if relay_update is not None and relay_update.error is None:
            try:
                self._check_fits(relay_update, head)
                slot = self._writer.acquire(
                    head.chunk,
                    check=self._watch(relay_update),
                    timeout_s=self._patience(at_ring=True),
                )
                self._downstream.settle(slot)
                return slot
            except WeightSyncError as exc:
                self._drop(exc)
        if not self._scratch:
            self._scratch = [torch.empty_like(self._slots[0]) for _ in range(_IN_FLIGHT)]
        place = -1 - head.chunk % _IN_FLIGHT
        self._downstream.settle(place)
        return place

    def _check_fits(self, relay_update: RelayUpdate, head: ChunkHeader) -> None:
        sizes = relay_update.sizes
        if head.chunk >= len(sizes) or head.nbytes != sizes[head.chunk]:
            raise ProtocolError(
                f"chunk {head.chunk + 1} has {head.nbytes} bytes, which is not how this host cuts "
                f"the model into {len(sizes)} chunks; both sides need one manifest and version"
            )

    def _watch(self, relay_update: RelayUpdate) -> Check:
        """Heartbeats of a reader that makes no progress must not outlast the rank before."""
        released, patience = self._control.released, self._patience(at_ring=True)
        done, moved = -1, time.monotonic()

        def check() -> None:
            nonlocal done, moved
            self._check_wanted(relay_update)
            now, total = time.monotonic(), sum(map(released, relay_update.readers))
            if total != done:
                done, moved = total, now
            if now - moved > patience:
                raise TransferTimeout(f"a reader of this host released nothing for {patience:g} s")

        return check

    def _last(self, relay_update: RelayUpdate) -> None:
        """Everything has come, so the rank before no longer waits while this host's readers do."""
        self._progress = time.monotonic()
        self._check_wanted(relay_update)

    def _check_wanted(self, relay_update: RelayUpdate) -> None:
        if relay_update.error is not None:
            raise relay_update.error
        if time.monotonic() - self._asked > _ASK_S:
            self._asked = time.monotonic()
            if self._closing or self._meeting.given_up(relay_update.epoch):
                raise TransferError("the update was given up by its sender")

    def _complete(self, relay_update: RelayUpdate | None) -> None:
        """Everything has come: it is read by all of this host, and sent on."""
        self._downstream.settle_chunks()
        if relay_update is None or relay_update is not self._current:
            return
        try:
            self._writer.drain(
                len(relay_update.sizes),
                check=lambda: self._last(relay_update),
                timeout_s=self._timeout_s,
            )
        except WeightSyncError as exc:
            relay_update.fail(exc)
        self._current = None
        relay_update.done.set()

    def _post_head(self, turn: int) -> Work:
        index = turn % _HEADS
        self._downstream.settle_head(index)
        buffer = self._heads[index].buffer
        return self._receive(lambda: self._group.receive(buffer, self._rank - 1, HEADER_LANE))

    def _receive(self, receive: Callable[[], Work]) -> Work:
        try:
            return receive()
        except TransferError as exc:
            raise self._lost(exc) from exc

    def _from_before(self, pending: Work, timeout_s: float | None = None) -> None:
        try:
            pending.wait(timeout_s)
        except TransferError as exc:
            raise self._lost(exc) from exc

    def _lost(self, exc: TransferError) -> TransferError:
        return type(exc)(f"{self._who(self._rank - 1)} is lost: {exc}")

    def _cut_off(self, exc: TransferError) -> None:
        """The next host takes no more: say so, and let nobody before it wait."""
        error = type(exc)(f"{self._who(self._rank + 1)} did not take what was sent to it: {exc}")
        if not self._closing:
            error = self._meeting.report(error)
        self.failure = error
        for relay_update in (self._current, self._wanted):
            if relay_update is not None:
                relay_update.fail(error)

    def _patience(self, *, at_ring: bool) -> float:
        return patience_s(self._timeout_s, self._rank, self._size, at_ring=at_ring)

    def _who(self, rank: int) -> str:
        return self._members[0] if rank == 0 else f"the host of {self._members[rank]}"
