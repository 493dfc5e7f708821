"""Bytes and speed of codings of changed bf16 values: weightsync's, variants of it, and others'.

    python -m benchmarks.delta_codings [--recorded FILE] [--values 16777216] [--share 0.01]

The changes are those of recorded steps (benchmarks.record_steps: one layer of a real model), and
random ones, one unit in the last place up or down. Each coding is checked: it decodes to what was
coded. Others' codings are written anew after their public descriptions: indices and values (TRL,
huggingface/trl#5417), gaps of 16 bits or varints and values (NVIDIA-NeMo/RL#2444, PULSE's grail),
and the xor of whole tensors (NovaSky-AI/SkyRL#1903). Prints Markdown tables, or JSON with --json.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import numpy.typing as npt
import zstandard

from weightsync.cli.bench_receiver import smollm2
from weightsync.weights import delta_coding
from weightsync.weights.delta_coding import SECTION_VALUES, VALUES, Section, decode, encode

T = TypeVar("T")
Bits = npt.NDArray[np.uint16]
Positions = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Decoded = tuple[Positions, Bits]
"""The positions of the changed values, and their new bits."""

RECORDED = Path(__file__).parent / "recorded_steps.npz"
VALUES_OF_RANDOM = 1 << 24
SHARE_OF_RANDOM = 0.01
SECONDS = 0.2
"""Seconds for which a coding is repeated; the fastest turn counts."""
LAYER = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)
"""The tensors of a layer, in the order of their shapes in `smollm2`."""
_CONTINUED = 255
_COUNT = struct.Struct("<I")


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The values of a stream that changed: `positions` (growing), and the bits `now` and `before`.

    `old` and `new` are the bits of the whole stream.
    """

    name: str
    positions: Positions
    before: Bits
    now: Bits
    old: Bits
    new: Bits

    @classmethod
    def between(cls, name: str, positions: Positions, old: Bits, now: Bits) -> Changes:
        """Return changes of `old` at `positions`."""
        new = old.copy()
        new[positions] = now
        before = old[positions]
        return cls(name=name, positions=positions, before=before, now=now, old=old, new=new)


