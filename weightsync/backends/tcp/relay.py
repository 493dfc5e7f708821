"""A receiving host: takes chunks from another host, fills its ring, and serves the next hosts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from weightsync.backends.tcp.carrier import Carrier
from weightsync.backends.tcp.connection import Check, Connection, Frame, FrameKind, Request
from weightsync.backends.tcp.payload import Membership, Peer
from weightsync.backends.tcp.server import ChunkServer, family_of
from weightsync.backends.tcp.window import ChunkWindow
from weightsync.errors import (
    ConnectError,
    ProtocolError,
    SourceLostError,
    TransferError,
    TransferTimeout,
    WeightSyncError,
)
from weightsync.runtime.interpreter_exit import end_at_exit
from weightsync.shm.addresses import source_address
from weightsync.shm.ring import Control, RingWriter
from weightsync.shm.wait import Heartbeat

logger = logging.getLogger(__name__)

_JOIN_S = 5.0
_SHORTEST_PATIENCE_S = 1.0
_READER_TIMEOUT_FACTOR = 2
"""The sender gives up a reader that is silent after its timeout, and says so, before this host."""


def patience_of(timeout_s: float) -> float:
    """Return how long a silent host is waited for: others have time to take its place.

    Both ends show four times a second that they live.
    """
    return max(timeout_s / 4, _SHORTEST_PATIENCE_S)


def hold_of(patience_s: float) -> float:
    """Return how long a window waits for the nearest follower, which may try others before."""
    return 3 * patience_s


@dataclass(slots=True, eq=False)
class RelayUpdate:
    """One update of a HostRelay.

    `sizes` are the bytes of the chunks, `base` the ring's sequence number before the update,
    `readers` those of the ring; `sources` and `followers` as in RelayedUpdate. `left_out` are the
    chunks whose bytes do not come. `done` is set when all others are in the ring, or with `error`
    set.
    """

    epoch: int
    base: int
    readers: Sequence[int]
    sizes: Sequence[int]
    sources: Sequence[Peer]
    followers: Sequence[int]
    left_out: Container[int] = ()
    done: threading.Event = field(default_factory=threading.Event)
    error: WeightSyncError | None = None

    def fail(self, error: WeightSyncError) -> None:
        """End the update with `error`, unless it has an error already."""
        self.error = self.error or error
        self.done.set()


class _Ended(TransferError):
    """This process's update ended, or the relay is closed: nothing more is to be received."""


class HostRelay:
    """Receives the updates of one sender for a host, in a thread, from construction to `close`.

    A source that dies, falls silent or fails is left, and the next one asked for the chunks that
    are missing: no chunk is received twice. An update that fails in this process is no failure of
    the hosts that read from it, which go to other sources. Raises ConnectError where the sender
    cannot be reached.
    """

    def __init__(
        self,
        membership: Membership,
        control: Control,
        buckets: Sequence[torch.Tensor],
        carrier: Carrier,
    ) -> None:
        self._carrier = carrier
        self._place = membership.place
        self._secret = bytes.fromhex(membership.secret)
        self._timeout_s = membership.timeout_s
        self._patience_s = patience_of(membership.timeout_s)
        self._reader_timeout_s = _READER_TIMEOUT_FACTOR * membership.timeout_s
        self._control = control
        self._writer = RingWriter(control, spin_s=0.0)
        self._buckets = [bucket.numpy().data for bucket in buckets]
        self._kept = list(buckets)
        self._zeros = memoryview(bytes(buckets[0].numel()))
        self._changed = threading.Condition()
        self._submitted: RelayUpdate | None = None
        self._lost_readers: set[tuple[int, int]] = set()
        self._closing = False
        self._progress = time.monotonic()
        self._connection: Connection | None = None
        self._peer: Peer | None = None
        sender = self._sender = membership.sender
        try:
            self._alive = self._open(sender)
        except (TransferError, ProtocolError) as exc:
            raise ConnectError(f"the sender cannot be reached: {exc}") from exc
        try:
            address = source_address(sender.address, family=family_of(sender.address))
            self.window = ChunkWindow(len(buckets), hold_of(self._patience_s))
            self._server = ChunkServer(
                address, self._secret, self.window, self._patience_s, carrier
            )
        except OSError as exc:
            self._alive.close()
            raise ConnectError(f"there is no route from this host to the sender: {exc}") from exc
        except BaseException:
            self._alive.close()
            raise
        self.address, self.port = address, self._server.port
        self._thread = threading.Thread(target=self._run, name="weightsync-link", daemon=True)
        self._thread.start()
        self._heartbeat = Heartbeat(self._beat)
        end_at_exit(self)

    @property
    def sender_alive(self) -> bool:
        """Whether the connection to the sender's process is open."""
        return self._alive.is_open

    def submit(self, update: RelayUpdate) -> None:
        """Receive the next update into the ring. Raises TransferError after `close`."""
        with self._changed:
            if self._closing:
                raise TransferError("the relay of this host was closed")
            if self._submitted is not None:
                self._submitted.fail(TransferError("another update replaced it"))
            self._submitted, self._progress = update, time.monotonic()
            self._changed.notify_all()

    def check(self, update: RelayUpdate) -> None:
        """Raise the update's error, or TransferTimeout after `timeout_s` without progress."""
        if update.error is not None:
            raise update.error
        connection = self._connection
        heard_at = self._progress if connection is None else connection.heard_at
        silent = time.monotonic() - max(self._progress, heard_at)
        if silent > self._timeout_s and not update.done.is_set():
            raise TransferTimeout(
                f"no chunk came from {_named(self._peer)} for {silent:.3g} s; the update is aborted"
            )

    def end(self, timeout_s: float) -> None:
        """End the threads, and wait at most `timeout_s` for them. Idempotent."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            if self._submitted is not None:
                self._submitted.fail(TransferError("the relay of this host was closed"))
            self._changed.notify_all()
        self.window.close()
        self._server.close()
        connection = self._connection
        if connection is not None:
            connection.cut()
        self._alive.cut()
        self._heartbeat.close(max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def close(self, free: Callable[[], None]) -> None:
        """End the threads, and call `free`: later, if the thread ends late. Idempotent."""
        self.end(_JOIN_S)
        if not self._thread.is_alive():
            self._release(free)
            return
        logger.warning("the thread of a host's relay still runs; its ring stays until it ends")
        threading.Thread(
            target=self._end_late, args=(free,), name="weightsync-late", daemon=True
        ).start()

    def _end_late(self, free: Callable[[], None]) -> None:
        self._thread.join()
        self._release(free)

    def _release(self, free: Callable[[], None]) -> None:
        self._leave_source()
        self._alive.close()
        for bucket in self._buckets:
            bucket.release()
        self._buckets.clear()
        self._kept.clear()
        free()

    def _beat(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.send_heartbeat()
        control, alive = self._control, self._alive
        alive.send_liveness([control.liveness(reader) for reader in range(control.readers)])
        with suppress(ProtocolError):
            while (frame := alive.poll_frame()) is not None:
                if frame.kind is FrameKind.LOST:
                    self.window.lose(frame.chunk, frame.epoch)
                elif frame.kind is FrameKind.READER_LOST:
                    self._lose_reader(frame.chunk, frame.epoch)
        lost = not alive.is_open
        if lost != control.sender_lost:
            control.sender_lost = int(lost)

    def _lose_reader(self, reader: int, epoch: int) -> None:
        """Do not wait in update `epoch`, which may begin later, for a reader of the ring."""
        with self._changed:
            self._lost_readers.add((epoch, reader))
            if epoch == self._control.epoch:
                self._control.active = self._without_lost(self._control.active, epoch)

    def _without_lost(self, readers: Sequence[int], epoch: int) -> tuple[int, ...]:
        return tuple(reader for reader in readers if (epoch, reader) not in self._lost_readers)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._submitted is None and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                update = self._submitted
            if update is not None:
                self._relay(update)
            with self._changed:
                if self._submitted is update:
                    self._submitted = None

    def _keep_alive(self) -> None:
        """Connect to the sender again, if that connection was lost in between."""
        if not self._alive.is_open:
            with suppress(TransferError, ProtocolError):
                lost, self._alive = self._alive, self._open(self._sender)
                lost.close()

    def _relay(self, update: RelayUpdate) -> None:
        try:
            self._keep_alive()
            with self._changed:
                self._lost_readers = {
                    lost for lost in self._lost_readers if lost[0] >= update.epoch
                }
                readers = self._without_lost(update.readers, update.epoch)
                chunks = len(update.sizes)
                self._writer.follow(readers, chunks, epoch=update.epoch, base=update.base)
            self.window.begin(update.epoch, len(update.sizes), [update.followers])
            self._receive_all(update)
        except WeightSyncError as exc:
            self._give_up(update, exc)
        except Exception as exc:  # noqa: BLE001 # callers that wait must get any error
            self._give_up(update, TransferError(f"the relay of this host failed: {exc!r}"))
        else:
            update.done.set()
            self._ask(update.epoch, 0, is_next=True)

    def _give_up(self, update: RelayUpdate, error: WeightSyncError) -> None:
        self.window.fail()
        self._leave_source()  # it may be in the middle of a chunk
        update.fail(error)
        # The other receivers of this host, whom no request may reach before theirs is answered. The
        # sender's own ring skips an epoch too, so that the next update has a later one.
        self._control.epoch = max(self._control.epoch, update.epoch + 1)

    def _receive_all(self, update: RelayUpdate) -> None:
        chunk = 0
        problems: list[str] = []
        sources = list(update.sources)
        if self._peer != (sources[0] if sources else None):
            self._leave_source()
        is_kept = self._connection is not None
        while chunk < len(update.sizes):
            if not sources:
                raise SourceLostError(
                    f"no host has chunk {chunk + 1} of this update: {'; '.join(problems)}"
                )
            try:
                if self._connection is None:
                    self._connect(
                        sources[0], update.epoch, chunk, lambda: self._check_wanted(update)
                    )
                while chunk < len(update.sizes):
                    chunk = self._receive(update, chunk)
                    is_kept = False
            except _Ended:
                raise
            except (TransferError, ProtocolError) as exc:
                if update.error is not None:
                    raise
                self._leave_source()
                self._progress = time.monotonic()  # the next connection has its own time
                if is_kept:  # since the last update, and broken meanwhile, perhaps
                    is_kept = False
                    continue
                problems.append(f"{_named(sources.pop(0))}: {exc}")
                logger.info("chunk %d: %s", chunk + 1, problems[-1])

    def _receive(self, update: RelayUpdate, chunk: int) -> int:
        """Receive frames up to the next chunk; return the number of the chunk after it."""
        connection = self._connection
        if connection is None:
            raise TransferError("the connection was closed")

        def check() -> None:
            self._check_wanted(update)

        while True:
            frame = connection.next_frame(check)
            self._progress = time.monotonic()
            if frame.kind is FrameKind.WAITING:
                check()
            elif frame.epoch < update.epoch:
                self._skip(connection, frame, check)  # of an update that was given up
                if frame.kind is not FrameKind.CHUNK or frame.chunk + 1 == frame.chunks:
                    connection.send_request(Request(update.epoch, chunk, is_next=False))
            else:
                break

        def check_own() -> None:  # the source waits, and not this host for the source
            self._progress = time.monotonic()
            check()

        self._check_frame(frame, update, chunk)
        fingerprints = connection.read_fingerprints(frame, check)
        self.window.make_room(chunk, check_own)
        slot = self._writer.acquire(chunk, check=check_own, timeout_s=self._reader_timeout_s)
        data = self._buckets[slot][: frame.nbytes]
        self._carrier.receive(connection, frame, data, check)
        rest = 0 if chunk in update.left_out else update.sizes[chunk] - frame.nbytes
        if rest:  # zeros at the end of a chunk are not sent
            self._buckets[slot][frame.nbytes : frame.nbytes + rest] = self._zeros[:rest]
        self._control.write_fingerprints(slot * self._control.room, fingerprints)
        self._writer.publish(chunk)
        self.window.offer(chunk, data, fingerprints)
        self._progress = time.monotonic()
        return chunk + 1

    def _skip(self, connection: Connection, frame: Frame, check: Check) -> None:
        connection.read_fingerprints(frame, check)
        if frame.kind is FrameKind.CHUNK:
            self._carrier.skip(connection, frame, check)

    def _check_frame(self, frame: Frame, update: RelayUpdate, chunk: int) -> None:
        if frame.kind is FrameKind.ABORTED:
            self.window.abort()
            error = TransferError("the update was aborted by its sender")
            update.fail(error)
            raise error
        if frame.kind is FrameKind.FAILED:
            raise TransferError("its own update failed")
        if frame.kind is FrameKind.GONE:
            raise TransferError("it has this chunk no more")
        expected = Frame(
            FrameKind.CHUNK,
            update.epoch,
            chunk,
            len(update.sizes),
            min(frame.nbytes, update.sizes[chunk]),
            frame.num_fingerprints,
        )
        if frame != expected or frame.num_fingerprints > self._control.room:
            raise ProtocolError(f"it sends {frame}, where {expected} comes next")

    def _check_wanted(self, update: RelayUpdate) -> None:
        self._check_open()
        if update.error is not None:
            raise _Ended(str(update.error))

    def _connect(self, source: Peer, epoch: int, chunk: int, check: Check) -> None:
        connection = self._open(source)
        self._connection, self._peer = connection, source
        self._ask(epoch, chunk, is_next=False)
        self._carrier.receive_metadata(connection, check)

    def _ask(self, epoch: int, chunk: int, *, is_next: bool) -> None:
        connection = self._connection
        try:
            if connection is not None:
                connection.send_request(Request(epoch, chunk, is_next))
        except TransferError:
            self._leave_source()
            if not is_next:
                raise

    def _leave_source(self) -> None:
        connection, self._connection, self._peer = self._connection, None, None
        if connection is not None:
            self._carrier.leave(connection)
            connection.close()

    def _open(self, peer: Peer) -> Connection:
        return Connection.open(
            peer.address,
            peer.port,
            self._secret,
            self._place,
            self._patience_s,
            self._check_open,
        )

    def _check_open(self) -> None:
        if self._closing:
            raise _Ended("the relay of this host was closed")


def _named(peer: Peer | None) -> str:
    if peer is None:
        return "any host"
    return "the sender" if peer.place < 0 else f"the host of {peer.name}"
