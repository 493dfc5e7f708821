"""Chunks between GPUs: host slot, staging buffer, wire, staging buffer, host slot.

The other end of every transfer was told its exact size by the head before it. A transfer that
never ends is found here: the wire itself may wait for ever for a host that is gone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch

from weightsync.backends.chain_head import patience_s
from weightsync.backends.nccl_wire import Flight, Wire
from weightsync.backends.private_group import SILENCE, PrivateGroup
from weightsync.errors import ProtocolError, TransferError, TransferTimeout
from weightsync.wire.offers import GroupInfo

logger = logging.getLogger(__name__)

STAGES = 2
"""Buffers for each neighbour: one is copied while the other is on its way."""

_PROOF = bytes(range(251))
_SOON_S = 50e-6
_LATER_S = 1e-3
_BUSY_S = 5e-3
_JOIN_S = 1.0


_kept: list[tuple[Wire, list[torch.Tensor]]] = []
_lock = threading.Lock()


def _free_kept() -> None:
    """Free the staging buffers of wires that have ended by now."""
    with _lock:
        _kept[:] = [(wire, buffers) for wire, buffers in _kept if not wire.abort()]


class _Bell:
    """Rings when the private group's connection to a rank breaks, which NCCL may never notice."""

    def __init__(self, group: PrivateGroup, rank: int) -> None:
        self.rung: str | None = None
        self._silence = group.receive(torch.zeros(1, dtype=torch.uint8), rank, SILENCE)
        self._thread = threading.Thread(target=self._listen, name="weightsync-bell", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        try:
            self._silence.wait()
        except TransferError as exc:
            self.rung = str(exc)
        else:
            self.rung = "it broke the silence"

    def join(self) -> None:
        """Return when the connection is broken, or after a moment."""
        self._thread.join(_JOIN_S)


class _Staged:
    """One transfer by a staging buffer; `then` is what is left to do when it has landed."""

    def __init__(
        self, data: NcclData, flight: Flight, rank: int, then: Callable[[], None] | None = None
    ) -> None:
        self._data = data
        self._flight: Flight | None = flight
        self._rank = rank
        self._then = then

    def wait(self, timeout_s: float | None = None) -> None:
        if self._flight is None:
            return
        self._data.watch(self._flight, self._rank, timeout_s)
        self._flight = None
        if self._then is not None:
            self._then()


class NcclData:
    """A rank's staging buffers, beside the private group of `info`, and the wire between them."""

    depth = STAGES

    def __init__(self, wire: Wire, group: PrivateGroup, info: GroupInfo, slot_nbytes: int) -> None:
        size = len(info.members)
        self._rank = info.rank
        self._wire = wire
        self._slot_nbytes = slot_nbytes
        self._before = info.rank - 1 if info.rank else None
        self._after = info.rank + 1 if info.rank + 1 < size else None
        self._patience_s = patience_s(info.timeout_s, info.rank, size)
        self._severed: str | None = None
        self._incoming = self._buffers(self._before)
        self._outgoing = self._buffers(self._after)
        self._leaving: list[_Staged | None] = [None] * STAGES
        self._received = self._sent = 0
        neighbours = [rank for rank in (self._before, self._after) if rank is not None]
        self._bells = {rank: _Bell(group, rank) for rank in neighbours}

    @classmethod
    def over(cls, wire: Wire, group: PrivateGroup, info: GroupInfo, slot_nbytes: int) -> NcclData:
        """Take a wire, which is ended where there is no memory for the buffers."""
        _free_kept()
        try:
            return cls(wire, group, info, slot_nbytes)
        except BaseException:
            wire.abort()
            raise

    def prove(self) -> None:
        """Connect to both neighbours: take known bytes from the one, and give them to the other.

        Raises TransferError, and ProtocolError for other bytes. May wait for ever in the wire.
        """
        known = torch.frombuffer(bytearray(_PROOF), dtype=torch.uint8)
        if self._before is not None:
            got = torch.zeros_like(known)
            self.receive(got, got.numel(), self._before, 0).wait(self._patience_s)
            if not torch.equal(got, known):
                raise ProtocolError("NCCL brought other bytes than were sent")
        if self._after is not None:
            self.send(known, self._after, 0).wait(self._patience_s)

    def send(self, tensor: torch.Tensor, rank: int, chunk: int) -> _Staged:
        """Copy `uint8[nbytes]` of host memory, which is free again on return, and send it."""
        turn, self._sent = self._sent % STAGES, self._sent + 1
        before = self._leaving[turn]
        if before is not None:
            before.wait(self._patience_s)
        stage = self._outgoing[turn][: tensor.numel()]
        self._check(rank)
        self._wire.copy(tensor, stage)
        staged = self._leaving[turn] = _Staged(self, self._wire.send(stage, rank), rank)
        return staged

    def receive(self, room: torch.Tensor, nbytes: int, rank: int, chunk: int) -> _Staged:
        """Receive exactly `nbytes`, which `wait` copies to the start of `room`."""
        turn, self._received = self._received % STAGES, self._received + 1
        stage = self._incoming[turn][:nbytes]
        self._check(rank)
        flight = self._wire.receive(stage, rank)
        return _Staged(self, flight, rank, lambda: self._wire.copy(stage, room[:nbytes]))

    def watch(self, flight: Flight, rank: int, timeout_s: float | None) -> None:
        """Return when it has landed. Whatever else happens ends the wire, so that nothing waits.

        Raises TransferTimeout, or TransferError when the connection to `rank` breaks.
        """
        started = time.monotonic()
        try:
            while not flight.landed():
                self._check(rank)
                took = time.monotonic() - started
                if timeout_s is not None and took > timeout_s:
                    raise TransferTimeout(f"nothing moved for {timeout_s:g} s")
                time.sleep(_SOON_S if took < _BUSY_S else _LATER_S)
        except TransferError as exc:
            self._end(str(exc))
            raise

    def sever(self) -> None:
        """Make every operation fail, here at once and at the others as they notice. Idempotent."""
        self._end("the private group was closed")

    def abandon(self) -> None:
        """Free all but the threads, which end with the private group's connections. Idempotent.

        Buffers that a transfer may still use are kept until the wire has ended, if it ever does.
        """
        self.sever()
        self._leaving = [None] * STAGES
        buffers = self._incoming + self._outgoing
        self._incoming, self._outgoing = [], []
        if buffers and not self._wire.abort():
            logger.warning("NCCL does not end; %d staging buffers are kept for it", len(buffers))
            with _lock:
                _kept.append((self._wire, buffers))

    def close(self) -> None:
        """Free everything; the private group is severed. Idempotent."""
        self.abandon()
        for bell in self._bells.values():
            bell.join()

    def _buffers(self, neighbour: int | None) -> list[torch.Tensor]:
        if neighbour is None:
            return []
        return [self._wire.memory(max(self._slot_nbytes, len(_PROOF))) for _ in range(STAGES)]

    def _check(self, rank: int) -> None:
        reason = self._severed or self._bells[rank].rung
        if reason is not None:
            raise TransferError(reason)

    def _end(self, reason: str) -> None:
        if self._severed is None:
            self._severed = reason
            self._wire.abort()
