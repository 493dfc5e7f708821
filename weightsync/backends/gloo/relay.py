"""A receiving host in the chain: relays chunks from the previous rank to its ring and the next."""

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
)
from weightsync.backends.gloo.header import ChunkHeader, HeaderBuffer, HeaderStatus, patience_s
from weightsync.backends.gloo.payload import GroupInfo
from weightsync.errors import ProtocolError, TransferError, TransferTimeout, WeightSyncError
from weightsync.interpreter_exit import end_at_exit
from weightsync.shm.ring import Control, RingWriter
from weightsync.shm.wait import Heartbeat
from weightsync.weights.layout import units_per_chunk


class Downstream:
    """Sends headers and chunks to the next host. Used by the relay's thread alone.

    The memory of a send is in use until `wait`. Nothing is sent without a next host, and after a
    failed send, which is passed to `on_failure`.
    """

    def __init__(
        self,
        group: PrivateGroup,
        info: GroupInfo,
        on_failure: Callable[[TransferError], None],
    ) -> None:
        self._group = group
        self._next = info.rank + 1
        self._is_sending = self._next < len(info.members)
        self._patience_s = patience_s(info.timeout_s, info.rank, len(info.members))
        self._on_failure = on_failure
        self._sent: dict[int, Work] = {}  # by the address of the memory

    def send(self, memory: torch.Tensor, lane: int) -> None:
        """Send a header or a chunk, `uint8[nbytes]`."""
        if not self._is_sending:
            return
        try:
            self._sent[memory.data_ptr()] = self._group.send(memory, self._next, lane)
        except TransferError as exc:
            self._stop(exc)

    def wait(self, memory: torch.Tensor) -> None:
        """Wait until what was sent from this memory is sent, or failed."""
        self._wait(memory.data_ptr())

    def wait_all(self) -> None:
        """Wait until all headers and chunks are sent, or failed."""
        for address in list(self._sent):
            self._wait(address)

    def forget(self) -> None:
        """Drop all sends, and `on_failure` with them. Called when the group breaks or is closed."""
        self._sent.clear()
        self._on_failure = _ignore  # breaks a reference cycle, so that memory is freed at once

    def _wait(self, address: int) -> None:
        pending = self._sent.pop(address, None)
        if pending is None or not self._is_sending:
            return
        try:
            pending.wait(self._patience_s)
        except TransferError as exc:
            self._stop(exc)

    def _stop(self, exc: TransferError) -> None:
        self._is_sending = False
        self._on_failure(exc)


def _ignore(exc: TransferError) -> None:
    pass


@dataclass(slots=True, eq=False)
class RelayUpdate:
    """One update of a ChainRelay: `sizes` of the chunks in bytes, `readers` of the ring, `base`.

    `base` is the ring's sequence number before the update. `done` is set when all chunks were read
    on this host and sent to the next one, or with `error` set.
    """

    epoch: int
    base: int
    readers: Sequence[int]
    sizes: Sequence[int]
    done: threading.Event = field(default_factory=threading.Event)
    error: WeightSyncError | None = None

    def fail(self, error: WeightSyncError) -> None:
        """End the update with `error`, unless it has an error already."""
        self.error = self.error or error
        self.done.set()


logger = logging.getLogger(__name__)

_HEADERS = 6
_IN_FLIGHT = 3
_POLL_S = 0.02
_JOIN_S = 5.0
_QUERY_S = 1.0


@dataclass(slots=True)
class _InFlight:
    """A chunk that is being received, for `relay_update` into a bucket, else to scratch memory."""

    header: ChunkHeader
    memory: torch.Tensor
    bucket: int
    relay_update: RelayUpdate | None
    pending: Work


class ChainRelay:
    """Relays chunks in a thread, from its construction until `close`; one per member."""

    def __init__(
        self,
        rendezvous: GroupRendezvous,
        group: PrivateGroup,
        info: GroupInfo,
        control: Control,
        buckets: Sequence[torch.Tensor],
        unit_nbytes: int,
    ) -> None:
        self.failure: WeightSyncError | None = None
        self._rendezvous = rendezvous
        self._group = group
        self._rank = info.rank
        self._size = len(info.members)
        self._members = info.members
        self._timeout_s = info.timeout_s
        self._control = control
        self._writer = RingWriter(control, spin_s=0.0)
        self._buckets = list(buckets)
        self._bucket_nbytes = buckets[0].numel()
        self._depth = min(_IN_FLIGHT, len(buckets))
        self._scratch: list[torch.Tensor] = []
        room = units_per_chunk(self._bucket_nbytes, unit_nbytes)
        self._headers = [HeaderBuffer(room) for _ in range(_HEADERS)]
        self._downstream = Downstream(group, info, self._next_failed)
        self._arriving: deque[_InFlight] = deque()
        self._changed = threading.Condition()
        self._submitted: RelayUpdate | None = None
        self._current: RelayUpdate | None = None
        self._epoch = 0
        self._closing = False
        self._progress = time.monotonic()
        self._queried_at = 0.0
        self._published_signs: list[int] = []
        self._thread = threading.Thread(target=self._run, name="weightsync-link", daemon=True)
        self._thread.start()
        self._heartbeat = Heartbeat(self._publish_signs)
        end_at_exit(self)

    def submit(self, relay_update: RelayUpdate) -> None:
        """Write the next update into the ring. Raises the error that broke the group."""
        with self._changed:
            if self.failure is not None:
                raise self.failure
            if self._submitted is not None:
                self._submitted.fail(TransferError("another update replaced it"))
            self._submitted, self._progress = relay_update, time.monotonic()
            self._changed.notify_all()

    def check(self, relay_update: RelayUpdate) -> None:
        """Raise the update's error, or TransferTimeout after `timeout_s` without progress."""
        if relay_update.error is not None:
            raise relay_update.error
        silent = time.monotonic() - self._progress
        if silent > self._timeout_s and not relay_update.done.is_set():
            raise TransferTimeout(
                f"{self._name_of(self._rank - 1)} sent nothing for {silent:.3g} s; the update is "
                "aborted"
            )

    def end(self, timeout_s: float) -> None:
        """Leave the group, and wait at most `timeout_s` for the threads to end. Idempotent.

        A thread may be in a call to the store of a sender that is stopped.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._group.abort()
        self._heartbeat.close(max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def close(self, free: Callable[[], None]) -> None:
        """Leave the group, end the threads, and call `free`: later, if a thread ends late."""
        self.end(_JOIN_S)
        if self._heartbeat.ended and not self._thread.is_alive():
            self._release(free)
            return
        logger.warning("a thread of a private group still runs; its ring stays until it ends")
        ended = threading.Thread(
            target=self._end_late, args=(free,), name="weightsync-late", daemon=True
        )
        ended.start()

    def _end_late(self, free: Callable[[], None]) -> None:
        self._heartbeat.close()
        self._thread.join()
        self._release(free)

    def _publish_signs(self) -> None:
        """Publish the signs of life of this host's readers, which the sender cannot observe."""
        signs = [self._control.liveness(reader) for reader in range(self._control.readers)]
        if signs != self._published_signs:
            self._published_signs = signs
            self._rendezvous.show(self._rank, signs)

    def _release(self, free: Callable[[], None]) -> None:
        self._group.close()
        self._buckets.clear()
        self._scratch.clear()
        self._current = self._submitted = None
        # The frames of the previous error refer to operations, and so to the group's sockets.
        self.failure = TransferError("the private group was left")
        free()

    def _run(self) -> None:
        try:
            posted = self._post_header(0)
            count = 0
            while True:
                buffer = self._headers[count % _HEADERS]
                self._await_previous(posted)
                self._progress = time.monotonic()
                posted = self._post_header(count + 1)
                self._downstream.send(buffer.memory, HEADER_LANE)
                header = buffer.read()
                if header.status == HeaderStatus.LEAVE:
                    return self._leave()
                self._handle(header)
                count += 1
        except TransferError as exc:
            self._end(exc if self._closing else self._rendezvous.report(exc))
        except WeightSyncError as exc:
            self._end(exc)
        except Exception as exc:  # noqa: BLE001 # callers that wait must get any error
            self._end(TransferError(f"the private group's thread failed: {exc!r}"))

    def _leave(self) -> None:
        """Leave after LEAVE was sent to the next host, so that it does not see an error."""
        self._await_chunks(0)
        self._downstream.wait_all()
        self._closing = True
        self._end(TransferError("the sender left its private group"))

    def _end(self, error: WeightSyncError) -> None:
        if not self._closing:
            logger.info("epoch %d of the private group ends: %s", self._epoch, error)
        with self._changed:
            self.failure = error
            for relay_update in (self._current, self._submitted):
                if relay_update is not None and not relay_update.done.is_set():
                    relay_update.fail(error)
        self._arriving.clear()
        self._downstream.forget()
        self._group.abort()

    def _handle(self, header: ChunkHeader) -> None:
        if header.epoch != self._epoch:
            self._await_chunks(0)
            self._begin_epoch(header.epoch)
        if header.status == HeaderStatus.ABORT:
            self._await_chunks(0)
            self._drop(TransferError("the update was aborted by its sender"))
            # Detects a next host that died now, not in the next update.
            self._downstream.wait_all()
            return
        if header.nbytes > self._bucket_nbytes:
            raise ProtocolError(f"a chunk of {header.nbytes} bytes does not fit the ring")
        if header.nbytes == 0:
            self._complete(self._current)
            return
        self._accept(header)
        self._await_chunks(0 if header.last else self._depth - 1)

    def _accept(self, header: ChunkHeader) -> None:
        """Post the receive of a chunk, into a free bucket or a scratch buffer."""
        bucket = self._free_bucket(header)
        if bucket is not None:
            buffer = self._buckets[bucket]
        else:
            self._scratch = self._scratch or [
                torch.empty_like(self._buckets[0]) for _ in range(_IN_FLIGHT)
            ]
            buffer = self._scratch[header.chunk % _IN_FLIGHT]
        self._downstream.wait(buffer)
        # The whole buffer: Gloo ends a process that is sent more bytes than it waits for.
        pending = self._receive(buffer, data_lane(header.chunk))
        self._arriving.append(
            _InFlight(
                header=header,
                memory=buffer[: header.nbytes],
                bucket=bucket or 0,
                relay_update=None if bucket is None else self._current,
                pending=pending,
            )
        )

    def _await_chunks(self, left: int) -> None:
        """Wait until at most `left` chunks are being received."""
        while len(self._arriving) > left:
            arrival = self._arriving.popleft()
            self._await_previous(arrival.pending, self._timeout_s)
            self._progress = time.monotonic()
            header, relay_update = arrival.header, arrival.relay_update
            if relay_update is not None and relay_update.error is None:
                room = self._control.entries // self._control.slots
                self._control.write_fingerprints(arrival.bucket * room, header.fingerprints)
                self._writer.publish(header.chunk)
            self._downstream.send(arrival.memory, data_lane(header.chunk))
            if header.last:
                self._complete(relay_update)

    def _begin_epoch(self, epoch: int) -> None:
        """Begin the update `epoch` of the stream: wait until this host's receiver submits it."""
        self._drop(TransferError("the sender began another update"))
        self._epoch = epoch
        deadline = time.monotonic() + self._patience(at_ring=True)
        self._queried_at = time.monotonic()
        while not self._await_submit(epoch) and time.monotonic() < deadline:
            if time.monotonic() - self._queried_at < _QUERY_S:
                continue
            self._queried_at = time.monotonic()
            if self._rendezvous.given_up(epoch):  # outside the lock: the call may take long
                return
        with self._changed:
            submitted = self._submitted
            if submitted is None or submitted.epoch != epoch:
                return
            self._submitted = None
            self._current = submitted
        try:
            self._writer.follow(
                submitted.readers, len(submitted.sizes), epoch=submitted.epoch, base=submitted.base
            )
        except TransferError as exc:
            self._drop(exc)

    def _await_submit(self, epoch: int) -> bool:
        """Wait up to _POLL_S for this update or a later one; return whether it was submitted."""
        with self._changed:
            if not self._is_submitted(epoch):
                self._changed.wait(_POLL_S)
            return self._is_submitted(epoch)

    def _is_submitted(self, epoch: int) -> bool:
        submitted = self._submitted
        return self._closing or (submitted is not None and submitted.epoch >= epoch)

    def _drop(self, error: WeightSyncError) -> None:
        if self._current is not None and not self._current.done.is_set():
            self._current.fail(error)
        self._current = None

    def _free_bucket(self, header: ChunkHeader) -> int | None:
        """Return the bucket of a chunk once it is free; None where the update failed here."""
        relay_update = self._current
        if relay_update is None or relay_update.error is not None:
            return None
        try:
            self._check_fits(relay_update, header)
            return self._writer.acquire(
                header.chunk,
                check=self._check_progress(relay_update),
                timeout_s=self._patience(at_ring=True),
            )
        except WeightSyncError as exc:
            self._drop(exc)
            return None

    def _check_fits(self, relay_update: RelayUpdate, header: ChunkHeader) -> None:
        sizes = relay_update.sizes
        if header.chunk >= len(sizes) or header.nbytes != sizes[header.chunk]:
            raise ProtocolError(
                f"chunk {header.chunk + 1} has {header.nbytes} bytes, which is not how this host "
                f"cuts the model into {len(sizes)} chunks; both sides need one manifest and version"
            )

    def _check_progress(self, relay_update: RelayUpdate) -> Check:
        """Return a check that raises TransferTimeout before the previous rank times out.

        The heartbeats of a reader without progress would extend the wait for longer.
        """
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

    def _check_drain(self, relay_update: RelayUpdate) -> None:
        """Check in the wait for this host's readers, when all chunks were received."""
        self._progress = time.monotonic()
        self._check_wanted(relay_update)

    def _check_wanted(self, relay_update: RelayUpdate) -> None:
        if relay_update.error is not None:
            raise relay_update.error
        if time.monotonic() - self._queried_at > _QUERY_S:
            self._queried_at = time.monotonic()
            if self._closing or self._rendezvous.given_up(relay_update.epoch):
                raise TransferError("the update was aborted by its sender")

    def _complete(self, relay_update: RelayUpdate | None) -> None:
        """Wait until all chunks are sent and read by this host's readers, then set `done`."""
        self._downstream.wait_all()
        if relay_update is None or relay_update is not self._current:
            return
        self._queried_at = time.monotonic()
        try:
            self._writer.drain(
                len(relay_update.sizes),
                check=lambda: self._check_drain(relay_update),
                timeout_s=self._timeout_s,
            )
        except WeightSyncError as exc:
            relay_update.fail(exc)
        self._current = None
        relay_update.done.set()

    def _post_header(self, turn: int) -> Work:
        buffer = self._headers[turn % _HEADERS].memory
        self._downstream.wait(buffer)
        return self._receive(buffer, HEADER_LANE)

    def _receive(self, buffer: torch.Tensor, lane: int) -> Work:
        try:
            return self._group.receive(buffer, self._rank - 1, lane)
        except TransferError as exc:
            raise self._named_error(exc) from exc

    def _await_previous(self, pending: Work, timeout_s: float | None = None) -> None:
        try:
            pending.wait(timeout_s)
        except TransferError as exc:
            raise self._named_error(exc) from exc

    def _named_error(self, exc: TransferError) -> TransferError:
        return type(exc)(f"{self._name_of(self._rank - 1)} is lost: {exc}")

    def _next_failed(self, exc: TransferError) -> None:
        """Publish that the next host failed, and fail this host's updates."""
        error = type(exc)(f"{self._name_of(self._rank + 1)} did not take data sent to it: {exc}")
        if not self._closing:
            error = self._rendezvous.report(error)
        self.failure = error
        for relay_update in (self._current, self._submitted):
            if relay_update is not None:
                relay_update.fail(error)

    def _patience(self, *, at_ring: bool) -> float:
        return patience_s(self._timeout_s, self._rank, self._size, at_ring=at_ring)

    def _name_of(self, rank: int) -> str:
        return self._members[0] if rank == 0 else f"the host of {self._members[rank]}"
