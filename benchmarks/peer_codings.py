"""Codings of changed values that other libraries use, written anew after their descriptions.

- Indices of 32 bits and values: TRL (huggingface/trl#5417).
- Gaps of 16 bits and the xor of values, all tensors in one zstd frame: NeMo RL
  (NVIDIA-NeMo/RL#2444, docs/design-docs/sparse-delta-refit.md there).
- Gaps between rows, gaps between the columns of a row, and values, all tensors in one zstd frame:
  PULSE (arXiv:2602.03839; version 3.1 of the sparse codec of one-covenant/grail, its default).
- The xor of whole tensors, a zstd frame for each: SkyRL (NovaSky-AI/SkyRL#1903).

Both sides know the names, shapes and order of the tensors, so a body has none of them.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

Bits = npt.NDArray[np.uint16]
Positions = npt.NDArray[np.int64]
Decoded = tuple[Positions, Bits]
"""The positions of the values of a tensor that changed, and their new bits."""
Unsigned = type[np.unsignedinteger[Any]]

_LENGTH = struct.Struct("<Q")


class Flat(NamedTuple):
    """The values of a tensor as bits (`uint16[n]`), and the length of its rows."""

    bits: Bits
    columns: int


@dataclass(frozen=True)
class Pair:
    """A tensor as the receivers have it, and its new bits."""

    old: Flat
    new: Bits

    @cached_property
    def positions(self) -> Positions:
        """The positions of the values that changed, growing. Found at the first use."""
        return np.flatnonzero(self.old.bits != self.new)


class PeerCoding(ABC):
    """A coding of what changed in the tensors of a model, as one body."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def encode(self, pairs: Iterable[Pair]) -> bytes:
        """Return the changes of all tensors as bytes."""

    @abstractmethod
    def decode(self, body: bytes, old: Sequence[Flat]) -> Iterator[Decoded]:
        """Yield what changed in each tensor. `old` are the tensors as the receiver has them."""

    def apply(self, body: bytes, tensors: Sequence[Flat]) -> None:
        """Write the changes to the tensors of a receiver."""
        for tensor, (positions, now) in zip(tensors, self.decode(body, tensors), strict=True):
            tensor.bits[positions] = now


class IndicesAndValues(PeerCoding):
    """Indices of 32 bits and values, not compressed."""

    def encode(self, pairs: Iterable[Pair]) -> bytes:
        found = [(pair.positions.astype(np.uint32), pair.new[pair.positions]) for pair in pairs]
        counts = np.array([len(now) for _, now in found], np.uint32)
        return _joined([counts, *(at for at, _ in found), *(now for _, now in found)])

    def decode(self, body: bytes, old: Sequence[Flat]) -> Iterator[Decoded]:
        parts = _Parts(body)
        counts = parts.take(np.uint32, len(old)).tolist()
        indices = [parts.take(np.uint32, count) for count in counts]
        for at in indices:
            yield at.astype(np.int64), parts.take(np.uint16, len(at))


class GapsAndXor(PeerCoding):
    """Gaps of 16 bits (32 in tensors where one is larger) and the xor of values, compressed."""

    def __init__(self, name: str, level: int) -> None:
        super().__init__(name)
        self._level = level

    def encode(self, pairs: Iterable[Pair]) -> bytes:
        gaps, flips = [], []
        for pair in pairs:
            at = pair.positions
            gaps.append(_narrow(np.diff(at, prepend=-1) - 1, (np.uint16, np.uint32)))
            flips.append(pair.new[at] ^ pair.old.bits[at])
        counts, widths = _counts_and_widths(gaps)
        return _packed(_joined([counts, widths, *gaps, *flips]), self._level)

    def decode(self, body: bytes, old: Sequence[Flat]) -> Iterator[Decoded]:
        parts = _Parts(_unpacked(body))
        gaps = parts.take_each(*parts.counts_and_widths(len(old)))
        for tensor, between in zip(old, gaps, strict=True):
            at = np.cumsum(between, dtype=np.int64) + np.arange(len(between))
            yield at, parts.take(np.uint16, len(at)) ^ tensor.bits[at]


