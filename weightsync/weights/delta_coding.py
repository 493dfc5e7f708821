"""The coding of changed values for slow paths: small, lossless, and checked before it is used.

A section has the values (two bytes each) of consecutive lines that changed. Their positions are
gaps, a byte each, and the changes are differences of bit patterns modulo 2^16, a byte each for
small ones: a step of an optimizer moves most values to a neighbour. What does not fit a byte
follows apart. zstd compresses the bytes. The base is exact, so the result is too: no sums of
floating-point numbers are involved, and nothing drifts.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync.errors import BackendUnavailableError, ProtocolError
from weightsync.weights.lines import WORDS, Indices, Words, kernels

VALUES = 4 * WORDS
"""Values of two bytes in a line."""
LEVEL = 1
"""Level of zstd: higher ones take longer and save less than 2 % (measured, docs/deltas.md)."""
SECTION_VALUES = 1 << 18
"""About how many changed values a section has."""
_MOST_VALUES = 2 * SECTION_VALUES
_ESCAPE = 255
_HEAD = struct.Struct("<QQQQQQ")
VALUES_MAGIC = 0x7773_7661_6C75_0001
_Bytes = npt.NDArray[np.uint8]


@cache
def zstd() -> ModuleType | None:
    """Return the module zstandard, None where it is not installed."""
    try:
        import zstandard  # noqa: PLC0415  # the extra `delta`
    except ImportError:
        return None
    return zstandard


@dataclass(frozen=True, slots=True)
class Section:
    """Changed values: `positions` (`uint64[n]`) in values of the stream, growing, and `changes`.

    `changes[i]` (`uint16[n]`) is the new bit pattern less the old one, modulo 2^16.
    """

    positions: npt.NDArray[np.uint64]
    changes: npt.NDArray[np.uint16]

    def lines(self) -> tuple[Indices, npt.NDArray[np.int64]]:
        """Return the numbers of the lines that have changed values, and where each begins."""
        of_line = (self.positions // np.uint64(VALUES)).astype(np.uint32)
        first = np.flatnonzero(np.diff(of_line, prepend=np.uint32(0)))
        if len(of_line) and (not len(first) or first[0]):
            first = np.concatenate([np.zeros(1, np.int64), first])
        return of_line[first], first

    def apply(self, indices: Indices, lines: Words) -> None:
        """Change the old contents of the lines `indices`, all of `lines()`, to the new ones."""
        values = lines.view(np.uint16)
        in_stream = self.positions // np.uint64(VALUES)
        rows = np.searchsorted(indices, in_stream.astype(np.uint32)).astype(np.int64)
        at = rows * VALUES + (self.positions % np.uint64(VALUES)).astype(np.int64)
        values[at] += self.changes


def changed_values(indices: Indices, old: Words, new: Words) -> Section:
    """Return the values in which two contents of the same lines differ."""
    compiled: Any = kernels()
    if compiled is not None:
        positions = np.empty(len(new) * 4, np.uint64)
        changes = np.empty(len(new) * 4, np.uint16)
        count = int(compiled.list_changes(indices, old, new, positions, changes))
        return Section(positions[:count], changes[:count])
    before, now = old.view(np.uint16), new.view(np.uint16)
    at = np.flatnonzero(before != now)
    rows, places = at // VALUES, (at % VALUES).astype(np.uint64)
    positions = indices[rows].astype(np.uint64) * np.uint64(VALUES) + places
    return Section(positions, now[at] - before[at])


def encode(section: Section) -> bytes:
    """Return a section as bytes. Raises BackendUnavailableError without zstandard."""
    gaps = np.diff(section.positions, prepend=np.uint64(0))
    small_gaps, far = _split(gaps)
    signed = section.changes.view(np.int16)
    small, large = _split(((signed << 1) ^ (signed >> 15)).view(np.uint16))
    parts = [_compressed(part) for part in (small_gaps, small, far, large)]
    head = _HEAD.pack(VALUES_MAGIC, len(gaps), len(far), len(large), len(parts[0]), len(parts[1]))
    return b"".join([head, struct.pack("<Q", len(parts[2])), *parts])


def decode(data: bytes | memoryview, values: int) -> Section:
    """Return the section of these bytes, whose positions are below `values`.

    Raises ProtocolError for bytes that are damaged. Takes a few MB, whatever they say.
    """
    head = _HEAD.size + 8
    view = memoryview(data)
    if len(view) < head:
        raise ProtocolError(f"a section of {len(view)} bytes is too short")
    magic, count, far_count, large_count, *sizes = _HEAD.unpack_from(view)
    sizes.append(*struct.unpack_from("<Q", view, _HEAD.size))
    if (
        magic != VALUES_MAGIC
        or count > min(values, _MOST_VALUES)
        or max(far_count, large_count) > count
    ):
        raise ProtocolError("the head of a section is damaged")
    ends = np.cumsum([head, *sizes]).tolist()
    if ends[-1] > len(view) or min(sizes) < 0:
        raise ProtocolError(f"a section of {len(view)} bytes is cut off")
    bounds = [*pairwise(ends), (ends[-1], len(view))]
    kinds: list[tuple[type[np.unsignedinteger[Any]], int]] = [
        (np.uint8, count),
        (np.uint8, count),
        (np.uint64, far_count),
        (np.uint16, large_count),
    ]
    small_gaps, small, far, large = (
        _decompressed(view[begin:end], kind, n)
        for (begin, end), (kind, n) in zip(bounds, kinds, strict=True)
    )
    gaps = _joined(small_gaps, far, np.uint64)
    zigzag = _joined(small, large, np.uint16)
    if count and ((gaps[1:] == 0).any() or int(gaps.max()) > values):
        raise ProtocolError("a section has repeated positions")
    positions = np.cumsum(gaps, dtype=np.uint64)
    # No single gap is larger than `values`, so a sum that wrapped round would be below one before.
    if count and (int(positions[-1]) >= values or (positions[1:] <= positions[:-1]).any()):
        raise ProtocolError(f"a section has positions beyond the {values} values of the model")
    signed = (zigzag >> 1).view(np.int16) ^ -(zigzag & 1).view(np.int16)
    return Section(positions, signed.view(np.uint16))


def _split(numbers: npt.NDArray[Any]) -> tuple[_Bytes, npt.NDArray[Any]]:
    """Return a byte for each number, 255 where it does not fit, and the numbers that do not."""
    fits = numbers < _ESCAPE
    return np.where(fits, numbers, _ESCAPE).astype(np.uint8), numbers[~fits]


def _joined(small: _Bytes, large: npt.NDArray[Any], kind: Any) -> npt.NDArray[Any]:
    """Undo `_split`. Raises ProtocolError where the numbers do not fit together."""
    numbers = small.astype(kind)
    escaped = np.flatnonzero(small == _ESCAPE)
    if len(escaped) != len(large):
        raise ProtocolError("the numbers of a section do not fit together")
    numbers[escaped] = large
    return numbers


def _compressed(part: npt.NDArray[Any]) -> bytes:
    module: Any = zstd()
    if module is None:
        raise BackendUnavailableError(
            "zstandard is not installed, which packs deltas for slow paths: "
            "pip install 'weightsync[delta]'"
        )
    return bytes(module.ZstdCompressor(level=LEVEL).compress(part.tobytes()))


def _decompressed(
    data: memoryview, kind: type[np.unsignedinteger[Any]], count: int
) -> npt.NDArray[Any]:
    """Return `count` numbers. Raises ProtocolError for other data, before it allocates more."""
    module: Any = zstd()
    if module is None:
        raise BackendUnavailableError(
            "zstandard is not installed, which unpacks deltas: pip install 'weightsync[delta]'"
        )
    nbytes = count * np.dtype(kind).itemsize
    try:
        if module.frame_content_size(data) != nbytes:
            raise ProtocolError("a part of a section has another size than its head says")
        unpacked = module.ZstdDecompressor().decompress(data, max_output_size=nbytes)
    except module.ZstdError as exc:
        raise ProtocolError(f"a part of a section is damaged: {exc}") from exc
    if len(unpacked) != nbytes:
        raise ProtocolError("a part of a section is cut off")
    return np.frombuffer(unpacked, kind)
