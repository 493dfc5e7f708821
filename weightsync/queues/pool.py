"""Pool of reusable shared memory: segments cut into blocks of one size class.

The first page of a segment holds one word per block. The owner hands out a block with a ticket that
grows with every use. The reader sets the word to the ticket when it is done, and the block is free
again. No word is ever cleared, each has one writer at a time, and a release sends no message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from weightsync.errors import SegmentError, TransferTimeout
from weightsync.queues.tensor_packets import MAX_BLOCKS
from weightsync.shm.segment import Segment
from weightsync.shm.store_order import order_stores
from weightsync.shm.wait import Check

HEADER_NBYTES = 4096
MIN_BLOCK_NBYTES = 64 << 10
_SHARED_SEGMENT_NBYTES = 4 << 20  # small blocks share segments of about this size,
_SEGMENTS_OF_A_SMALL_POOL = 4  # or of 1/4 of a pool that is smaller than four such segments
_STEPS_PER_DOUBLING = 4  # at most a fifth of a block is unused
_NAP_S = 50e-6
_LONG_NAP_S = 1e-3


def size_class(nbytes: int) -> int:
    """Return the size of the block for `nbytes` bytes."""
    if nbytes <= MIN_BLOCK_NBYTES:
        return MIN_BLOCK_NBYTES
    step = (1 << (nbytes - 1).bit_length() - 1) // _STEPS_PER_DOUBLING
    return -(-nbytes // step) * step


@dataclass(eq=False, slots=True)
class Block:
    """A block of a segment: `data` is `uint8[size class]`, writable until its handle is sent."""

    slab: Slab
    index: int
    offset: int
    data: torch.Tensor
    ticket: int = 0

    @property
    def released(self) -> bool:
        """True if the reader has released the block."""
        return self.slab.words[self.index] == self.ticket


@dataclass(eq=False, slots=True)
class Slab:
    """One segment of the pool. `in_use` counts its blocks in use."""

    segment: Segment
    block_nbytes: int
    words: memoryview
    in_use: int = 0


class SegmentPool:
    """Pool of shared-memory blocks with at most `max_nbytes` bytes of segments. Thread-safe.

    `on_forget` is called with the name of each segment that the pool frees.
    """

    def __init__(self, *, max_nbytes: int, on_forget: Callable[[str], None] | None = None) -> None:
        self._fence = order_stores()
        self.max_nbytes = max_nbytes
        self._shared_nbytes = min(_SHARED_SEGMENT_NBYTES, max_nbytes // _SEGMENTS_OF_A_SMALL_POOL)
        self._on_forget = on_forget or _ignore
        self._lock = threading.Lock()
        self._slabs: list[Slab] = []
        self._free: dict[int, list[Block]] = {}
        self._in_use: dict[int, list[Block]] = {}
        self._nbytes = 0
        self._made = 0
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory held now, in use or free."""
        return self._nbytes

    @property
    def segments_made(self) -> int:
        """Number of segments created since the start; constant when the pool is warm."""
        return self._made

    @property
    def blocks_in_use(self) -> int:
        """Number of blocks that readers have not released."""
        with self._lock:
            self._collect()
            return sum(map(len, self._in_use.values()))

    def take(self, nbytes: int, *, timeout_s: float, check: Check | None = None) -> Block:
        """Return a block of at least `nbytes` bytes; wait for a release while none is free.

        Raises TransferTimeout when no block becomes free in time, SegmentError when the block
        exceeds the pool or shared memory is full, and what `check` raises.
        """
        wanted = size_class(nbytes)
        if self._segment_nbytes(wanted) > self.max_nbytes:
            raise SegmentError(
                f"a tensor of {nbytes} bytes does not fit into a pool of {self.max_nbytes} bytes; "
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
        """Release a block whose handle was not sent."""
        with self._lock:
            if not self._closed:
                block.slab.words[block.index] = block.ticket

    def trim(self) -> int:
        """Free the segments without a block in use; return the bytes freed."""
        with self._lock:
            self._collect()
            before = self._nbytes
            for slab in [slab for slab in self._slabs if not slab.in_use]:
                self._free_slab(slab)
            return before - self._nbytes

    def close(self) -> None:
        """Free all segments. Mappings of readers stay valid. Idempotent."""
        with self._lock:
            self._closed = True
            self._free.clear()
            self._in_use.clear()
            for slab in self._slabs:
                _close(slab)
            self._slabs.clear()
            self._nbytes = 0

    def _blocks_of(self, block_nbytes: int) -> int:
        """Return the number of blocks of this size in a segment."""
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
        block = free.pop()  # the last block released is the most likely to be in the cache
        self._fence()
        block.ticket += 1
        block.slab.in_use += 1
        self._in_use.setdefault(wanted, []).append(block)
        return block

    def _collect(self) -> None:
        """Move the released blocks to the free list."""
        for size, blocks in self._in_use.items():
            in_use: list[Block] = []
            for block in blocks:
                if block.released:
                    block.slab.in_use -= 1
                    self._free[size].append(block)
                else:
                    in_use.append(block)
            blocks[:] = in_use

    def _grow(self, wanted: int) -> bool:
        """Create a segment with blocks of `wanted` bytes; free unused segments to make room.

        Returns False if there is no room now.
        """
        nbytes = self._segment_nbytes(wanted)
        self._make_room(nbytes)
        if self._nbytes + nbytes > self.max_nbytes:
            return False
        try:
            segment = Segment.create(nbytes)
        except SegmentError:
            if any(self._in_use.values()):
                return False  # shared memory is full, but blocks in use will be released
            raise
        self._add(segment, wanted)
        return True

    def _make_room(self, nbytes: int) -> None:
        for slab in [slab for slab in self._slabs if not slab.in_use]:
            if self._nbytes + nbytes <= self.max_nbytes:
                return
            self._free_slab(slab)

    def _add(self, segment: Segment, block_nbytes: int) -> None:
        slab = Slab(segment, block_nbytes, segment.buffer[:HEADER_NBYTES].cast("Q"))
        for index in reversed(range(self._blocks_of(block_nbytes))):
            offset = HEADER_NBYTES + index * block_nbytes
            block = Block(slab, index, offset, segment.tensor(offset, block_nbytes))
            self._free[block_nbytes].append(block)
        self._slabs.append(slab)
        self._nbytes += segment.nbytes
        self._made += 1

    def _free_slab(self, slab: Slab) -> None:
        free = self._free[slab.block_nbytes]
        free[:] = [block for block in free if block.slab is not slab]
        self._slabs.remove(slab)
        self._nbytes -= slab.segment.nbytes
        name = slab.segment.name
        _close(slab)
        self._on_forget(name)

    def _full(self, nbytes: int, timeout_s: float) -> TransferTimeout:
        return TransferTimeout(
            f"no room for a tensor of {nbytes} bytes in {timeout_s:.1f} s: the pool holds "
            f"{self._nbytes} of {self.max_nbytes} bytes and {self.blocks_in_use} tensors are with "
            "the receiver, which must take, drop or clean them up; or make the pool larger"
        )


def _close(slab: Slab) -> None:
    slab.words = memoryview(b"")
    slab.segment.close()


def _ignore(name: str) -> None:
    """Do nothing: the default `on_forget`."""