class RowsAndColumns(PeerCoding):
    """Gaps between rows (8 bits) and between the columns of a row (16 bits), values, compressed.

    The first column of a row is written as it is. Larger numbers make a tensor's gaps wider.
    """

    def __init__(self, name: str, level: int) -> None:
        super().__init__(name)
        self._level = level

    def encode(self, pairs: Iterable[Pair]) -> bytes:
        down, right, values = [], [], []
        for pair in pairs:
            rows, columns = np.divmod(pair.positions, pair.old.columns)
            row_gaps = np.diff(rows, prepend=0)
            column_gaps = np.diff(columns, prepend=0)
            column_gaps[row_gaps != 0] = columns[row_gaps != 0]
            down.append(_narrow(row_gaps, (np.uint8, np.uint16, np.uint32)))
            right.append(_narrow(column_gaps, (np.uint16, np.uint32)))
            values.append(pair.new[pair.positions])
        counts, row_widths = _counts_and_widths(down)
        _, column_widths = _counts_and_widths(right)
        body = _joined([counts, row_widths, column_widths, *down, *right, *values])
        return _packed(body, self._level)

    def decode(self, body: bytes, old: Sequence[Flat]) -> Iterator[Decoded]:
        parts = _Parts(_unpacked(body))
        counts, row_widths = parts.counts_and_widths(len(old))
        column_widths = parts.take(np.uint8, len(old)).tolist()
        down = parts.take_each(counts, row_widths)
        right = parts.take_each(counts, column_widths)
        for tensor, row_gaps, column_gaps in zip(old, down, right, strict=True):
            sums = np.cumsum(column_gaps, dtype=np.int64)
            # What the sum had before a row began, for each of the row's values.
            before = np.maximum.accumulate(np.where(row_gaps, sums - column_gaps, 0))
            at = np.cumsum(row_gaps, dtype=np.int64) * tensor.columns + sums - before
            yield at, parts.take(np.uint16, len(at))


class WholeXor(PeerCoding):
    """The xor of whole tensors, each compressed."""

    def __init__(self, name: str, level: int) -> None:
        super().__init__(name)
        self._level = level

    def encode(self, pairs: Iterable[Pair]) -> bytes:
        frames = []
        for pair in pairs:
            frame = _packed((pair.old.bits ^ pair.new).data, self._level)
            frames += [_LENGTH.pack(len(frame)), frame]
        return b"".join(frames)

    def decode(self, body: bytes, old: Sequence[Flat]) -> Iterator[Decoded]:
        for tensor, flips in zip(old, self._flips(body), strict=True):
            at = np.flatnonzero(flips)
            yield at, tensor.bits[at] ^ flips[at]

    def apply(self, body: bytes, tensors: Sequence[Flat]) -> None:
        for tensor, flips in zip(tensors, self._flips(body), strict=True):
            np.bitwise_xor(tensor.bits, flips, out=tensor.bits)

    def _flips(self, body: bytes) -> Iterator[Bits]:
        view, at = memoryview(body), 0
        while at < len(view):
            begin = at + _LENGTH.size
            at = begin + _LENGTH.unpack_from(view, at)[0]
            yield np.frombuffer(_unpacked(view[begin:at]), np.uint16)


class _Parts:
    """The arrays of a body, one after the other."""

    def __init__(self, body: bytes) -> None:
        self._body, self._at = body, 0

    def take(self, kind: Unsigned, count: int) -> npt.NDArray[Any]:
        """Return the next `count` numbers."""
        taken = np.frombuffer(self._body, kind, count, self._at)
        self._at += taken.nbytes
        return taken

    def take_each(
        self, counts: Sequence[int], widths: Sequence[int]
    ) -> list[npt.NDArray[np.unsignedinteger[Any]]]:
        """Return the next arrays of unsigned numbers, of these lengths and bytes each."""
        kinds: dict[int, Unsigned] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
        each = zip(counts, widths, strict=True)
        return [self.take(kinds[width], count) for count, width in each]

    def counts_and_widths(self, tensors: int) -> tuple[list[int], list[int]]:
        """Return what `_counts_and_widths` wrote."""
        counts = self.take(np.uint32, tensors).tolist()
        return counts, self.take(np.uint8, tensors).tolist()


def _counts_and_widths(
    parts: Sequence[npt.NDArray[Any]],
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
    """Return the lengths of arrays, and the bytes of their numbers."""
    counts = np.array([len(part) for part in parts], np.uint32)
    return counts, np.array([part.itemsize for part in parts], np.uint8)


def _narrow(numbers: Positions, kinds: Sequence[Unsigned]) -> npt.NDArray[Any]:
    """Return the numbers in the first kind that has room for all of them."""
    most = int(numbers.max(initial=0))
    return numbers.astype(next(kind for kind in kinds if most <= np.iinfo(kind).max))


def _joined(parts: Iterable[npt.NDArray[Any]]) -> bytes:
    return b"".join(part.data for part in parts)


def _packed(data: bytes | memoryview, level: int) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(data)


def _unpacked(data: bytes | memoryview) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


INDICES = IndicesAndValues("indices of 32 bits and values (TRL)")
GAPS = GapsAndXor("gaps of 16 bits and xor of values, zstd 1 (NeMo RL)", 1)
ROWS = RowsAndColumns("gaps of rows and columns and values, zstd 1 (PULSE)", 1)
XOR = WholeXor("xor of whole tensors, zstd 1 (SkyRL)", 1)
PEERS: tuple[PeerCoding, ...] = (INDICES, GAPS, ROWS, XOR)
