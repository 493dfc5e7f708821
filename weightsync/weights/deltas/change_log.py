"""Deltas: an update that carries only the lines of a model that changed since a known base.

The sender's `ChangeLog` finds the changed lines of its source and remembers those of the last few
versions, so that receivers with an older base can be served too. A `DeltaSource` packs the lines
into packets, tensors of bytes that any backend carries. The receiver's `DeltaTarget` writes them to
memory that holds the base, and checks the result: the sum of the lines that were overwritten, and
of the new ones as read back, has to change the base's fingerprint into the sender's.
"""

from __future__ import annotations

import math
import operator
import struct
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.errors import DeltaError, ProtocolError, VerificationError
from weightsync.specs import Manifest, TensorSpec
from weightsync.weights.copying import arena
from weightsync.weights.copying.checksums import MASK, to_hex
from weightsync.weights.copying.copy_plan import Memory
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.deltas.coding import (
    SECTION_VALUES,
    VALUES,
    Section,
    changed_values,
    decode,
    encode,
    section_nbytes,
)
from weightsync.weights.lines.memory import (
    LINE,
    MAX_LINES,
    WORDS,
    Indices,
    LineBuffer,
    LineMemory,
    LineSample,
    LineTable,
    Marks,
    Words,
    are_growing,
    count_lines,
    count_marked,
    mark,
    new_marks,
)
from weightsync.weights.lines.patches import RecordingLines
from weightsync.weights.lines.stream_lines import StreamLines
from weightsync.weights.sinks.base import LoadTarget, NamedTensor
from weightsync.weights.sources.base import WeightSource, Writers
from weightsync.weights.tensor_kinds import Shared
from weightsync.wire.messages import DeltaTerms

KEPT_VERSIONS = 8
"""Versions whose changed lines a sender remembers: for each, a bit for every 64 bytes."""
_PACKET_LINES = 30_720
"""Lines of a packet: it fills a bucket of 2 MiB."""
_BLOCK_LINES = 4096
"""Lines that are compared with the copy at a time: a cache holds them."""
_HEADER = struct.Struct("<QQ")
_HEADER_NBYTES = LINE
_LINES_MAGIC = 0x7773_6C69_6E65_0001
_END = struct.Struct("<QQQQQQQ")
_END_MAGIC = 0x7773_656E_6421_0001
_SLACK = 1.15
"""Room for more lines than the estimate, which has looked at one in 512."""
_NAME = operator.attrgetter("name")
_CODED_MAGIC = 0x7773_6C69_6E65_0002
_CODED_NBYTES = (2 << 20) + LINE
"""Bytes of a packet of coded values: in a bucket of 4 MiB it is alone, and goes as soon as it is
written. The backend `tcp` does not send the zeros at its end."""
_CODED_LINE_NBYTES, _LEAST_LINE_NBYTES = 40, 4
"""Room for a changed line, coded: a byte or so for each value, of which all may have changed. Later
deltas have room for twice as much as the last one took."""
_JUDGED_SHARE, _TOO_MUCH = 1 / 16, 0.6
"""A delta that `gives_up` is coded no further where more than this share of the stream takes so
much of its bytes: the rest would not be smaller, and coding is slower than most links."""
_EARLY_PACKETS, _EARLY_NBYTES = 12, 96 << 10
"""Packets that go before they are full, so that the path is busy while the rest is coded."""


@dataclass(frozen=True, slots=True)
class _Version:
    """One version of the source: its fingerprint, and the lines that changed since the one before.

    `marks` is None where that is not known. Without a `weights_id` no receiver holds it.
    """

    weights_id: str
    total: int
    marks: Marks | None


@dataclass(frozen=True, slots=True, eq=False)
class _Scan:
    """A scan that is running: of which weights, what it has marked, whether it fills the table."""

    weights_id: str
    marks: Marks
    is_first: bool


class ChangeLog:
    """The lines of a source that changed from version to version, on one rank of the sender.

    Every scan of the source adds a version, also one whose update fails later: then no receiver
    holds it, and the next one carries its changes too. A scan without a `weights_id` adds one on
    which no delta builds: of weights that were sent before under an id, which may differ now. If it
    `keeps` a copy of the stream, deltas can be coded by value. Raises ValueError for streams of
    more than 256 GiB.
    """

    def __init__(self, layout: StreamLayout, *, keeps: bool = False) -> None:
        if count_lines(layout) > MAX_LINES:
            raise ValueError(f"{layout.nbytes} bytes are more than {MAX_LINES * LINE}")
        self.layout = layout
        self._table: LineTable | None = None
        self._versions: deque[_Version] = deque(maxlen=KEPT_VERSIONS)
        self._scan: _Scan | None = None
        self._sample = LineSample(layout)
        self._keeps = keeps
        self._kept: LineMemory | None = None
        self._ambiguous: set[str] = set()
        self.coded_line_nbytes = _CODED_LINE_NBYTES

    @property
    def nbytes(self) -> int:
        """Bytes of the table, the marks and the copy."""
        marks = sum(v.marks.nbytes for v in self._versions if v.marks is not None)
        kept = self.layout.nbytes if self._kept is not None else 0
        return marks + kept + (self._table.nbytes if self._table is not None else 0)

    @property
    def keeps(self) -> bool:
        """Whether a copy of the stream is kept."""
        return self._keeps

    @property
    def fingerprint(self) -> str | None:
        """The sum of all lines of the newest version (16 hex digits); None without a table."""
        return to_hex(self._table.total) if self._table is not None else None

    def knows(self, weights_id: str) -> bool:
        """Whether the changes since these weights are known."""
        self._end_interrupted()
        return self._since(weights_id) is not None

    def totals(self) -> dict[str, str]:
        """Return the fingerprints of the versions that a delta can build on, by weights id."""
        self._end_interrupted()
        return {v.weights_id: to_hex(v.total) for v in self._versions if self.knows(v.weights_id)}

    def changed_share(self, tensors: Sequence[torch.Tensor] | None) -> float | None:
        """Return about which share of the lines changed since `note_sent`; None if not known.

        `tensors` are those that are sent, or those of which casts are sent. Other tensors that are
        made cannot be looked at before they are sent: None.
        """
        return None if tensors is None else self._sample.changed_share(tensors)

    def note_sent(self) -> None:
        """Note that what `changed_share` looked at last was sent."""
        self._sample.note_sent()

    def lines_since(self, bases: Sequence[str]) -> int | None:
        """Return how many lines the last scans marked since these bases; None if not known."""
        self._end_interrupted()
        if self._table is None or not all(map(self.knows, bases)):
            return None
        marks = self.marks_since(bases)
        return 0 if marks is None else count_marked(marks)

    def forget(self) -> None:
        """Drop the table and all versions. The next scan makes them anew."""
        self._table = self._kept = self._scan = None
        self._versions.clear()

    def record(self, weights_id: str, tensors: Iterable[NamedTensor]) -> None:
        """Scan the source without packing anything; these are the weights of `weights_id`."""
        with self._new_version(weights_id) as (table, marks):
            self._note(table, marks, tensors)

    def scan(
        self,
        weights_id: str,
        tensors: Iterable[NamedTensor],
        also: Marks | None,
    ) -> Generator[None, LineBuffer, None]:
        """Scan the source into buffers, as `LineTable.scan` does, and add a version."""
        with self._new_version(weights_id) as (table, marks):
            yield from table.scan(tensors, marks, also=also, packs=True)

    def changes(self, weights_id: str, tensors: Iterable[NamedTensor]) -> Iterator[Section]:
        """Scan the source, and yield the values that differ from the copy, which then has them."""
        with self._new_version(weights_id) as (table, marks):
            for buffer in _buffers(table.scan(tensors, marks, packs=True)):
                old = self._keep(buffer.filled, buffer.content)
                yield changed_values(buffer.filled, old, buffer.content)

    def _note(
        self,
        table: LineTable,
        marks: Marks,
        tensors: Iterable[NamedTensor],
        start: int = 0,
    ) -> None:
        """Scan tensors for their sums, and for the copy where one is kept."""
        if self._keeps:
            for buffer in _buffers(table.scan(tensors, marks, packs=True, start=start)):
                self.keep(buffer)
        else:
            for _ in table.scan(tensors, marks, start=start):
                pass

    def _keep(self, indices: Indices, lines: Words) -> Words:
        """Change the copy; return what it held of these lines."""
        if self._kept is None:
            copy = arena.allocate(self.layout.nbytes, torch.device("cpu"))
            self._kept = LineMemory(self.layout, Memory.of_stream(self.layout, copy))
        old = self._kept.read(indices)
        self._kept.write(indices, lines)
        return old

    def keep(self, buffer: LineBuffer) -> None:
        """Change the copy, where one is kept, to what a scan found."""
        if self._keeps and buffer.count:
            self._keep(buffer.filled, buffer.content)

    @contextmanager
    def _new_version(self, weights_id: str) -> Iterator[tuple[LineTable, Marks]]:
        """Yield the table and marks for a scan, and add a version when that ends."""
        self._end_interrupted()
        first = self._table is None
        if self._table is None:
            self._table = LineTable(self.layout)
        scan = self._scan = _Scan(weights_id, new_marks(self._table.lines), first)
        try:
            yield self._table, scan.marks
            self._end_scan(scan, complete=True)
        finally:
            self._end_scan(scan, complete=False)

    def _end_interrupted(self) -> None:
        """End a scan that stopped in the middle, whose generator something still keeps alive."""
        if self._scan is not None:
            self._end_scan(self._scan, complete=False)

    def _end_scan(self, scan: _Scan, *, complete: bool) -> None:
        """Add a version of what a scan found, unless the scan was ended before."""
        if self._scan is not scan or self._table is None:
            return
        self._scan = None
        if not complete and (scan.is_first or self._keeps):
            self.forget()  # the copy may lack what the table has seen
        elif scan.is_first:
            known = "" if scan.weights_id in self._ambiguous else scan.weights_id
            self._versions.append(_Version(known, self._table.total, None))
        else:
            self._add(scan.weights_id if complete else "", self._table.total, scan.marks)

    def recorded(self, weights_id: str, tensors: Iterator[NamedTensor]) -> Iterator[NamedTensor]:
        """Yield the tensors; each is scanned before that, as by `record`."""
        with self._new_version(weights_id) as (table, marks):
            for i, pair in enumerate(tensors):
                self._note(table, marks, [pair], start=i)
                yield pair

    def sum_of(self, first: int, count: int) -> int:
        """Return the sum of some lines of the newest version, 0 without a table."""
        return self._table.sum_of(first, count) & MASK if self._table is not None else 0

    def sum_of_lines(self, indices: Indices) -> int:
        """Return the sum of these lines of the newest version, 0 without a table."""
        return self._table.sum_of_lines(indices) if self._table is not None else 0

    @property
    def total(self) -> int:
        """The sum of all lines of the newest version, 0 without a table."""
        return self._table.total if self._table is not None else 0

    def marks_since(self, bases: Sequence[str]) -> Marks | None:
        """Return the lines that changed from the oldest of these bases to the newest version.

        None where all of them are the newest version.
        """
        self._end_interrupted()
        found = [since for base in bases if (since := self._since(base)) is not None]
        oldest = max(found, key=len, default=[])
        merged: Marks | None = None
        for version in oldest:
            if version.marks is not None:
                merged = version.marks.copy() if merged is None else merged | version.marks
        return merged

    def _since(self, weights_id: str) -> list[_Version] | None:
        """Return the versions after this one, None where it is not kept or their marks are not."""
        versions = list(self._versions)
        for i, version in enumerate(versions):
            if version.weights_id == weights_id and weights_id:
                later = versions[i + 1 :]
                return later if all(v.marks is not None for v in later) else None
        return None

    def _add(self, weights_id: str, total: int, marks: Marks) -> None:
        """Add a version: its lines in `marks` differ from the version before.

        An id stands for one content alone. A receiver that got the first one may still hold it, so
        an id that comes again with another content stands for none, from then on.
        """
        weights_id = "" if weights_id in self._ambiguous else weights_id
        last = self._versions[-1] if self._versions else None
        if last is not None and weights_id in ("", last.weights_id) and not marks.any():
            return  # nothing new was found
        if weights_id and any(version.weights_id == weights_id for version in self._versions):
            self._ambiguous.add(weights_id)
            for i, version in enumerate(self._versions):
                if version.weights_id == weights_id:
                    self._versions[i] = _Version("", version.total, version.marks)
            weights_id, last = "", self._versions[-1]
        if last is not None and not last.weights_id and last.marks is not None:
            # No receiver holds what the scan before found: this one found the rest.
            self._versions[-1] = _Version(weights_id, total, last.marks | marks)
        else:
            self._versions.append(_Version(weights_id, total, marks))


def _buffers(scan: Generator[None, LineBuffer, None]) -> Iterator[LineBuffer]:
    """Yield what a scan finds, in one buffer that is used again and again."""
    buffer = LineBuffer(torch.zeros(_BLOCK_LINES * (LINE + 4), dtype=torch.uint8))
    next(scan)
    more = True
    while more:
        buffer.count = 0
        try:
            scan.send(buffer)
        except StopIteration:
            more = False
        if buffer.count:
            yield buffer


class DeltaSource:
    """WeightSource of packets with the lines of `source` that changed since the oldest base.

    `expected` is about how many lines that are: the packets have room for some more, and an update
    with still more raises DeltaError. Iterate over it once for each engine: the source is read
    meanwhile. `scrub` are the first line and the number of lines that receivers read back whole.
    With `gives_up`, a delta by value that begins with more than half of the bytes raises it too.
    """

    def __init__(  # noqa: PLR0913  # a task of the ranks, part by part
        self,
        log: ChangeLog,
        source: WeightSource,
        weights_id: str,
        bases: Sequence[str],
        expected: int,
        *,
        scrub: tuple[int, int] = (0, 0),
        by_value: bool = False,
        to_shards: bool = False,
        gives_up: bool = False,
    ) -> None:
        self._log, self._source, self._weights_id = log, source, weights_id
        self._also = log.marks_since(bases)
        self._bases = {base: total for base, total in log.totals().items() if base in bases}
        if not self._bases:
            raise DeltaError("this rank knows none of the weights that the receivers hold")
        self._scrub = scrub
        self._to_shards = to_shards
        self._sent = 0
        self._expected = expected
        self.written_lines = 0
        lines = count_lines(log.layout)
        room = min(lines, math.ceil(expected * _SLACK) + min(lines, 256))
        # A compiled scan ends a packet where fewer lines are left than it looks at together.
        capacity = min(_PACKET_LINES, -(-(max(room, 1) + WORDS) // 16) * 16)
        self._packets = max(-(-room // (capacity - WORDS + 1)), 1)
        self._is_coded = by_value and log.keeps and self._also is None
        self._coded_nbytes = 0
        self._coded_share = 0.0
        self._gives_up = gives_up
        shapes = [_HEADER_NBYTES + capacity * (LINE + 4)] * self._packets
        if self._is_coded:
            most = room * log.coded_line_nbytes
            self._packets = _EARLY_PACKETS + -(-most // (_CODED_NBYTES - _HEADER_NBYTES))
            shapes = [_CODED_NBYTES] * self._packets
        # The last one is alone in its bucket, too.
        shapes.append(_CODED_NBYTES if self._is_coded else _END.size)
        self.manifest = Manifest(
            tuple(TensorSpec(f"delta.{i}", "uint8", (n,)) for i, n in enumerate(shapes))
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the lines and their numbers, or of the coded values, once they were sent."""
        if self._is_coded:
            return self._coded_nbytes + len(self.manifest.specs) * _HEADER_NBYTES
        return self.written_lines * (LINE + 4) + len(self.manifest.specs) * _HEADER_NBYTES

    @property
    def terms(self) -> DeltaTerms:
        """The part of the update messages: the bases, and their fingerprints."""
        return DeltaTerms(bases=self._bases)

    def stable_tensors(self) -> None:
        return None

    def tensors(self) -> Iterator[NamedTensor]:
        """Yield the packets; each is overwritten when the next one is requested."""
        largest = max(spec.nbytes for spec in self.manifest.specs)
        memory = torch.zeros(largest, dtype=torch.uint8)
        for spec, (name, write) in zip(self.manifest.specs, self.writers(), strict=True):
            packet = memory[: spec.nbytes]
            write(packet)
            yield name, packet

    writes_pieces = False

    def writers(self) -> Writers:
        """Yield what writes each packet to memory that it is given."""
        if self._is_coded:
            coded = _CodedPackets(self._encode())
            for i in range(self._packets):
                yield f"delta.{i}", coded.write
                if self._takes_too_much(coded.nbytes):
                    break
            self._coded_nbytes = coded.nbytes
            if not coded.done:
                coded.close()
                self._log.coded_line_nbytes = _CODED_LINE_NBYTES
                raise DeltaError(
                    "the changes take more bytes coded than as they are; send them whole"
                )
            taken = -(-2 * coded.nbytes // max(self.written_lines, 1))
            self._log.coded_line_nbytes = min(max(taken, _LEAST_LINE_NBYTES), _CODED_LINE_NBYTES)
            yield f"delta.{self._packets}", self._write_end
            return
        scan = self._log.scan(self._weights_id, pairs_of(self._source), self._also)
        packets = _Packets(self._log, scan, adds_up=self._to_shards)
        for i in range(self._packets):
            yield f"delta.{i}", packets.write
        self.written_lines, self._sent = packets.lines, packets.sent
        if not packets.done:
            packets.close()
            raise DeltaError(
                f"more than {packets.lines} lines have changed, and {self._expected} were expected;"
                " send the whole model"
            )
        # Engines that read the source in passes of their own find the changes marked.
        self._also = self._log.marks_since(list(self._bases))
        yield f"delta.{self._packets}", self._write_end

    def _encode(self) -> Generator[bytes, None, None]:
        """Yield the changed values as coded sections; reads the whole source."""
        waiting: list[Section] = []
        for section in self._log.changes(self._weights_id, pairs_of(self._source)):
            waiting.append(section)
            if sum(len(part.positions) for part in waiting) >= SECTION_VALUES:
                yield self._encoded(waiting)
                waiting = []
        if waiting:
            yield self._encoded(waiting)

    def _takes_too_much(self, nbytes: int) -> bool:
        """Whether what is coded so far, `nbytes`, says that the whole model takes less time."""
        share = self._coded_share
        judged = self._gives_up and share > _JUDGED_SHARE
        return judged and nbytes > _TOO_MUCH * share * self._log.layout.nbytes

    def _encoded(self, parts: Sequence[Section]) -> bytes:
        section = Section(
            np.concatenate([part.positions for part in parts]),
            np.concatenate([part.changes for part in parts]),
        )
        self.written_lines += len(section.lines())
        if len(section.positions):
            values = VALUES * count_lines(self._log.layout)
            self._coded_share = int(section.positions[-1]) / values
        return encode(section)

    def _write_end(self, target: torch.Tensor) -> None:
        scrubbed = self._log.sum_of(*self._scrub)
        into = target.numpy()
        into[_END.size :] = 0
        _END.pack_into(
            into.data,
            0,
            _END_MAGIC,
            self.written_lines,
            self._log.total,
            *self._scrub,
            scrubbed,
            self._sent & MASK,
        )


def pairs_of(source: WeightSource) -> Iterable[NamedTensor]:
    """Return the tensors of a source: all at once, with a length, where their memory stays."""
    stable = source.stable_tensors()
    return source.tensors() if stable is None else _StablePairs(source.manifest.specs, stable)


@dataclass(frozen=True, slots=True)
class _StablePairs:
    """Names and tensors, in pairs that are made one by one: there may be tens of thousands."""

    specs: Sequence[TensorSpec]
    tensors: Sequence[torch.Tensor]

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[NamedTensor]:
        return zip(map(_NAME, self.specs), self.tensors, strict=True)


class _CodedPackets:
    """Writes coded sections to packets, as they are made; a section may lie in several packets."""

    def __init__(self, sections: Generator[bytes, None, None]) -> None:
        self.nbytes = 0
        self._sections = sections
        self._waiting = bytearray()
        self._early = _EARLY_PACKETS
        self._is_over = False

    @property
    def done(self) -> bool:
        """Whether everything is written; may make another section."""
        return not self._waiting and not self._make()

    def _make(self) -> bool:
        """Make one more section, if there is one."""
        section = None if self._is_over else next(self._sections, None)
        self._is_over = section is None
        self._waiting += section or b""
        return not self._is_over

    def write(self, target: torch.Tensor) -> None:
        """Fill `uint8[nbytes]` with a header, coded bytes, and zeros."""
        room = target.numel() - _HEADER_NBYTES
        wanted = min(_EARLY_NBYTES, room) if self._early else room
        while len(self._waiting) < wanted and self._make():
            pass
        self._early -= self._early > 0
        taken = min(len(self._waiting), room)
        into, end = target.numpy(), _HEADER_NBYTES + taken
        into[:_HEADER_NBYTES] = 0
        _HEADER.pack_into(into.data, 0, _CODED_MAGIC, taken)
        into[_HEADER_NBYTES:end] = np.frombuffer(self._waiting, np.uint8, taken)
        into[end:] = 0
        del self._waiting[:taken]
        self.nbytes += taken

    def close(self) -> None:
        """End the scan."""
        self._sections.close()


class _Packets:
    """Writes the changed lines of a scan to packets."""

    def __init__(
        self, log: ChangeLog, scan: Generator[None, LineBuffer, None], *, adds_up: bool
    ) -> None:
        self.lines = self.sent = 0
        self._adds_up = adds_up
        self.done = False
        self._log = log
        self._scan = scan
        self._begun = False

    def write(self, target: torch.Tensor) -> None:
        """Fill `uint8[nbytes]` with a header and as many lines as there are room and lines."""
        buffer = LineBuffer(target[_HEADER_NBYTES:])
        if not self.done:
            try:
                if not self._begun:
                    self._begun = True
                    next(self._scan)
                self._scan.send(buffer)
            except StopIteration:
                self.done = True
        _HEADER.pack_into(target.numpy().data, 0, _LINES_MAGIC, buffer.count)
        self._log.keep(buffer)
        if self._adds_up:
            self.sent += self._log.sum_of_lines(buffer.filled)
        self.lines += buffer.count

    def close(self) -> None:
        """End the scan; what it found so far is marked."""
        self._scan.close()


class DeltaTarget(LoadTarget):
    """Writes the packets of a delta to `memory`, which holds the base, of the load target `target`.

    `base_total` is the fingerprint of the base, as the sender knows it.
    """

    users_own = False

    def __init__(self, target: LoadTarget, memory: LineMemory, base_total: str) -> None:
        self.in_place = target.in_place
        self.peak_extra_nbytes = target.peak_extra_nbytes
        self.fingerprint: int | None = None
        self.target = target
        self._memory = memory
        self._base, self._written = int(base_total, 16), 0
        self._lines = self._taken = 0
        self._coded = bytearray()
        self._marks = new_marks(memory.lines)

    @property
    def nbytes(self) -> int:
        """Bytes of the lines that arrived, their numbers, and the packets' headers."""
        return self._lines * (LINE + 4) + self._taken * _HEADER_NBYTES

    def begin(self) -> None:
        self.target.begin()
        self.target.written = self._marks

    def load(self, pairs: Sequence[NamedTensor]) -> None:
        """Write the lines of packets. Raises ProtocolError for one that is damaged."""
        for name, tensor in pairs:
            flat = tensor if tensor.device.type == "cpu" else tensor.cpu()
            self._take(name, flat)

    def result(self) -> int:
        """Return the fingerprint of the model after the last packet, which the sender's equals.

        Raises ProtocolError before that.
        """
        if self.fingerprint is None:
            raise ProtocolError("the delta ended before its last packet; send the update again")
        return self.fingerprint

    def validate(self) -> None:
        self.result()
        self.target.validate()

    def shared(self) -> Sequence[Shared]:
        return self.target.shared()

    def undo(self) -> Callable[[], None] | None:
        return self.target.undo()

    def commit(self) -> None:
        self.target.commit()
        self.named = self.target.named

    def discard(self) -> None:
        self.target.discard()

    def _take(self, name: str, flat: torch.Tensor) -> None:
        if flat.dtype is not torch.uint8 or flat.dim() != 1:
            raise ProtocolError(f"{name} is no packet of a delta, but {flat.dtype} {flat.shape}")
        if self.fingerprint is not None:
            raise ProtocolError(f"{name} comes after the last packet of the delta")
        self._taken += 1
        view = flat.numpy().data
        magic, count = _HEADER.unpack_from(view) if len(view) >= _END.size else (0, 0)
        if magic == _END_MAGIC:
            self._end(view)
            return
        if magic == _CODED_MAGIC:
            self._take_coded(name, view, count)
            return
        if magic != _LINES_MAGIC:
            raise ProtocolError(f"{name} is no packet of a delta; the message is damaged")
        # The packet may lie at any address of a bucket, and words of 8 bytes may not.
        body = flat[_HEADER_NBYTES:]
        if body.numel() % (16 * (LINE + 4)):
            raise ProtocolError(f"{name} has {flat.numel()} bytes, which no packet of a delta has")
        buffer = LineBuffer(body if not body.data_ptr() % 8 else body.clone())
        if count > buffer.capacity:
            raise ProtocolError(f"{name} has room for {buffer.capacity} lines, not for {count}")
        if not count:
            return
        indices, lines = buffer.indices[:count], buffer.lines[: count * 8]
        if not are_growing(indices, self._memory.lines):
            raise ProtocolError(f"{name} has lines that are repeated or beyond the model")
        self._write(indices, lines)

    def _take_coded(self, name: str, packet: memoryview, nbytes: int) -> None:
        """Take the sections that are complete with this packet."""
        if nbytes > len(packet) - _HEADER_NBYTES:
            raise ProtocolError(f"{name} has no room for {nbytes} bytes")
        self._coded += packet[_HEADER_NBYTES : _HEADER_NBYTES + nbytes]
        at = 0
        while (size := section_nbytes(memoryview(self._coded)[at:])) is not None:
            if size > len(self._coded) - at:
                break
            self._take_values(bytes(self._coded[at : at + size]))
            at += size
        del self._coded[:at]

    def _take_values(self, data: bytes) -> None:
        section = decode(data, self._memory.lines * VALUES)
        indices = section.lines()
        if not len(indices):
            return
        try:
            lines = self._memory.read(indices)
        except ValueError as exc:
            raise ProtocolError(f"a section of the delta: {exc}") from exc
        section.apply(indices, lines)
        self._write(indices, lines)

    def _write(self, indices: Indices, lines: Words) -> None:
        self._lines += len(indices)
        mark(self._marks, indices)
        try:
            self._written = self._written + self._memory.write(indices, lines) & MASK
        except ValueError as exc:
            raise ProtocolError(f"a packet of the delta: {exc}") from exc

    def _end(self, view: memoryview) -> None:
        _, lines, total, first, count, scrubbed, sent = _END.unpack_from(view)
        if first + count > self._memory.lines:
            raise ProtocolError("the last packet of the delta is damaged")
        if self._coded:
            raise ProtocolError("the delta ends in the middle of a section")
        if lines != self._lines:
            raise ProtocolError(f"the delta has {lines} lines, of which {self._lines} arrived")
        if not self._memory.proves_base:
            if sent != self._written:
                raise VerificationError("lines were changed on the way; send the update again")
        elif total != self._base + self._written & MASK:
            raise VerificationError(
                f"the weights have fingerprint {to_hex(self._base + self._written & MASK)} after "
                f"the delta, and the sender's {to_hex(total)}: their base differs, or lines were "
                "changed on the way; the update is not applied, the next one is a full one"
            )
        elif self._memory.sum_of(first, count) != scrubbed:
            raise VerificationError(
                f"weights that the delta leaves as they are differ from the sender's, among lines "
                f"{first} to {first + count}: they changed in memory since the last full update; "
                "the update is not applied, the next one is a full one"
            )
        self.fingerprint = total


class StreamDeltas(DeltaTarget):
    """Writes the deltas of several ranks to `memory`, the lines of the model in a load target.

    `parts[i]` takes the packets of the stream that `streams[i]` has the lines of, whose fingerprint
    in the base is `base_totals[i]`.
    """

    def __init__(
        self,
        target: LoadTarget,
        memory: LineMemory,
        streams: Sequence[StreamLines],
        base_totals: Sequence[int],
    ) -> None:
        super().__init__(target, memory, "0")
        self.parts = [
            DeltaTarget(target, lines, to_hex(total))
            for lines, total in zip(streams, base_totals, strict=True)
        ]
        self._streams = streams
        self._recording = memory if isinstance(memory, RecordingLines) else None

    def begin(self) -> None:
        super().begin()
        for lines in self._streams:
            lines.begin(self._marks, self._recording)

    def load(self, pairs: Sequence[NamedTensor]) -> None:
        raise NotImplementedError("the packets of each rank go to a part")

    def totals(self) -> list[int]:
        """Return the fingerprints of all streams after their last packets. Raises ProtocolError."""
        return [part.result() for part in self.parts]

    def validate(self) -> None:
        for lines in self._streams:  # every packet has come
            lines.end()
        self.totals()
        self.target.validate()

    def discard(self) -> None:
        for lines in self._streams:
            lines.end()
        super().discard()
