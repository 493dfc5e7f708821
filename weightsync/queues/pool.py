"""Shared memory that is made once and used again: blocks of segments, by size class.

The first page of a segment holds one word per block. The owner lends a block with a ticket that
grows with every loan; whoever read it sets the word to that ticket, and the block is free again. No
word is ever cleared, each has one writer at a time, and nothing is sent to give a block back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from weightsync.errors import SegmentError, TransferTimeout
from weightsync.queues.tensor_packets import MAX_BLOCKS
from weightsync.shm.segment import Segment
from weightsync.shm.store_order import order_stores

HEADER_NBYTES = 4096
MIN_BLOCK_NBYTES = 64 << 10
_SHARED_SEGMENT_NBYTES = 4 << 20  # small blocks lie together in segments of about this size,
_SEGMENTS_OF_A_SMALL_POOL = 4  # or, in a pool of less than so many of them, in this part of it
_STEPS_PER_DOUBLING = 4  # at most a fifth of a block is air
_NAP_S = 50e-6
_LONG_NAP_S = 1e-3

Check = Callable[[], None]
"""Called during waits; raises when waiting has become pointless."""


def size_class(nbytes: int) -> int:
    """Return the size of the block that `nbytes` bytes go into."""
    if nbytes <= MIN_BLOCK_NBYTES:
        return MIN_BLOCK_NBYTES
    step = (1 << (nbytes - 1).bit_length() - 1) // _STEPS_PER_DOUBLING
    return -(-nbytes // step) * step


@dataclass(eq=False, slots=True)
class Block:
    """A block on loan: `data` is `uint8[size class]`, writable until its descriptor is sent."""

    lot: Slab
    index: int
    offset: int
    data: torch.Tensor
    ticket: int = 0

    @property
    def released(self) -> bool:
        """Whether the reader has given back this loan."""
        return self.lot.words[self.index] == self.ticket


@dataclass(eq=False, slots=True)
class Slab:
    """One segment of the pool, and the blocks in it."""

    segment: Segment
    block_nbytes: int
    words: memoryview
    blocks: list[Block] = field(default_factory=list)
    lent: int = 0


class SegmentPool:
    """Blocks of shared memory, `max_nbytes` bytes of segments at most; any thread may call.

    `on_forget` hears the name of each segment that is given up to make room.
    """

    def __init__(self, *, max_nbytes: int, on_forget: Callable[[str], None] | None = None) -> None:
        self._fence = order_stores()
        self.max_nbytes = max_nbytes
        self._shared_nbytes = min(_SHARED_SEGMENT_NBYTES, max_nbytes // _SEGMENTS_OF_A_SMALL_POOL)
        self._on_forget = on_forget or _tell_nobody
        self._lock = threading.Lock()
        self._lots: list[Slab] = []
        self._free: dict[int, list[Block]] = {}
        self._lent: dict[int, list[Block]] = {}
        self._nbytes = 0
        self._made = 0
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory held now, lent or not."""
        return self._nbytes

    @property
    def segments_made(self) -> int:
        """How many segments were ever made: constant once the pool is warm."""
        return self._made

    @property
    def lent_blocks(self) -> int:
        """How many blocks are with readers now."""
        with self._lock:
            self._collect()
            return sum(map(len, self._lent.values()))

    def take(self, nbytes: int, *, timeout_s: float, check: Check | None = None) -> Block:
        """Lend a block of at least `nbytes` bytes; waits for one to come back while all are out.

        Raises TransferTimeout when none does in time, SegmentError when the pool may never be so
        large or shared memory is full, and what `check` raises.
        """
        wanted = size_class(nbytes)
        if self._segment_nbytes(wanted) > self.max_nbytes:
            raise SegmentError(
                f"a tensor of {nbytes} bytes does not go into a pool of {self.max_nbytes} bytes; "
                "make the pool larger (max_nbytes) or send the tensor in the message"
            )
        deadline = time.monotonic() + timeout_s
        nap_s = _NAP_S
        while True:
            with self._lock:
                block = self._try_take(wanted)
            if block is not None:
                return block
            if check is not None:
                check()
            if time.monotonic() >= deadline:
                raise self._full(nbytes, timeout_s)
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONG_NAP_S)

    def give_back(self, block: Block) -> None:
        """Take back a loan whose descriptor was never sent."""
        with self._lock:
            if not self._closed:
                block.lot.words[block.index] = block.ticket

    def trim(self) -> int:
        """Give up the segments that nobody reads; returns how many bytes that freed."""
        with self._lock:
            self._collect()
            before = self._nbytes
            for lot in [lot for lot in self._lots if not lot.lent]:
                self._give_up(lot)
            return before - self._nbytes

    def close(self) -> None:
        """Give up all segments. Idempotent; what readers have mapped stays theirs."""
        with self._lock:
            self._closed = True
            self._free.clear()
            self._lent.clear()
            for lot in self._lots:
                _close(lot)
            self._lots.clear()
            self._nbytes = 0

    def _blocks_of(self, block_nbytes: int) -> int:
        """Return how many blocks of this size share a segment."""
        return min(max(self._shared_nbytes // block_nbytes, 1), MAX_BLOCKS)

    def _segment_nbytes(self, block_nbytes: int) -> int:
        return HEADER_NBYTES + self._blocks_of(block_nbytes) * block_nbytes

    def _try_take(self, wanted: int) -> Block | None:
        if self._closed:
            raise SegmentError("this pool of shared memory is closed")
        free = self._free.setdefault(wanted, [])
        if not free:
            self._collect()
        if not free and not self._grow(wanted):
            return None
        block = free.pop()  # the last one back is the likeliest to be in the cache
        self._fence()
        block.ticket += 1
        block.lot.lent += 1
        self._lent.setdefault(wanted, []).append(block)
        return block

    def _collect(self) -> None:
        """Move the blocks that came back to the free ones."""
        for size, lent in self._lent.items():
            still: list[Block] = []
            for block in lent:
                if block.released:
                    block.lot.lent -= 1
                    self._free[size].append(block)
                else:
                    still.append(block)
            lent[:] = still

    def _grow(self, wanted: int) -> bool:
        """Make a segment of `wanted`-sized blocks if there is room for it, or can be made."""
        nbytes = self._segment_nbytes(wanted)
        self._make_room(nbytes)
        if self._nbytes + nbytes > self.max_nbytes:
            return False
        try:
            segment = Segment.create(nbytes)
        except SegmentError:
            if any(self._lent.values()):
                return False  # shared memory is full; what is lent comes back
            raise
        self._add(segment, wanted)
        return True

    def _make_room(self, nbytes: int) -> None:
        for lot in [lot for lot in self._lots if not lot.lent]:
            if self._nbytes + nbytes <= self.max_nbytes:
                return
            self._give_up(lot)

    def _add(self, segment: Segment, block_nbytes: int) -> None:
        lot = Slab(segment, block_nbytes, segment.buffer[:HEADER_NBYTES].cast("Q"))
        for index in range(self._blocks_of(block_nbytes)):
            offset = HEADER_NBYTES + index * block_nbytes
            lot.blocks.append(Block(lot, index, offset, segment.tensor(offset, block_nbytes)))
        self._lots.append(lot)
        self._free[block_nbytes].extend(reversed(lot.blocks))
        self._nbytes += segment.nbytes
        self._made += 1

    def _give_up(self, lot: Slab) -> None:
        free = self._free[lot.block_nbytes]
        free[:] = [block for block in free if block.lot is not lot]
        self._lots.remove(lot)
        self._nbytes -= lot.segment.nbytes
        name = lot.segment.name
        _close(lot)
        self._on_forget(name)

    def _full(self, nbytes: int, timeout_s: float) -> TransferTimeout:
        return TransferTimeout(
            f"no room for a tensor of {nbytes} bytes in {timeout_s:.1f} s: the pool holds "
            f"{self._nbytes} of {self.max_nbytes} bytes and {self.lent_blocks} tensors are with "
            "the receiver, which must take, drop or clean them up; or make the pool larger"
        )


def _close(lot: Slab) -> None:
    lot.blocks.clear()
    lot.words = memoryview(b"")
    lot.segment.close()


def _tell_nobody(name: str) -> None:
    """Stand in where no reader needs to hear of segments that are given up."""
