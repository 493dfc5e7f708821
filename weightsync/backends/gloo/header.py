"""The header before each chunk in the chain of hosts: the chunk's number and fingerprints."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from weightsync.errors import TransferError

FIRST = 1
"""The rank to which the sender (rank 0) sends."""

_WORD_NBYTES = 8
_FIXED_WORDS = 6


class HeaderStatus(IntEnum):
    """CHUNK: `nbytes` bytes follow on a data lane. ABORT: nothing follows, the update is over.

    LEAVE: the sender closes the group.
    """

    CHUNK = 1
    ABORT = 2
    LEAVE = 3


class ChunkHeader(NamedTuple):
    """The content of one header: the number of the chunk, from 0 within the update of this epoch.

    `chunks` is the count of chunks, `nbytes` the bytes that follow. `fingerprints` are those of the
    chunk's copy units, empty when verification is off.
    """

    status: int
    epoch: int
    chunk: int = 0
    chunks: int = 0
    nbytes: int = 0
    fingerprints: Sequence[int] = ()

    @property
    def last(self) -> bool:
        """Whether this update has no further chunk."""
        return self.chunk + 1 >= self.chunks


class HeaderBuffer:
    """Memory for one header. `memory` is `uint8[…]`, of one size within a group."""

    def __init__(self, fingerprints: int) -> None:
        memory = bytearray((_FIXED_WORDS + fingerprints) * _WORD_NBYTES)
        self.memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._words = memoryview(memory).cast("Q")

    def write(self, header: ChunkHeader) -> None:
        """Set all fields. Raises TransferError for more fingerprints than there is room for."""
        *fixed, fingerprints = header
        room = len(self._words) - _FIXED_WORDS
        if len(fingerprints) > room:
            raise TransferError(f"{len(fingerprints)} fingerprints do not fit a header of {room}")
        for i, value in enumerate((*fixed, len(fingerprints), *fingerprints)):
            self._words[i] = value

    def read(self) -> ChunkHeader:
        """Return what was received; at most as many fingerprints as there is room for."""
        status, epoch, chunk, chunks, nbytes, count = self._words[:_FIXED_WORDS].tolist()
        fingerprints = self._words[_FIXED_WORDS:][:count].tolist()
        return ChunkHeader(status, epoch, chunk, chunks, nbytes, fingerprints)


def patience_s(timeout_s: float, rank: int, size: int, *, at_ring: bool = False) -> float:
    """Return the seconds that rank `rank` of a chain waits for the next host, or for its readers.

    Ranks at the end of the chain time out first, because they can name the host that is late.
    """
    return timeout_s * (1 - (rank + (0.75 if at_ring else 0.25)) / (2 * size))
