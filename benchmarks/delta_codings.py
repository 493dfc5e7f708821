"""Bytes and speed of codings of changed bf16 values: weightsync's, variants of it, and others'.

    python -m benchmarks.delta_codings [--recorded FILE] [--values 16777216] [--share 0.01]

The changes are those of recorded steps (benchmarks.record_steps: one layer of a real model), and
random ones, one unit in the last place up or down. Each coding is checked: it decodes to what was
coded. The others' codings are in benchmarks/peer_codings.py, which names their descriptions. Prints
Markdown tables, or JSON with --json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import numpy.typing as npt
import zstandard

from benchmarks.changes import RECORDED, read_step, recorded_steps
from benchmarks.peer_codings import PEERS, Bits, Flat, Pair, PeerCoding, WholeXor
from benchmarks.shapes import smollm2
from weightsync.weights.deltas import coding as delta_coding
from weightsync.weights.deltas.coding import SECTION_VALUES, VALUES, Section, decode, encode

T = TypeVar("T")
Positions = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Decoded = tuple[Positions, Bits]
"""The positions of the changed values, and their new bits."""

VALUES_OF_RANDOM = 1 << 24
SHARE_OF_RANDOM = 0.01
COLUMNS = 4096
"""The length of the rows of a tensor of random values."""
FIRST_LAYER = "model.layers.0."
SECONDS = 0.2
"""Seconds for which a coding is repeated; the fastest turn counts."""
_CONTINUED = 255
_COUNT = struct.Struct("<I")


class Stream(NamedTuple):
    """The bits of tensors one after the other, and the start, end and columns of each tensor."""

    bits: Bits
    tensors: tuple[tuple[int, int, int], ...]

    def flat(self) -> list[Flat]:
        """Return the tensors."""
        return [Flat(self.bits[start:end], columns) for start, end, columns in self.tensors]


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The values of a stream that changed: `positions` (growing), and the bits `now` and `before`.

    `old` is the whole stream, `new` its bits after the change.
    """

    name: str
    positions: Positions
    before: Bits
    now: Bits
    old: Stream
    new: Bits

    @classmethod
    def between(cls, name: str, positions: Positions, old: Stream, now: Bits) -> Changes:
        """Return changes of `old` at `positions`."""
        new = old.bits.copy()
        new[positions] = now
        before = old.bits[positions]
        return cls(name=name, positions=positions, before=before, now=now, old=old, new=new)

    @cached_property
    def pairs(self) -> list[Pair]:
        """The tensors before and after the change."""
        ends = [(start, end) for start, end, _ in self.old.tensors]
        flats = zip(self.old.flat(), ends, strict=True)
        return [Pair(flat, self.new[start:end]) for flat, (start, end) in flats]


