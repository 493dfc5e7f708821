"""What a host of the chain sends on to the next one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weightsync.backends.chain_head import patience_s
from weightsync.backends.private_group import HEADER_LANE, PrivateGroup, Work, data_lane
from weightsync.errors import TransferError
from weightsync.wire.offers import GroupInfo


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
