"""The coding of changed values for slow paths: small, lossless, and checked before it is used.

A section has the values (two bytes each) of consecutive lines that changed. Their positions are
gaps, most of them a byte. The changes are differences of bit patterns modulo 2^16: a step of an
optimizer moves most values to a neighbour, so there is a bit for each sign, and the differences
other than one follow apart. zstd compresses the bytes. The base is exact, so the result is too: no
sums of floating-point numbers are involved, and nothing drifts.
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

from weightsync.errors import BackendUnavailableError, ProtocolError, install_hint
from weightsync.weights.lines.memory import WORDS, Indices, Words, kernels

VALUES = 4 * WORDS
"""Values of two bytes in a line."""
LEVEL = 1
"""Level of zstd: 19 saves 1 % of the bytes, and takes twenty times as long (docs/deltas.md)."""
SECTION_VALUES = 1 << 16
"""About how many changed values a section has."""
_MOST_VALUES = 4 * SECTION_VALUES
"""A section is complete when it has SECTION_VALUES; the last lines may bring twice as many more."""
_MOST_NBYTES = 1 << 28
_ESCAPE = _CONTINUED = 255
_HEAD = struct.Struct("<12Q")
VALUES_MAGIC = 0x7773_7661_6C75_0002
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

    def lines(self) -> Indices:
        """Return the numbers of the lines that have changed values."""
        indices = np.empty(len(self.positions), np.uint32)
        return indices[: int(kernels().list_lines(self.positions, indices))]

    def apply(self, indices: Indices, lines: Words) -> None:
        """Change the old contents of the lines `indices`, all of `lines()`, to the new ones."""
        kernels().apply_changes(indices, lines.view(np.uint16), self.positions, self.changes)


def changed_values(indices: Indices, old: Words, new: Words) -> Section:
    """Return the values in which two contents of the same lines differ."""
    positions = np.empty(len(new) * 4, np.uint64)
    changes = np.empty(len(new) * 4, np.uint16)
    count = int(kernels().list_changes(indices, old, new, positions, changes))
    return Section(positions[:count], changes[:count])


def encode(section: Section) -> bytes:
    """Return a section, whose positions grow, as bytes. Raises BackendUnavailableError."""
    first = int(section.positions[0]) if len(section.positions) else 0
    signed = section.changes.view(np.int16)
    sizes = np.where(signed < 0, -section.changes, section.changes)
    others = np.flatnonzero(sizes != 1)
    small, large = _split(sizes[others])
    parts = [
        _gaps(section.positions - np.uint64(first)),
        np.packbits(signed < 0),
        _gaps(others.astype(np.uint64)),
        small,
        large,
    ]
    packed = [_compressed(part) for part in parts]
    lengths = [len(parts[0]), len(parts[2]), len(small), len(large), *map(len, packed)]
    head = _HEAD.pack(VALUES_MAGIC, len(section.positions), first, *lengths)
    return b"".join([head, *packed])


def section_nbytes(data: bytes | memoryview) -> int | None:
    """Return the size of the section that begins here; None where its head is not complete.

    Raises ProtocolError for something else.
    """
    if len(data) < _HEAD.size:
        return None
    magic, _, _, _, _, _, _, *sizes = _HEAD.unpack_from(data)
    if magic != VALUES_MAGIC or max(sizes) > _MOST_NBYTES:
        raise ProtocolError("the head of a section is damaged")
    return _HEAD.size + int(sum(sizes))


def decode(data: bytes | memoryview, values: int) -> Section:
    """Return the section of these bytes, whose positions are below `values`.

    Raises ProtocolError for bytes that are damaged. Takes at most 1/50 of the model's bytes.
    """
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise ProtocolError(f"a section of {len(view)} bytes is too short")
    magic, count, first, *lengths = _HEAD.unpack_from(view)
    gap_count, other_gaps, other_count, large_count, *sizes = lengths
    most = count + values // _CONTINUED + 1
    if (
        magic != VALUES_MAGIC
        or max(count, first) > values
        or count > _MOST_VALUES
        or max(gap_count, other_gaps) > most
        or max(other_count, large_count) > count
    ):
        raise ProtocolError("the head of a section is damaged")
    ends = np.cumsum([_HEAD.size, *sizes]).tolist()
    if ends[-1] != len(view):
        raise ProtocolError(f"a section of {len(view)} bytes is cut off")
    kinds: list[tuple[type[np.unsignedinteger[Any]], int]] = [
        (np.uint8, gap_count),
        (np.uint8, -(-count // 8)),
        (np.uint8, other_gaps),
        (np.uint8, other_count),
        (np.uint16, large_count),
    ]
    gaps, signs, further, small, large = (
        _decompressed(view[begin:end], kind, n)
        for (begin, end), (kind, n) in zip(pairwise(ends), kinds, strict=True)
    )
    positions = _places(gaps, count, values - first) + np.uint64(first)
    changes = np.ones(count, np.uint16)
    changes[_places(further, other_count, count)] = _joined(small, large, np.uint16)
    negative = np.unpackbits(signs, count=count).astype(np.uint16)
    return Section(positions, (changes ^ -negative) + negative)


def _gaps(places: npt.NDArray[np.uint64]) -> _Bytes:
    """Return the gaps between growing numbers as bytes; after each 255 a gap goes on."""
    gaps = np.diff(places, prepend=np.uint64(0))
    more = (gaps // np.uint64(_CONTINUED)).astype(np.int64)
    written = np.full(len(gaps) + int(more.sum()), _CONTINUED, np.uint8)
    written[np.cumsum(more + 1) - 1] = gaps % np.uint64(_CONTINUED)
    return written


def _places(gaps: _Bytes, count: int, limit: int) -> npt.NDArray[np.uint64]:
    """Undo `_gaps`. Raises ProtocolError unless these are `count` growing numbers below `limit`."""
    sums = np.cumsum(gaps, dtype=np.uint64)
    places: npt.NDArray[np.uint64] = sums[gaps != _CONTINUED]
    if len(places) != count or (len(gaps) and gaps[-1] == _CONTINUED):
        raise ProtocolError("the numbers of a section do not fit together")
    if count and (int(places[-1]) >= limit or (places[1:] <= places[:-1]).any()):
        raise ProtocolError("a section has positions that are repeated or beyond the model")
    return places


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
            f"{install_hint('delta')}"
        )
    return bytes(module.ZstdCompressor(level=LEVEL).compress(part.tobytes()))


def _decompressed(
    data: memoryview, kind: type[np.unsignedinteger[Any]], count: int
) -> npt.NDArray[Any]:
    """Return `count` numbers. Raises ProtocolError for other data, before it allocates more."""
    module: Any = zstd()
    if module is None:
        raise BackendUnavailableError(
            f"zstandard is not installed, which unpacks deltas: {install_hint('delta')}"
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
