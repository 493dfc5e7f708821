"""The header before each chunk in the chain of hosts: the chunk's number and fingerprints."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch

from weightsync.errors import TransferError

FIRST = 1
"""The rank to which the sender (rank 0) sends."""

_WORD_NBYTES = 8
_FIXED_WORDS = 6
_STATUS, _EPOCH, _CHUNK, _CHUNKS, _NBYTES, _COUNT = range(_FIXED_WORDS)


class HeaderStatus(IntEnum):
    """CHUNK: `nbytes` bytes follow on a data lane. ABORT: nothing follows, the update is over.

    LEAVE: the sender closes the group.
    """

    CHUNK = 1
    ABORT = 2
    LEAVE = 3


class ChunkHeader:
    """One header in memory of its own. `buffer` is `uint8[…]`, of one size within a group.

    It has the number of the chunk, the count of chunks, the epoch of the update, and the
    fingerprints of the chunk's copy units.
    """

    def __init__(self, fingerprints: int) -> None:
        memory = bytearray((_FIXED_WORDS + fingerprints) * _WORD_NBYTES)
        self.buffer = torch.frombuffer(memory, dtype=torch.uint8)
        self._words = memoryview(memory).cast("Q")

    def fill(
        self,
        status: HeaderStatus,
        epoch: int,
        *,
        chunk: int = 0,
        chunks: int = 0,
        nbytes: int = 0,
        fingerprints: Sequence[int] = (),
    ) -> None:
        """Set all fields. Raises TransferError for more fingerprints than there is room for."""
        room = len(self._words) - _FIXED_WORDS
        if len(fingerprints) > room:
            raise TransferError(f"{len(fingerprints)} fingerprints do not fit a header of {room}")
        fixed = (status, epoch, chunk, chunks, nbytes, len(fingerprints))
        for i, value in enumerate((*fixed, *fingerprints)):
            self._words[i] = value

    @property
    def aborts(self) -> bool:
        """Whether the update is over before its last chunk."""
        return self._words[_STATUS] == HeaderStatus.ABORT

    @property
    def leaves(self) -> bool:
        """Whether the sender closes the group."""
        return self._words[_STATUS] == HeaderStatus.LEAVE

    @property
    def epoch(self) -> int:
        """The epoch of the update."""
        return self._words[_EPOCH]

    @property
    def chunk(self) -> int:
        """The index of the chunk, from 0 within the update."""
        return self._words[_CHUNK]

    @property
    def nbytes(self) -> int:
        """Number of bytes that follow."""
        return self._words[_NBYTES]

    @property
    def last(self) -> bool:
        """Whether this update has no further chunk."""
        return self._words[_CHUNK] + 1 >= self._words[_CHUNKS]

    @property
    def fingerprints(self) -> list[int]:
        """The fingerprints of the chunk's copy units; empty when verification is off."""
        count = min(self._words[_COUNT], len(self._words) - _FIXED_WORDS)
        return self._words[_FIXED_WORDS : _FIXED_WORDS + count].tolist()


def patience_s(timeout_s: float, rank: int, size: int, *, at_ring: bool = False) -> float:
    """Return the seconds that rank `rank` of a chain waits for the next host, or for its readers.

    Ranks at the end of the chain time out first, because they can name the host that is late.
    """
    return timeout_s * (1 - (rank + (0.75 if at_ring else 0.25)) / (2 * size))