@dataclass(frozen=True, slots=True)
class Coding:
    """A coding of changes as bytes. `decode` is also given the stream that a receiver has."""

    name: str
    encode: Callable[[Changes], bytes]
    decode: Callable[[bytes, Stream], Decoded]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One coding of one set of changes; the speeds are in million changed values a second."""

    changes: str
    coding: str
    count: int
    nbytes_per_value: float
    encoded_per_us: float
    decoded_per_us: float


# Changes


def recorded(path: Path) -> Iterator[Changes]:
    """Yield the recorded steps, their tensors one after the other as in a stream."""
    layer = [tensor for tensor in smollm2() if tensor.name.startswith(FIRST_LAYER)]
    for step in recorded_steps(path):
        found = read_step(step, path)
        positions, before, now, tensors, start = [], [], [], [], 0
        for tensor in layer:
            one = found[tensor.name.removeprefix(FIRST_LAYER)]
            positions.append((one.positions + start).astype(np.uint64))
            before.append(one.before)
            now.append(one.now)
            size = math.prod(tensor.shape)
            tensors.append((start, start + size, tensor.shape[-1]))
            start += -(-size // VALUES) * VALUES
        places = np.concatenate(positions)
        old = random_bits(start)
        old[places] = np.concatenate(before)
        rate, _, number = step.partition("/")
        stream = Stream(old, tuple(tensors))
        yield Changes.between(f"{rate}, step {number}", places, stream, np.concatenate(now))


def random_changes(values: int, share: float) -> Changes:
    """Return changes of a share of random values to a neighbour."""
    random = np.random.default_rng(0)
    old = random_bits(values)
    positions = np.flatnonzero(random.random(values) < share).astype(np.uint64)
    steps = random.integers(0, 2, len(positions)) * 2 - 1
    now = old[positions] + steps.astype(np.uint16)
    return Changes.between(f"random, {share:.1%}", positions, one_tensor(old), now)


def one_tensor(bits: Bits) -> Stream:
    """Return a stream of one tensor."""
    return Stream(bits, ((0, len(bits), COLUMNS),))


def random_bits(values: int) -> Bits:
    """Return the bits of normal bf16 values."""
    random = np.random.default_rng(1)
    drawn = random.normal(0, 0.02, values).astype(np.float32)
    return (drawn.view(np.uint32) >> 16).astype(np.uint16)


# weightsync's coding, and the same with other numbers in place of the differences


@contextmanager
def at_level(level: int) -> Iterator[None]:
    """Have weightsync's coding use a level of zstd."""
    usual, delta_coding.LEVEL = delta_coding.LEVEL, level
    try:
        yield
    finally:
        delta_coding.LEVEL = usual


def ours(
    name: str,
    change: Callable[[Changes], Bits] = lambda changes: changes.now - changes.before,
    apply: Callable[[Bits, Bits], Bits] = lambda before, change: before + change,
    *,
    level: int = delta_coding.LEVEL,
) -> Coding:
    """Return weightsync's coding, of what `change` returns and `apply` undoes."""

    def encoded(changes: Changes) -> bytes:
        numbers = change(changes)
        with at_level(level):
            return _framed(
                encode(Section(changes.positions[part], numbers[part]))
                for part in _sections(len(numbers))
            )

    def decoded(data: bytes, old: Stream) -> Decoded:
        sections = [decode(frame, len(old.bits)) for frame in _frames(data)]
        positions = np.concatenate([section.positions for section in sections])
        numbers = np.concatenate([section.changes for section in sections])
        return positions, apply(old.bits[positions], numbers)

    return Coding(name, encoded, decoded)


def _sections(count: int) -> list[slice]:
    return [slice(i, i + SECTION_VALUES) for i in range(0, max(count, 1), SECTION_VALUES)]


# Other ways to write the parts of weightsync's coding


