"""Lines: sums that add up to mix64, and a table that finds every line that changed, and no other.

Everything is tested with the loops of host memory and with those of a GPU, which run on a CPU too:
the two have to agree bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import pytest
import torch

from weightsync.specs import Manifest
from weightsync.tensors import as_bytes, contiguous_bytes, spec_of
from weightsync.weights.copying.checksums import settled
from weightsync.weights.copying.copy_plan import Memory
from weightsync.weights.copying.fingerprint import mix64
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.lines import memory as lines
from weightsync.weights.lines.memory import (
    LINE,
    WORDS,
    LineBuffer,
    LineMemory,
    LineSample,
    LineTable,
    new_marks,
)

Named = list[tuple[str, torch.Tensor]]


@pytest.fixture(params=["compiled", "as on a GPU"], autouse=True)
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "as on a GPU":  # the host is another device: spans are grouped
        monkeypatch.setattr(lines, "_HOST", torch.device("meta"))
        monkeypatch.setattr(lines, "_GROUP_LINES", 1 << 11)
    return str(request.param)


def model(seed: int = 0) -> Named:
    """Return tensors of many sizes: whole lines, parts of lines, cut words, none at all."""
    random = torch.Generator().manual_seed(seed)
    sizes = [1, 0, 7, 32, 33, 256, 511, 512, 513, 4096, 70_001, 3, 131_072]
    tensors = [torch.randn(size, generator=random).bfloat16() for size in sizes]
    tensors.append(torch.randint(-100, 100, (1001,), generator=random).to(torch.int8))
    tensors.append(torch.randn(33, 7, generator=random))
    return [(f"t{i}", tensor) for i, tensor in enumerate(tensors)]


def layout_of(named: Named) -> StreamLayout:
    return StreamLayout(Manifest(tuple(spec_of(*pair) for pair in named)))


def stream_of(layout: StreamLayout, named: Named) -> torch.Tensor:
    """Return the bytes of the whole stream, zeros between tensors included."""
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for offset, (_, tensor) in zip(layout.offsets, named, strict=True):
        flat = contiguous_bytes(tensor)
        buffer[offset : offset + flat.numel()] = flat
    return buffer


def scanned(
    table: LineTable,
    named: Sequence[tuple[str, torch.Tensor]] | Iterator[tuple[str, torch.Tensor]],
    *,
    capacity: int = 16,
    also: np.ndarray | None = None,
) -> tuple[dict[int, bytes], np.ndarray]:
    """Return the lines that a scan writes, by number, and the marks."""
    marks = new_marks(table.lines)
    scan = table.scan(named, marks, also=also, packs=True)
    next(scan)
    found: dict[int, bytes] = {}
    while True:
        buffer = LineBuffer(torch.zeros(capacity * 68, dtype=torch.uint8))
        try:
            scan.send(buffer)
            done = False
        except StopIteration:
            done = True
        for i in range(buffer.count):
            assert int(buffer.indices[i]) not in found
            found[int(buffer.indices[i])] = buffer.lines[i * 8 : i * 8 + 8].tobytes()
        if done:
            return found, marks


def changed_lines(before: torch.Tensor, now: torch.Tensor) -> dict[int, bytes]:
    differs = (before.view(-1, LINE) != now.view(-1, LINE)).any(1)
    return {int(i): now[i * LINE : (i + 1) * LINE].numpy().tobytes() for i in differs.nonzero()}


def test_the_total_is_the_fingerprint_of_the_whole_stream() -> None:
    named = model()
    layout = layout_of(named)
    table = LineTable(layout)
    scanned(table, named)
    assert settled(table.total, layout.nbytes) == mix64(stream_of(layout, named))


@pytest.mark.parametrize("given", ["all at once", "one by one"])
@pytest.mark.parametrize("capacity", [16, 4096])
def test_every_changed_line_is_found_and_no_other(given: str, capacity: int) -> None:
    named = model()
    layout = layout_of(named)
    table = LineTable(layout)
    scanned(table, named)
    random = torch.Generator().manual_seed(1)
    for _ in range(5):
        before = stream_of(layout, named)
        for _, tensor in named:
            flat = as_bytes(tensor)
            if flat.numel():
                places = torch.randint(flat.numel(), (1 + flat.numel() // 500,), generator=random)
                flat[places] ^= 0x10
        now = stream_of(layout, named)
        found, marks = scanned(
            table, named if given == "all at once" else iter(named), capacity=capacity
        )
        assert found == changed_lines(before, now)
        assert [i for block in lines.marked(marks) for i in block.tolist()] == sorted(found)
        assert lines.count_marked(marks) == len(found)
        assert settled(table.total, layout.nbytes) == mix64(now)
    assert scanned(table, named)[0] == {}


def test_one_bit_anywhere_is_found() -> None:
    named = model()
    layout = layout_of(named)
    table = LineTable(layout)
    scanned(table, named)
    for name, tensor in named:
        flat = as_bytes(tensor)
        for place in {0, flat.numel() // 2, flat.numel() - 1} if flat.numel() else ():
            flat[place] ^= 1
            found, _ = scanned(table, named)
            offset = layout.offsets[layout.manifest.index[name]]
            assert list(found) == [(offset + place) // LINE]


def test_lines_that_others_lack_are_written_too() -> None:
    named = model()
    table = LineTable(layout_of(named))
    scanned(table, named)
    also = new_marks(table.lines)
    wanted = [0, 1, 63, 64, table.lines - 1]
    lines.mark(also, np.array(wanted, np.uint32))
    found, marks = scanned(table, named, also=also)
    assert sorted(found) == wanted
    assert lines.count_marked(marks) == 0


def test_a_scan_that_ends_early_loses_nothing() -> None:
    """What it had found is marked, and the next scan finds the rest."""
    named = model()
    layout = layout_of(named)
    table = LineTable(layout)
    scanned(table, named)
    before = stream_of(layout, named)
    for _, tensor in named:
        as_bytes(tensor)[:] ^= 1
    first = new_marks(table.lines)
    scan = table.scan(named, first, packs=True)
    next(scan)
    scan.send(LineBuffer(torch.zeros(160 * 68, dtype=torch.uint8)))
    scan.close()
    assert lines.count_marked(first)
    found, rest = scanned(table, named)
    missing = changed_lines(before, stream_of(layout, named))
    assert lines.count_marked(first | rest) == len(missing)
    assert settled(table.total, layout.nbytes) == mix64(stream_of(layout, named))
    both, _ = scanned(table, named, also=first | rest)
    assert both == missing
    assert len(found) < len(missing)


def test_tensors_are_cast_while_they_are_scanned() -> None:
    masters = [(name, tensor.float()) for name, tensor in model() if tensor.dtype is torch.bfloat16]
    sent = [(name, tensor.bfloat16()) for name, tensor in masters]
    layout = layout_of(sent)
    table = LineTable(layout)
    scanned(table, masters)
    assert settled(table.total, layout.nbytes) == mix64(stream_of(layout, sent))
    masters[10][1][5] *= 1 + 1e-5  # less than half a unit in the last place of bf16
    assert scanned(table, masters)[0] == {}
    masters[10][1][5] *= 2
    assert len(scanned(table, masters)[0]) == 1


def test_a_strided_tensor_is_scanned_as_it_is_sent() -> None:
    named = [("t", torch.randn(64, 48).t()), ("u", torch.randn(40, 40)[:, ::2])]
    layout = layout_of(named)
    table = LineTable(layout)
    scanned(table, named)
    assert settled(table.total, layout.nbytes) == mix64(stream_of(layout, named))


def test_the_estimate_is_near() -> None:
    named = [("t", torch.zeros(4 << 20, dtype=torch.bfloat16)), ("u", torch.zeros(77))]
    sample, tensors = LineSample(layout_of(named)), [tensor for _, tensor in named]
    assert sample.changed_share(tensors) is None
    sample.note_sent()
    assert sample.changed_share(tensors) == 0
    named[0][1].view(-1, 32)[::4] = 1
    for _ in range(2):  # until they are sent
        assert sample.changed_share(tensors) == pytest.approx(0.25, rel=0.1)
    sample.note_sent()
    assert sample.changed_share(tensors) == 0
    assert sample.changed_share([tensors[0][::2], tensors[1]]) is None
    assert sample.changed_share([tensors[0], tensors[1].long()]) is None


class Wrapper(torch.Tensor):
    """A tensor whose memory is that of others."""


def test_tensors_that_cannot_be_looked_at_are_not_estimated() -> None:
    layout = layout_of([("t", torch.ones(64, 64))])
    freed = torch.ones(64, 64)
    freed.untyped_storage().resize_(0)
    for tensor in (
        torch.ones(64, 65),
        torch.ones(0),
        torch.ones(64, 64).as_subclass(Wrapper),
        freed,
    ):
        sample = LineSample(layout)
        for _ in range(2):
            assert sample.changed_share([tensor]) is None
        assert sample.changed_share([torch.ones(64, 64)]) is None
        sample.note_sent()
        assert sample.changed_share([torch.ones(64, 64)]) == 0


@pytest.mark.parametrize("made", [torch.float32, torch.float64, torch.float16])
def test_the_estimate_of_a_cast_is_that_of_its_result(made: torch.dtype) -> None:
    """A change that the cast rounds away is none."""
    masters = [torch.ones(1 << 20, dtype=made), torch.ones(77, dtype=made)]
    layout = layout_of([("t", masters[0].bfloat16()), ("u", masters[1].bfloat16())])
    sample, casts = LineSample(layout), LineSample(layout)
    for change in (0.0, 1e-3, 1.0):
        masters[0].view(-1, 32)[::4] += change
        shares = sample.changed_share(masters), casts.changed_share([m.bfloat16() for m in masters])
        assert shares[0] == shares[1]
        sample.note_sent()
        casts.note_sent()
    assert shares[0] == pytest.approx(0.25, rel=0.1)


class TestMemory:
    def memories(self, layout: StreamLayout, named: Named) -> list[LineMemory]:
        flat = Memory.of_stream(layout, stream_of(layout, named))
        apart = Memory([as_bytes(tensor.clone()) for _, tensor in named])
        return [LineMemory(layout, flat), LineMemory(layout, apart)]

    def test_lines_are_written_and_their_sums_change_as_the_table(self) -> None:
        named = model()
        layout = layout_of(named)
        table = LineTable(layout)
        scanned(table, named)
        memories = self.memories(layout, named)
        kept = [memory._memory for memory in memories]
        for step in range(4):
            for _, tensor in named:
                as_bytes(tensor)[step::97] ^= 1 + step
            before = table.total
            found, _ = scanned(table, named)
            order = sorted(found)
            indices = np.array(order, np.uint32)
            content = np.frombuffer(b"".join(found[i] for i in order), np.uint64).copy()
            for memory, where in zip(memories, kept, strict=True):
                by = memory.write(indices, content)
                assert by == (table.total - before) % (1 << 64)
                assert memory.sum_of(0, table.lines) == table.total
                assert memory.sum_of(3, 200) == table.sum_of(3, 200) % (1 << 64)
                for (name, tensor), flat in zip(named, where.tensors, strict=True):
                    assert torch.equal(as_bytes(tensor), flat), name

    def test_bytes_beyond_a_tensor_are_not_written_and_not_believed(self) -> None:
        named = [("t", torch.zeros(33, dtype=torch.uint8)), ("u", torch.ones(3))]
        layout = layout_of(named)
        memory = LineMemory(layout, Memory([as_bytes(tensor) for _, tensor in named]))
        line = np.zeros(8, np.uint64)
        honest = memory.write(np.array([0], np.uint32), line)
        assert honest == 0
        line[7] = 1  # beyond the 33 bytes
        assert memory.write(np.array([0], np.uint32), line) != 0
        assert torch.equal(named[1][1], torch.ones(3))

    def test_marked_lines_are_copied(self) -> None:
        named = model()
        layout = layout_of(named)
        for marks in (None, new_marks(layout.nbytes // LINE)):
            source, target = self.memories(layout, named)[0], self.memories(layout, named)[0]
            for flat in source._memory.tensors:
                flat.add_(1)
            if marks is not None:
                lines.mark(marks, np.array([0, 5], np.uint32))
            target.copy_from(source, marks)
            assert target.sum_of(5, 1) == source.sum_of(5, 1)
            if marks is None:
                assert target.sum_of(0, target.lines) == source.sum_of(0, source.lines)

    @pytest.mark.parametrize("kinds", [(0, 1), (1, 0), (1, 1), "rows"])
    def test_few_lines_are_copied_alone(
        self, kinds: tuple[int, int] | Literal["rows"], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As on a GPU, where flat memory has rows: one copy for many lines."""
        monkeypatch.setattr(lines, "_LINES_AT_ONCE", 7)
        named = model()
        layout = layout_of(named)
        count = layout.nbytes // LINE
        ends = [
            (offset + tensor.nbytes - 1) // LINE
            for offset, (_, tensor) in zip(layout.offsets, named, strict=True)
            if tensor.nbytes
        ]
        wanted = sorted({0, 5, *ends, *range(11, count, 61)})
        monkeypatch.setattr(lines, "_LINES_PER_HOST_COPY", count // len(wanted) - 1)
        places = (0, 0) if kinds == "rows" else kinds
        target, source = (self.memories(layout, named)[place] for place in places)
        if kinds == "rows":
            for memory in (target, source):
                first = next(flat for flat in memory.memory.tensors if flat.numel())
                memory.is_flat, memory._rows = False, lines._all_rows(0, first, count)
        before = target.read(np.arange(count, dtype=np.uint32))
        for flat in source.memory.tensors:
            flat.add_(1)
        marks = new_marks(count)
        lines.mark(marks, np.array(wanted, np.uint32))
        target.copy_from(source, marks)
        now = target.read(np.arange(count, dtype=np.uint32)).reshape(-1, WORDS)
        theirs = source.read(np.arange(count, dtype=np.uint32)).reshape(-1, WORDS)
        marked = np.isin(np.arange(count), wanted)
        assert (now[marked] == theirs[marked]).all()
        assert (now[~marked] == before.reshape(-1, WORDS)[~marked]).all()
        assert (theirs != before.reshape(-1, WORDS)).any(1).all()

    def test_shards_have_no_lines(self) -> None:
        layout = layout_of([("t", torch.zeros(64))])
        with pytest.raises(ValueError, match="shards"):
            LineMemory(layout, Memory([torch.zeros(256, dtype=torch.uint8)], shares=[]))


def test_tensors_with_marked_lines_are_named() -> None:
    named = model()
    layout = layout_of(named)
    marks = new_marks(layout.nbytes // LINE)
    lines.mark(marks, np.array([0, layout.offsets[9] // LINE + 3], np.uint32))
    assert lines.touched(layout, marks) == [0, 9]
