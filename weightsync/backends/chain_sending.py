"""The thread that sends one update's chunks to the first host of the chain."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from weightsync.backends.base import Check
from weightsync.backends.chain_head import FIRST, ChunkHeader, HeaderStatus
from weightsync.backends.private_group import HEADER_LANE, PrivateGroup, Work, data_lane
from weightsync.errors import TransferError, WeightSyncError

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
