"""Where things lie in the two segments of a message queue; `message_ring` says what they mean."""

from __future__ import annotations

import struct
from dataclasses import dataclass

RECORDS = 256
RECORD_NBYTES = 1024
INLINE, SLOT, SOCKET = 1, 2, 3
"""Where a message lies: in its record, in a slot, or on the way through a socket."""

MAGIC = 0x7773_6D71_7565_0001
PAGE = 4096
LINE = 8
RECORD = struct.Struct("<QQQQ")  # number, place, bytes, slot
INLINE_OFFSET = 64
INLINE_NBYTES = RECORD_NBYTES - INLINE_OFFSET
HEADER = 0
# The writer's line, and words of it.
WRITER = LINE
PUBLISHED, CLOSED, WANTED, READY = range(WRITER, WRITER + 4)
# A reader's line, and words of it.
READERS = 2 * LINE
RELEASED, JOINED, ID_HIGH, ID_LOW, ASLEEP, LEFT = range(6)


@dataclass(frozen=True)
class MessageRingLayout:
    """How many slots of how many bytes for how many readers."""

    slots: int
    slot_nbytes: int
    readers: int

    @property
    def stride(self) -> int:
        """Bytes from slot to slot."""
        return -(-self.slot_nbytes // PAGE) * PAGE

    @property
    def data_nbytes(self) -> int:
        """Bytes of the data segment."""
        return RECORDS * RECORD_NBYTES + self.slots * self.stride

    @property
    def control_nbytes(self) -> int:
        """Bytes of the control segment; the writer's words about readers come last."""
        return 8 * (self.evicted(self.readers))

    def evicted(self, reader: int) -> int:
        """Return the word in which the writer says that it went on without `reader`."""
        return READERS + (self.readers + 1) * LINE + reader

    def slot_at(self, slot: int) -> int:
        """Return the offset of a slot."""
        return RECORDS * RECORD_NBYTES + slot * self.stride


def line_of(reader: int) -> int:
    """Return the first word of a reader's line: what it has released."""
    return READERS + reader * LINE