def continued(gaps: npt.NDArray[np.uint64]) -> Bytes:
    """Return gaps as bytes: each 255 adds 255 to the gap that the next bytes continue."""
    more = (gaps // np.uint64(_CONTINUED)).astype(np.int64)
    written = np.full(len(gaps) + int(more.sum()), _CONTINUED, np.uint8)
    written[np.cumsum(more + 1) - 1] = gaps % np.uint64(_CONTINUED)
    return written


def places_of(written: Bytes) -> Positions:
    """Return the sums of the gaps that `continued` wrote."""
    sums: Positions = np.cumsum(written, dtype=np.uint64)[written != _CONTINUED]
    return sums


def escaped(numbers: npt.NDArray[Any]) -> tuple[Bytes, npt.NDArray[Any]]:
    """Return a byte for each number, and apart those that do not fit."""
    fits = numbers < _CONTINUED
    return np.where(fits, numbers, _CONTINUED).astype(np.uint8), numbers[~fits]


def unescaped(small: Bytes, large: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Undo `escaped`."""
    numbers = small.astype(large.dtype)
    numbers[small == _CONTINUED] = large
    return numbers


class Parts:
    """A coding made of parts that zstd compresses: of the gaps, and of the differences.

    `one_frame` compresses all parts together.
    """

    def __init__(
        self, *, continues: bool, signs: bool, planes: bool = False, one_frame: bool = False
    ) -> None:
        self._continues, self._signs = continues, signs
        self._planes, self._one_frame = planes, one_frame

    def encode(self, changes: Changes) -> bytes:
        """Return the changes as bytes."""
        gaps = np.diff(changes.positions, prepend=np.uint64(0))
        if self._continues:
            parts: list[npt.NDArray[Any]] = [continued(gaps)]
        else:
            small, far = escaped(gaps)
            parts = [small, far.view(np.uint8).reshape(-1, 8).T.copy() if self._planes else far]
        differences = (changes.now - changes.before).view(np.int16)
        if self._signs:
            sizes = np.abs(differences.astype(np.int32)).astype(np.uint16)
            others = np.flatnonzero(sizes != 1)
            parts += [
                np.packbits(differences < 0),
                continued(np.diff(others, prepend=0).astype(np.uint64)),
                *escaped(sizes[others]),
            ]
        else:
            parts += escaped(((differences << 1) ^ (differences >> 15)).view(np.uint16))
        packed = [part.tobytes() for part in parts]
        if self._one_frame:
            return _framed([_zstd(_framed(packed), 1)])
        return _framed(_zstd(part, 1) for part in packed)

    def decode(self, data: bytes, old: Stream) -> Decoded:
        """Return what was encoded."""
        unpacked = list(map(_unzstd, _frames(data)))
        frames = iter(_frames(unpacked[0]) if self._one_frame else unpacked)
        positions = self._positions(frames)
        if self._signs:
            negative = np.unpackbits(np.frombuffer(next(frames), np.uint8), count=len(positions))
            others = places_of(np.frombuffer(next(frames), np.uint8))
            sizes = np.ones(len(positions), np.uint16)
            sizes[others] = _unescaped(frames, np.uint16)
            differences = np.where(negative, -sizes, sizes)
        else:
            zigzag = _unescaped(frames, np.uint16)
            differences = (zigzag >> 1) ^ -(zigzag & 1)
        return positions, old.bits[positions] + differences

    def _positions(self, frames: Iterator[bytes]) -> Positions:
        if self._continues:
            return places_of(np.frombuffer(next(frames), np.uint8))
        if not self._planes:
            return np.cumsum(_unescaped(frames, np.uint64), dtype=np.uint64)
        small = np.frombuffer(next(frames), np.uint8)
        far = np.frombuffer(next(frames), np.uint8).reshape(8, -1).T.copy().view(np.uint64)
        return np.cumsum(unescaped(small, far.ravel()), dtype=np.uint64)


def _unescaped(frames: Iterator[bytes], kind: type[np.unsignedinteger[Any]]) -> npt.NDArray[Any]:
    small = np.frombuffer(next(frames), np.uint8)
    return unescaped(small, np.frombuffer(next(frames), kind))


# Others' codings


def of_peer(peer: PeerCoding) -> Coding:
    """Return the coding of another library, which codes tensor by tensor."""

    def decoded(data: bytes, old: Stream) -> Decoded:
        starts = [start for start, _, _ in old.tensors]
        found = list(zip(starts, peer.decode(data, old.flat()), strict=True))
        positions = np.concatenate([at + start for start, (at, _) in found])
        return positions.astype(np.uint64), np.concatenate([now for _, (_, now) in found])

    return Coding(peer.name, lambda changes: peer.encode(changes.pairs), decoded)


def _zstd(data: bytes, level: int) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(data)


def _unzstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def _framed(frames: Iterator[bytes] | Sequence[bytes]) -> bytes:
    return b"".join(_COUNT.pack(len(frame)) + frame for frame in frames)


def _frames(data: bytes) -> list[bytes]:
    frames, at = [], 0
    while at < len(data):
        begin = at + _COUNT.size
        at = begin + _COUNT.unpack_from(data, at)[0]
        frames.append(data[begin:at])
    return frames


def codings() -> list[Coding]:
    """Return all codings, weightsync's first."""
    alternatives = {
        "gaps beyond a byte in planes": Parts(continues=False, signs=False, planes=True),
        "all parts in one frame": Parts(continues=False, signs=False, one_frame=True),
        "gaps continued after 255": Parts(continues=True, signs=False),
        "signs as bits, others apart": Parts(continues=False, signs=True),
        "gaps in planes, signs as bits": Parts(continues=False, signs=True, planes=True),
    }
    return [
        ours("weightsync"),
        *(ours(f"weightsync, zstd {level}", level=level) for level in (3, 9, 19)),
        ours("weightsync, xor of bits", lambda c: c.now ^ c.before, np.bitwise_xor),
        ours("weightsync, new values", lambda c: c.now, lambda _, now: now),
        *(Coding(name, parts.encode, parts.decode) for name, parts in alternatives.items()),
        *map(of_peer, (*PEERS, WholeXor("xor of whole tensors, zstd 3 (SkyRL)", 3))),
    ]


# Measurements


def measure(coding: Coding, changes: Changes, seconds: float) -> Measured:
    """Measure one coding. Raises ValueError where it decodes to something else."""
    encode_s, data = _fastest(lambda: coding.encode(changes), seconds)
    decode_s, (positions, now) = _fastest(lambda: coding.decode(data, changes.old), seconds)
    if not (np.array_equal(positions, changes.positions) and np.array_equal(now, changes.now)):
        raise ValueError(f"{coding.name} decodes {changes.name} to other values")
    count = max(len(changes.positions), 1)
    return Measured(
        changes=changes.name,
        coding=coding.name,
        count=count,
        nbytes_per_value=len(data) / count,
        encoded_per_us=count / encode_s / 1e6,
        decoded_per_us=count / decode_s / 1e6,
    )


def _fastest(call: Callable[[], T], seconds: float) -> tuple[float, T]:
    best, ends = float("inf"), time.perf_counter() + seconds
    while True:
        started = time.perf_counter()
        result = call()
        best = min(best, time.perf_counter() - started)
        if time.perf_counter() >= ends:
            return best, result


def sizes_table(measured: Sequence[Measured]) -> str:
    """Return bytes per changed value as a Markdown table: codings by changes."""
    columns = list(dict.fromkeys(one.changes for one in measured))
    headings = [*columns[:-1], "all recorded", columns[-1]]
    lines = ["| coding | " + " | ".join(headings) + " |", "|---|" + "---:|" * len(headings)]
    for name in dict.fromkeys(one.coding for one in measured):
        ones = [one for one in measured if one.coding == name]
        sizes = [one.nbytes_per_value for one in ones]
        counts = [one.count for one in ones]
        sizes.insert(-1, np.average(sizes[:-1], weights=counts[:-1]).item())
        lines.append(f"| {name} | " + " | ".join(f"{size:.2f}" for size in sizes) + " |")
    return "\n".join(lines)


def speeds_table(measured: Sequence[Measured], changes: str) -> str:
    """Return the speeds with one set of changes as a Markdown table."""
    lines = [
        f"| {changes}: coding | bytes per value | coded, million/s | decoded, million/s |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {one.coding} | {one.nbytes_per_value:.3f} | {one.encoded_per_us:.1f} | "
        f"{one.decoded_per_us:.1f} |"
        for one in measured
        if one.changes == changes
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure all codings of all changes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recorded", type=Path, default=RECORDED)
    parser.add_argument("--values", type=int, default=VALUES_OF_RANDOM)
    parser.add_argument("--share", type=float, default=SHARE_OF_RANDOM)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    sets = [*recorded(options.recorded), random_changes(options.values, options.share)]
    measured = [
        measure(coding, changes, options.seconds) for changes in sets for coding in codings()
    ]
    if options.json:
        print(json.dumps([asdict(one) for one in measured]))
        return
    print(sizes_table(measured))
    largest = max(sets[:-1], key=lambda changes: len(changes.positions))
    for changes in (largest, sets[-1]):
        print("", speeds_table(measured, changes.name), sep="\n")


if __name__ == "__main__":
    main()