@dataclass(frozen=True, slots=True)
class Coding:
    """A coding of changes as bytes. `decode` is also given the old bits, as a receiver has them."""

    name: str
    encode: Callable[[Changes], bytes]
    decode: Callable[[bytes, Bits], Decoded]


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
    sizes = [shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in smollm2()[1:10]]
    with np.load(path) as file:
        arrays = dict(file)
    for step in sorted({tuple(key.split("/")[:2]) for key in arrays}):
        positions, before, now, start = [], [], [], 0
        for name, size in zip(LAYER, sizes, strict=True):
            key = next(k for k in arrays if k.startswith("/".join(step)) and f".{name}." in k)
            key = key.rpartition("/")[0]
            gaps = arrays[f"{key}/gaps"]
            positions.append(np.cumsum(gaps, dtype=np.uint64) + np.uint64(start))
            before.append(arrays[f"{key}/before"])
            now.append(arrays[f"{key}/now"])
            start += -(-size // VALUES) * VALUES
        places = np.concatenate(positions)
        old = random_bits(start)
        old[places] = np.concatenate(before)
        yield Changes.between(f"{step[0]}, step {step[1]}", places, old, np.concatenate(now))


def random_changes(values: int, share: float) -> Changes:
    """Return changes of a share of random values to a neighbour."""
    random = np.random.default_rng(0)
    old = random_bits(values)
    positions = np.flatnonzero(random.random(values) < share).astype(np.uint64)
    steps = random.integers(0, 2, len(positions)) * 2 - 1
    now = old[positions] + steps.astype(np.uint16)
    return Changes.between(f"random, {share:.1%}", positions, old, now)


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

    def decoded(data: bytes, old: Bits) -> Decoded:
        sections = [decode(frame, len(old)) for frame in _frames(data)]
        positions = np.concatenate([section.positions for section in sections])
        numbers = np.concatenate([section.changes for section in sections])
        return positions, apply(old[positions], numbers)

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

    def decode(self, data: bytes, old: Bits) -> Decoded:
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
        return positions, old[positions] + differences

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


def indices_and_values() -> Coding:
    """Return indices of 32 bits and values, not compressed."""

    def encoded(changes: Changes) -> bytes:
        return changes.positions.astype(np.uint32).tobytes() + changes.now.tobytes()

    def decoded(data: bytes, _: Bits) -> Decoded:
        count = len(data) // 6
        positions = np.frombuffer(data, np.uint32, count).astype(np.uint64)
        return positions, np.frombuffer(data, np.uint16, offset=4 * count)

    return Coding("indices of 32 bits and values (TRL)", encoded, decoded)


def gaps_and_values(level: int) -> Coding:
    """Return gaps of 16 bits (32 where one is larger) and values, compressed."""

    def encoded(changes: Changes) -> bytes:
        gaps = np.diff(changes.positions, prepend=np.uint64(0))
        kind = np.uint16 if not len(gaps) or int(gaps.max()) < 1 << 16 else np.uint32
        parts = [gaps.astype(kind).tobytes(), changes.now.tobytes()]
        return _framed(_zstd(part, level) for part in parts)

    def decoded(data: bytes, _: Bits) -> Decoded:
        gaps, values = map(_unzstd, _frames(data))
        kind = np.uint16 if len(gaps) == len(values) else np.uint32
        positions = np.cumsum(np.frombuffer(gaps, kind), dtype=np.uint64)
        return positions, np.frombuffer(values, np.uint16)

    return Coding(f"gaps of 16 bits and values, zstd {level} (NeMo RL)", encoded, decoded)


def varints_and_values(level: int) -> Coding:
    """Return gaps as varints of seven bits a byte, and values, compressed."""

    def encoded(changes: Changes) -> bytes:
        gaps = np.diff(changes.positions, prepend=np.uint64(0))
        groups = gaps[:, None] >> np.arange(0, 35, 7, dtype=np.uint64)
        used = groups > 0
        used[:, 0] = True
        written = (groups & np.uint64(127)).astype(np.uint8)
        written[:, :-1] |= used[:, 1:].astype(np.uint8) << 7
        parts = [written[used].tobytes(), changes.now.tobytes()]
        return _framed(_zstd(part, level) for part in parts)

    def decoded(data: bytes, _: Bits) -> Decoded:
        varints, values = map(_unzstd, _frames(data))
        written = np.frombuffer(varints, np.uint8)
        ends = np.flatnonzero(written < 128)
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])[: len(ends)]
        shifts = np.arange(len(written)) - np.repeat(starts, ends - starts + 1)
        groups = (written & 127).astype(np.uint64) << (7 * shifts).astype(np.uint64)
        gaps = np.add.reduceat(groups, starts) if len(ends) else groups
        return np.cumsum(gaps, dtype=np.uint64), np.frombuffer(values, np.uint16)

    return Coding(f"varint gaps and values, zstd {level} (PULSE)", encoded, decoded)


def whole_xor(level: int) -> Coding:
    """Return the xor of whole tensors, compressed."""

    def encoded(changes: Changes) -> bytes:
        return _zstd((changes.old ^ changes.new).tobytes(), level)

    def decoded(data: bytes, old: Bits) -> Decoded:
        change = np.frombuffer(_unzstd(data), np.uint16)
        positions = np.flatnonzero(change)
        return positions.astype(np.uint64), old[positions] ^ change[positions]

    return Coding(f"xor of whole tensors, zstd {level} (SkyRL)", encoded, decoded)


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
        indices_and_values(),
        gaps_and_values(1),
        varints_and_values(1),
        whole_xor(1),
        whole_xor(3),
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
