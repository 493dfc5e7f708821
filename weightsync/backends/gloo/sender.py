"""The sending half of `gloo`: sends the chunks of an update through a chain of hosts."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from weightsync.backends.base import Check
from weightsync.backends.gloo.group import (
    HEADER_LANE,
    GroupRendezvous,
    PrivateGroup,
    Work,
    data_lane,
)
from weightsync.backends.gloo.header import (
    FIRST,
    ChunkHeader,
    HeaderBuffer,
    HeaderStatus,
    patience_s,
)
from weightsync.backends.gloo.payload import GroupInfo
from weightsync.backends.ipc.sender import IpcTrainerEngine
from weightsync.errors import (
    BackendUnavailableError,
    TransferError,
    TransferTimeout,
    WeightSyncError,
    shorten,
)
from weightsync.interpreter_exit import end_at_exit
from weightsync.shm.ring import RingReader
from weightsync.weights.layout import units_per_chunk

_IN_FLIGHT = 3


class RingFeed:
    """The chunks of one update, in the sender's own ring, which it reads as `reader`.

    Constructed after the engine's `begin`, used by the chain's thread alone. `chunks` has the bytes
    of each chunk. At most `depth` chunks may be taken and not yet done. `fingerprint_room` is the
    largest number of fingerprints of a chunk. Raises BackendUnavailableError for buckets on a GPU.
    """

    def __init__(self, engine: IpcTrainerEngine, reader: int) -> None:
        stream = engine.stream
        if stream.buckets[0].device.type != "cpu":
            device = stream.buckets[0].device
            raise BackendUnavailableError(
                f"the path gloo sends from host memory, and this ring is on {device}; take path "
                "shared_memory, which stages through the host"
            )
        layout = stream.layout
        self._stream = stream
        self._units = [chunk.last_unit - chunk.first_unit for chunk in layout.chunks]
        self._reader = RingReader(
            stream.control, reader, epoch=stream.epoch, base=stream.base, spin_s=0.0
        )
        engine.never_spin()
        self.epoch = stream.epoch
        self.depth = len(stream.buckets)
        self.chunks = [chunk.stop - chunk.start for chunk in layout.chunks]
        self.fingerprint_room = units_per_chunk(stream.buckets[0].numel(), layout.unit_nbytes)

    def take(self, j: int, check: Check) -> tuple[torch.Tensor, list[int]]:
        """Wait for chunk `j`; return it (`uint8[nbytes]`, its bucket) and its fingerprints.

        Valid until `done(j)`. Calls `check` during the wait, which raises to end it.
        """
        stream, control = self._stream, self._stream.control
        bucket = self._reader.wait(j, check=check, timeout_s=stream.timeout_s)
        room = control.entries // control.slots
        count = self._units[j] if stream.verify else 0
        return stream.buckets[bucket][: self.chunks[j]], control.fingerprints(bucket * room, count)

    def done(self, j: int) -> None:
        """Release chunk `j` after it was sent; its memory may be overwritten."""
        self._reader.release(j)


class _Stopped(TransferError):
    """The update was aborted by its sender."""


class ChainSender:
    """Sends one update to rank 1, in a thread."""

    def __init__(
        self,
        group: PrivateGroup,
        feed: RingFeed,
        first: str,
        timeout_s: float,
        report: Callable[[TransferError], TransferError],
    ) -> None:
        self._report = report
        self.error: WeightSyncError | None = None
        self.broke = False
        self.stop = threading.Event()
        self.ended = threading.Event()
        self._group = group
        self._feed = feed
        self._headers = [HeaderBuffer(feed.fingerprint_room) for _ in range(_IN_FLIGHT + 1)]
        self._first = first
        self._timeout_s = timeout_s
        self._in_flight: deque[tuple[int, list[Work]]] = deque()
        self.thread = threading.Thread(target=self._run, name="weightsync-chain", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._send_all()
        except WeightSyncError as exc:
            self.error = exc
            self._abort()
        except Exception as exc:  # noqa: BLE001 # a feed may raise any error
            self.error = TransferError(f"the chunks of this update could not be read: {exc!r}")
            self._abort()
        finally:
            self._in_flight.clear()
            self.ended.set()

    def _send_all(self) -> None:
        chunks = self._feed.chunks
        depth = min(_IN_FLIGHT, self._feed.depth)
        for j, nbytes in enumerate(chunks):
            self._check()
            data, fingerprints = self._feed.take(j, self._check)
            header = self._headers[j % len(self._headers)]
            epoch = self._feed.epoch
            header.write(
                ChunkHeader(HeaderStatus.CHUNK, epoch, j, len(chunks), nbytes, fingerprints)
            )
            pending: list[Work] = []
            self._in_flight.append((j, pending))
            pending.append(self._send(header.memory, HEADER_LANE))
            pending.append(self._send(data, data_lane(j)))
            while len(self._in_flight) >= depth:
                self._await_oldest()
        while self._in_flight:
            self._await_oldest()
        if not chunks:
            self._send_status(HeaderStatus.CHUNK)

    def _await_oldest(self) -> None:
        j, pending = self._in_flight.popleft()
        try:
            for work in pending:
                work.wait(self._timeout_s)
        except Exception as exc:
            self.broke = True
            kind = type(exc) if isinstance(exc, TransferError) else TransferError
            error = kind(f"the host of {self._first} did not take chunk {j + 1}: {exc}")
            raise self._report(error) from exc
        self._feed.done(j)

    def _abort(self) -> None:
        """Send ABORT to the members, after the chunks in flight."""
        if self.broke:
            return
        try:
            while self._in_flight:
                for work in self._in_flight.popleft()[1]:
                    work.wait(self._timeout_s)
            self._send_status(HeaderStatus.ABORT)
        except Exception as exc:  # noqa: BLE001  # any error: ABORT was not sent
            self.broke = True
            self.error = self._report(TransferError(f"the host of {self._first} is lost: {exc}"))

    def _send_status(self, status: HeaderStatus) -> None:
        header = self._headers[0]
        header.write(ChunkHeader(status, self._feed.epoch))
        self._send(header.memory, HEADER_LANE).wait(self._timeout_s)

    def _send(self, memory: torch.Tensor, lane: int) -> Work:
        """Start a send. Any error breaks the group: the peer waits for bytes that are not sent."""
        try:
            return self._group.send(memory, FIRST, lane)
        except Exception as exc:
            self.broke = True
            error = TransferError(f"the host of {self._first} cannot be reached: {exc}")
            raise self._report(error) from exc

    def _check(self) -> None:
        if self.stop.is_set():
            raise _Stopped("the update was aborted by its sender")


SENDER = "the sender"
_CHECK_S = 0.05
_SIGNS_S = 0.2
_LEAVE_S = 1.0


class Chain:
    """Rank 0 of one private group. `members` has the names of rank 1 and up, for messages.

    The members connect to `address` of this host. The store listens when the constructor returns;
    `join` completes the group. Each update is `start`, then `finish` or `stop`. A `broken` chain is
    closed, and replaced by one with a higher `epoch`. Raises ConnectError when `address` is no
    address of this host.
    """

    def __init__(
        self,
        address: str,
        members: Sequence[str],
        *,
        epoch: int,
        timeout_s: float,
    ) -> None:
        self.epoch = epoch
        self.members = [SENDER, *members]
        self._timeout_s = timeout_s
        self._rendezvous: GroupRendezvous | None = GroupRendezvous.host(
            address, epoch=epoch, timeout_s=timeout_s
        )
        self._address, self._port = address, self._rendezvous.port
        self._group: PrivateGroup | None = None
        self._sending: ChainSender | None = None
        self._update: int | None = None
        self._checked_at = self._queried_at = 0.0
        self._signs: list[list[int]] = [[] for _ in self.members]
        self._failure: WeightSyncError | None = None
        self._closed = threading.Event()
        end_at_exit(self)

    def info(self, rank: int) -> GroupInfo:
        """Return the information that member `rank` needs to join."""
        return GroupInfo(
            address=self._address,
            port=self._port,
            epoch=self.epoch,
            rank=rank,
            members=self.members,
            timeout_s=self._timeout_s,
        )

    def join(self) -> None:
        """Wait until all members have joined. Called while their init messages are in flight.

        Raises TransferTimeout that names the missing members, TransferError when the chain was
        closed.
        """
        try:
            self._join()
        except WeightSyncError as exc:
            self._failure = exc
            raise

    def absent(self) -> list[int]:
        """Return the ranks that have not entered the group yet."""
        rendezvous = self._rendezvous
        return rendezvous.missing(range(FIRST, len(self.members))) if rendezvous else []

    @property
    def broken(self) -> bool:
        """Whether the group is broken, so that no further update can be sent."""
        return self.failure is not None

    @property
    def failure(self) -> WeightSyncError | None:
        """The first published error that broke the group; None while it works."""
        if self._failure is None and self._rendezvous is not None:
            reported = self._rendezvous.reported()
            if reported is not None:
                self._failure = reported
        return self._failure

    def signs(self, rank: int, reader: int) -> int | None:
        """Return a value that grows while a reader of a rank's host works; None if unknown."""
        rendezvous = self._rendezvous
        if rendezvous is not None and time.monotonic() - self._queried_at > _SIGNS_S:
            self._queried_at = time.monotonic()
            self._signs = [rendezvous.signs(rank) for rank in range(len(self.members))]
        shown = self._signs[rank]
        return shown[reader] if reader < len(shown) else None

    def start(self, feed: RingFeed) -> None:
        """Start to send an update's chunks, in a thread. Raises TransferError when broken."""
        failure = self.failure
        if self._group is None or failure is not None:
            raise failure or TransferError("the private group is not joined")
        self._update = feed.epoch
        patience = patience_s(self._timeout_s, 0, len(self.members))
        self._sending = ChainSender(self._group, feed, self.members[FIRST], patience, self._report)

    def check(self) -> None:
        """Raise the error of the update in progress. Cheap: called in every wait."""
        sending = self._sending
        if sending is not None and sending.error is not None:
            raise sending.error
        if time.monotonic() - self._checked_at > _CHECK_S:
            self._checked_at = time.monotonic()
            self._raise_failure()

    def finish(self, check: Check) -> None:
        """Wait until every chunk is sent to rank 1. Raises an error that names the failed host."""
        sending = self._sending
        if sending is None:
            return
        while not sending.ended.wait(_CHECK_S):
            check()
            self._raise_failure()
        self._settle(sending)
        self._raise_failure()
        if sending.error is not None:
            raise sending.error

    def stop(self) -> None:
        """Abort the update. The abort is sent in band, so that the group stays usable.

        Returns within the timeout; afterwards the chain may be broken.
        """
        if self._rendezvous is not None and self._update is not None:
            self._rendezvous.give_up(self._update)
        sending = self._sending
        if sending is None:
            return
        sending.stop.set()
        if not sending.ended.wait(self._timeout_s):
            self._failure = self._failure or TransferTimeout(
                f"the host of {self.members[FIRST]} took nothing for {self._timeout_s:g} s"
            )
            self._abort_connections()
        self._settle(sending)

    def end(self, timeout_s: float) -> None:
        """Leave the group, and wait at most `timeout_s` for its thread to end. Idempotent."""
        if not self._closed.is_set():
            self._send_leave()
        self._closed.set()
        self._failure = self._failure or TransferError("the private group was closed")
        sending = self._sending
        if sending is not None:
            sending.stop.set()
        self._abort_connections()
        if sending is not None:
            sending.thread.join(timeout_s)
        if self._rendezvous is not None:
            self._rendezvous.end()

    def close(self) -> None:
        """Leave the group at once; waits of its members fail. Idempotent."""
        self.end(timeout_s=0.0)
        if self._sending is not None:
            self._settle(self._sending)
        if self._group is not None:
            self._group.close()
        self._group = None
        rendezvous, self._rendezvous = self._rendezvous, None
        if rendezvous is not None:
            rendezvous.close()

    def _abort_connections(self) -> None:
        if self._group is not None:
            self._group.abort()

    def _send_leave(self) -> None:
        """Send LEAVE, so that members do not report the end of the group as a failure."""
        if self._group is None or self._sending is not None or self.broken:
            return
        header = HeaderBuffer(0)  # shorter than the posted receives, which Gloo allows
        header.write(ChunkHeader(HeaderStatus.LEAVE, 0))
        with suppress(TransferError):
            self._group.send(header.memory, FIRST, HEADER_LANE).wait(_LEAVE_S)

    def _join(self) -> None:
        rendezvous = self._rendezvous
        if rendezvous is None:
            raise TransferError("the private group was closed")
        size = len(self.members)
        ranks = list(range(FIRST, size))
        missing = rendezvous.gather(ranks, self._timeout_s, given_up=self._closed.is_set)
        if self._closed.is_set():
            raise TransferError("the private group was closed while its members joined")
        if missing:
            names = shorten(self.members[rank] for rank in missing)
            raise TransferTimeout(
                f"{len(missing)} of {len(ranks)} hosts did not join the private group at "
                f"{self._address}:{self._port} within {self._timeout_s:g} s: {names}; can they "
                "reach this address?"
            )
        self._group = PrivateGroup(rendezvous, 0, size, self._timeout_s)
        if self._closed.is_set():
            self._group.close()
            raise TransferError("the private group was closed while its members joined")

    def _settle(self, sending: ChainSender) -> None:
        """Wait for the thread to end, and keep the error that broke the group."""
        sending.thread.join()
        if sending.broke and self._failure is None:
            self._failure = self.failure or sending.error
        self._sending = None

    def _report(self, error: TransferError) -> TransferError:
        rendezvous = self._rendezvous
        return error if self._closed.is_set() or rendezvous is None else rendezvous.report(error)

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure
