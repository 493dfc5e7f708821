"""The sending half of `gloo`: the chunks of one update, down a chain of hosts."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

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
from weightsync.backends.gloo.header import FIRST, ChunkHeader, HeaderStatus, patience_s
from weightsync.backends.gloo.payload import GroupInfo
from weightsync.backends.ipc.sender import IpcTrainerEngine
from weightsync.errors import (
    BackendUnavailableError,
    TransferError,
    TransferTimeout,
    WeightSyncError,
    shorten,
)
from weightsync.shm.ring import NETWORK, RingReader
from weightsync.weights.layout import runs_per_chunk

_IN_FLIGHT = 3


class ChunkFeed(Protocol):
    """One update as the chain reads it; called by the chain's thread alone.

    `chunks` are the bytes of each chunk; `depth` is how many may be taken and not yet done;
    `fingerprint_room` is the most fingerprints that a chunk of this ring has, in any update.
    """

    @property
    def epoch(self) -> int: ...

    @property
    def chunks(self) -> Sequence[int]: ...

    @property
    def depth(self) -> int: ...

    @property
    def fingerprint_room(self) -> int: ...

    def take(self, j: int, check: Check) -> tuple[torch.Tensor, list[int]]:
        """Return chunk `j` (`uint8[nbytes]`, host memory) and its fingerprints once it is there.

        Valid until `done(j)`. Calls `check` while it waits, which ends it by raising.
        """

    def done(self, j: int) -> None:
        """Chunk `j` was sent; its memory may be overwritten."""


class _Stopped(TransferError):
    """The update was given up by its sender."""


class ChainSender:
    """The thread that sends one update to rank 1."""

    def __init__(
        self,
        group: PrivateGroup,
        feed: ChunkFeed,
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
        self._heads = [ChunkHeader(feed.fingerprint_room) for _ in range(_IN_FLIGHT + 1)]
        self._first = first
        self._timeout_s = timeout_s
        self._flying: deque[tuple[int, list[Work]]] = deque()
        self.thread = threading.Thread(target=self._run, name="weightsync-chain", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._send_all()
        except WeightSyncError as exc:
            self.error = exc
            self._abort()
        except Exception as exc:  # noqa: BLE001 # a feed is foreign code; its error must not be lost
            self.error = TransferError(f"the chunks of this update could not be read: {exc!r}")
            self._abort()
        finally:
            self._flying.clear()
            self.ended.set()

    def _send_all(self) -> None:
        chunks = self._feed.chunks
        depth = min(_IN_FLIGHT, self._feed.depth)
        for j, nbytes in enumerate(chunks):
            self._check()
            data, fingerprints = self._feed.take(j, self._check)
            head = self._heads[j % len(self._heads)]
            head.fill(
                HeaderStatus.CHUNK,
                self._feed.epoch,
                chunk=j,
                chunks=len(chunks),
                nbytes=nbytes,
                fingerprints=fingerprints,
            )
            pending: list[Work] = []
            self._flying.append((j, pending))
            pending.append(self._send(head))
            pending.append(self._send_chunk(data, j))
            while len(self._flying) >= depth:
                self._land()
        while self._flying:
            self._land()
        if not chunks:
            self._send_head(HeaderStatus.CHUNK)

    def _land(self) -> None:
        j, pending = self._flying.popleft()
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
        """Tell the members, after what is on its way."""
        if self.broke:
            return
        try:
            while self._flying:
                for work in self._flying.popleft()[1]:
                    work.wait(self._timeout_s)
            self._send_head(HeaderStatus.ABORT)
        except Exception as exc:  # noqa: BLE001  # as of a device: whatever it is, nobody was told
            self.broke = True
            self.error = self._report(TransferError(f"the host of {self._first} is lost: {exc}"))

    def _send_head(self, status: HeaderStatus) -> None:
        head = self._heads[0]
        head.fill(status, self._feed.epoch)
        self._send(head).wait(self._timeout_s)

    def _send(self, head: ChunkHeader) -> Work:
        return self._started(lambda: self._group.send(head.buffer, FIRST, HEADER_LANE))

    def _send_chunk(self, data: torch.Tensor, chunk: int) -> Work:
        return self._started(lambda: self._group.send(data, FIRST, data_lane(chunk)))

    def _started(self, send: Callable[[], Work]) -> Work:
        """Whatever went wrong: the other end waits for what was not sent, so the group is over."""
        try:
            return send()
        except Exception as exc:
            self.broke = True
            error = TransferError(f"the host of {self._first} cannot be reached: {exc}")
            raise self._report(error) from exc

    def _check(self) -> None:
        if self.stop.is_set():
            raise _Stopped("the update was given up by its sender")


SENDER = "the sender"
_CHECK_S = 0.05
_SIGNS_S = 0.2
_GOODBYE_S = 1.0


class RingFeed:
    """Reads the sender's own ring at reader place `reader`: what it packs for its own host.

    Made after the engine's `begin`. Raises BackendUnavailableError for buckets on a GPU.
    """

    def __init__(self, engine: IpcTrainerEngine, reader: int) -> None:
        stream = engine.stream
        if stream.slots[0].device.type != "cpu":
            raise BackendUnavailableError(
                f"the path gloo sends from host memory, and this ring is on "
                f"{stream.slots[0].device}; take path shared_memory, which stages through the host"
            )
        plan = stream.plan
        self._stream = stream
        self._runs = [chunk.last_run - chunk.first_run for chunk in plan.chunks]
        self._reader = RingReader(
            stream.control, reader, epoch=stream.epoch, base=stream.base, pace=NETWORK
        )
        engine.feeds_network()
        self.epoch = stream.epoch
        self.depth = len(stream.slots)
        self.chunks = [chunk.stop - chunk.start for chunk in plan.chunks]
        self.fingerprint_room = runs_per_chunk(stream.slots[0].numel(), plan.run_nbytes)

    def take(self, j: int, check: Check) -> tuple[torch.Tensor, list[int]]:
        """Return chunk `j` in its slot, once it is packed; see Feed."""
        stream, control = self._stream, self._stream.control
        slot = self._reader.wait(j, check=check, timeout_s=stream.timeout_s)
        room = control.entries // control.slots
        count = self._runs[j] if stream.verify else 0
        return stream.slots[slot][: self.chunks[j]], control.fingerprints(slot * room, count)

    def done(self, j: int) -> None:
        """Release the slot."""
        self._reader.release(j)


class Chain:
    """Rank 0 of one private group; `members` names rank 1 and up, for messages.

    `address` is where the members reach this host. The store listens when the constructor returns;
    `join` completes the group; then, for each update, `start`, and `finish` or `stop`. A chain that
    is `broken` is closed, and another with a higher `epoch` takes its place. Raises ConnectError
    when `address` is none of this host.
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
        self._meeting: GroupRendezvous | None = GroupRendezvous.host(
            address, epoch=epoch, timeout_s=timeout_s
        )
        self._address, self._port = address, self._meeting.port
        self._group: PrivateGroup | None = None
        self._sending: ChainSender | None = None
        self._update: int | None = None
        self._looked = self._asked = 0.0
        self._signs: list[list[int]] = [[] for _ in self.members]
        self._failure: WeightSyncError | None = None
        self._closed = threading.Event()
        end_at_exit(self)

    def info(self, rank: int) -> GroupInfo:
        """Return what the member `rank` needs to join."""
        return GroupInfo(
            address=self._address,
            port=self._port,
            epoch=self.epoch,
            rank=rank,
            members=self.members,
            timeout_s=self._timeout_s,
        )

    def join(self) -> None:
        """Return when all members are in; called while their inits are out.

        Raises TransferTimeout naming who did not come, TransferError when the chain was closed.
        """
        try:
            self._join()
        except WeightSyncError as exc:
            self._failure = exc
            raise

    def absent(self) -> list[int]:
        """Return the ranks that have not come to the group yet."""
        meeting = self._meeting
        ranks = range(FIRST, len(self.members))
        return [rank for rank in ranks if meeting is not None and not meeting.is_here(rank)]

    @property
    def broken(self) -> bool:
        """Whether the group can carry no further update."""
        return self.failure is not None

    @property
    def failure(self) -> WeightSyncError | None:
        """What broke the group, as whoever saw it first told it."""
        if self._failure is None and self._meeting is not None:
            reported = self._meeting.reported()
            if reported is not None:
                self._failure = reported
        return self._failure

    def signs(self, rank: int, reader: int) -> int | None:
        """Return what grows while a reader of that rank's host lives and works; None if unseen."""
        meeting = self._meeting
        if meeting is not None and time.monotonic() - self._asked > _SIGNS_S:
            self._asked = time.monotonic()
            self._signs = [meeting.signs(rank) for rank in range(len(self.members))]
        shown = self._signs[rank]
        return shown[reader] if reader < len(shown) else None

    def start(self, feed: ChunkFeed) -> None:
        """Begin to send an update's chunks, in a thread. Raises TransferError when broken."""
        failure = self.failure
        if self._group is None or failure is not None:
            raise failure or TransferError("the private group is not joined")
        self._update = feed.epoch
        patience = patience_s(self._timeout_s, 0, len(self.members))
        self._sending = ChainSender(self._group, feed, self.members[FIRST], patience, self._report)

    def check(self) -> None:
        """Raise what went wrong with the update at work; cheap enough for every wait."""
        sending = self._sending
        if sending is not None and sending.error is not None:
            raise sending.error
        if time.monotonic() - self._looked > _CHECK_S:
            self._looked = time.monotonic()
            self._raise_failure()

    def finish(self, check: Check) -> None:
        """Return when every chunk has left for rank 1. Raises what went wrong, naming the host."""
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
        """Give the update up: the members are told in band, so that the group stays usable.

        Returns within the timeout; afterwards the chain may be broken.
        """
        if self._meeting is not None and self._update is not None:
            self._meeting.give_up(self._update)
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
        """Leave the group at once, and wait that long for its thread to end. Idempotent."""
        if not self._closed.is_set():
            self._say_goodbye()
        self._closed.set()
        self._failure = self._failure or TransferError("the private group was closed")
        sending = self._sending
        if sending is not None:
            sending.stop.set()
        self._abort_connections()
        if sending is not None:
            sending.thread.join(timeout_s)
        if self._meeting is not None:
            self._meeting.end()

    def close(self) -> None:
        """Leave the group at once; whoever waits in it gets an error. Idempotent."""
        self.end(timeout_s=0.0)
        if self._sending is not None:
            self._settle(self._sending)
        if self._group is not None:
            self._group.close()
        self._group = None
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.close()

    def _abort_connections(self) -> None:
        if self._group is not None:
            self._group.abort()

    def _say_goodbye(self) -> None:
        """So that no member takes the end of the group for the death of another."""
        if self._group is None or self._sending is not None or self.broken:
            return
        head = ChunkHeader(0)  # shorter than what is waited for, which does no harm
        head.fill(HeaderStatus.LEAVE, 0)
        with suppress(TransferError):
            self._group.send(head.buffer, FIRST, HEADER_LANE).wait(_GOODBYE_S)

    def _join(self) -> None:
        meeting = self._meeting
        if meeting is None:
            raise TransferError("the private group was closed")
        size = len(self.members)
        ranks = list(range(FIRST, size))
        missing = meeting.gather(ranks, self._timeout_s, given_up=self._closed.is_set)
        if self._closed.is_set():
            raise TransferError("the private group was closed while its members came together")
        if missing:
            names = shorten(self.members[rank] for rank in missing)
            raise TransferTimeout(
                f"{len(missing)} of {len(ranks)} hosts did not join the private group at "
                f"{self._address}:{self._port} within {self._timeout_s:g} s: {names}; can they "
                "reach this address?"
            )
        self._group = PrivateGroup(meeting, 0, size, self._timeout_s)
        if self._closed.is_set():
            self._group.close()
            raise TransferError("the private group was closed while its members came together")

    def _settle(self, sending: ChainSender) -> None:
        """The thread ends; what broke the group is kept."""
        sending.thread.join()
        if sending.broke and self._failure is None:
            self._failure = self.failure or sending.error
        self._sending = None

    def _report(self, error: TransferError) -> TransferError:
        meeting = self._meeting
        return error if self._closed.is_set() or meeting is None else meeting.report(error)

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure
