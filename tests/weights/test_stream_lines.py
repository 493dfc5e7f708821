"""Deltas of several ranks' streams, in the memory of models and of shards, without processes."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

import weightsync as ws
from weightsync.tensors import TORCH_DTYPES, as_bytes, from_bytes
from weightsync.weights.copying.copy_plan import Memory, Share
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.copying.rank_streams import RankStream, StreamPlaces
from weightsync.weights.copying.shards import Slice
from weightsync.weights.deltas.change_log import ChangeLog, DeltaSource, StreamDeltas
from weightsync.weights.lines.memory import (
    LINE,
    LineMemory,
    count_lines,
    count_marked,
    marked,
    new_marks,
)
from weightsync.weights.lines.patches import Patches, RecordingLines
from weightsync.weights.lines.shard_lines import ShardLines
from weightsync.weights.lines.stream_lines import StreamLines
from weightsync.weights.sinks.base import ArenaTarget, LoadTarget

DTYPES = ("bfloat16", "float32", "uint8", "int64")


class Boxes:
    """WeightSource of one rank's stream: views of full tensors, as the rank holds them."""

    def __init__(self, stream: RankStream, full: Sequence[torch.Tensor]) -> None:
        self.manifest = stream.manifest
        self._stream = stream
        self._full = full

    def stable_tensors(self) -> list[torch.Tensor]:
        made = []
        for index, box in zip(self._stream.indices, self._stream.boxes, strict=True):
            part = torch.empty(box.local_shape, dtype=self._full[index].dtype)
            for inside, own in box.parts():
                part[own] = self._full[index][inside]
            made.append(part)
        return made

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        names = (spec.name for spec in self.manifest.specs)
        return zip(names, self.stable_tensors(), strict=True)


class Trainer:
    """A model of random tensors, cut at random into the boxes of a few ranks."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        specs = [self._spec(i) for i in range(self.random.randint(1, 6))]
        self.model = ws.Manifest(tuple(specs))
        self.layout = StreamLayout(self.model)
        self.full = [
            from_bytes(torch.randint(256, (s.nbytes,), dtype=torch.uint8), s).clone() for s in specs
        ]
        self.ranks = self.random.randint(1, 4)
        owned: list[list[tuple[int, Slice]]] = [[] for _ in range(self.ranks)]
        for i, spec in enumerate(specs):
            for at, box in enumerate(self.boxes(spec.shape, self.ranks)):
                owned[(at + i) % self.ranks].append((i, box))
        self.streams = [
            RankStream(rank, self.model, [i for i, _ in boxes], [box for _, box in boxes])
            for rank, boxes in enumerate(owned)
        ]
        self.logs = [ChangeLog(StreamLayout(stream.manifest)) for stream in self.streams]

    def _spec(self, i: int) -> ws.TensorSpec:
        dims = self.random.randint(0, 3)
        shape = tuple(self.random.randint(1, 60 // max(dims, 1)) for _ in range(dims))
        return ws.TensorSpec(f"t{i}", self.random.choice(DTYPES), shape)

    def boxes(self, shape: tuple[int, ...], parts: int) -> list[Slice]:
        """Cut a shape at random along one dimension, in runs or every other element."""
        whole = Slice.whole_of(shape)
        if not shape or self.random.random() < 0.2:
            return [whole]
        dim = self.random.randrange(len(shape))
        size = shape[dim]
        owner = sorted(self.random.randrange(parts) for _ in range(size))
        if self.random.random() < 0.3:
            self.random.shuffle(owner)
        found = []
        for part in range(parts):
            held = [at for at in range(size) if owner[at] == part]
            spans: list[tuple[int, int]] = []
            for at in held:
                if spans and spans[-1][1] == at:
                    spans[-1] = (spans[-1][0], at + 1)
                else:
                    spans.append((at, at + 1))
            if spans:
                cut = (*whole.spans[:dim], tuple(spans), *whole.spans[dim + 1 :])
                found.append(Slice(shape, cut))
        return found

    def sources(self) -> list[Boxes]:
        return [Boxes(stream, self.full) for stream in self.streams]

    def change(self) -> None:
        """Change a few bytes of some tensors, or of none."""
        for tensor in self.full:
            flat = as_bytes(tensor)
            for _ in range(self.random.choice([0, 0, 1, 5])):
                flat[self.random.randrange(flat.numel())] ^= self.random.randint(1, 255)

    def record(self, weights_id: str) -> None:
        for log, source in zip(self.logs, self.sources(), strict=True):
            log.record(weights_id, source.tensors())

    def totals(self) -> list[int]:
        return [log.total for log in self.logs]

    def deltas(self, weights_id: str, base: str, *, to_shards: bool) -> list[DeltaSource]:
        found = []
        for log, source in zip(self.logs, self.sources(), strict=True):
            lines = count_lines(log.layout)
            scrub = (self.random.randint(0, lines), 0)
            scrub = scrub[0], self.random.randint(0, lines - scrub[0])
            delta = DeltaSource(
                log, source, weights_id, [base], lines, scrub=scrub, to_shards=to_shards
            )
            found.append(delta)
        return found


class Target(ArenaTarget):
    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def commit(self) -> None:
        self.holds_commit()


class Receiver:
    """Memory of the whole model: in one piece, or a piece for each tensor."""

    def __init__(self, trainer: Trainer, *, flat: bool) -> None:
        self.trainer = trainer
        if flat:
            buffer = torch.zeros(trainer.layout.nbytes, dtype=torch.uint8)
            self.memory = Memory.of_stream(trainer.layout, buffer)
        else:
            specs = trainer.model.specs
            self.memory = Memory([torch.zeros(s.nbytes, dtype=torch.uint8) for s in specs])
        for mine, theirs in zip(self.memory.tensors, trainer.full, strict=True):
            mine.copy_(as_bytes(theirs))

    def equal(self) -> bool:
        pairs = zip(self.memory.tensors, self.wanted(), strict=True)
        return all(torch.equal(held, as_bytes(sent)) for held, sent in pairs)

    def wanted(self) -> Sequence[torch.Tensor]:
        return self.trainer.full

    def bits(self) -> list[npt.NDArray[np.uint8]]:
        return [flat.numpy().copy() for flat in self.memory.tensors]

    def lines(self) -> list[StreamLines]:
        return [
            StreamLines(
                stream, StreamPlaces(stream, self.memory).memory, self.trainer.layout, self.memory
            )
            for stream in self.trainer.streams
        ]


class Shards(Receiver):
    """Memory of some boxes of the model's tensors."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.held = []
        for i, spec in enumerate(trainer.model.specs):
            boxes = trainer.boxes(spec.shape, 2)
            self.held += [(i, trainer.random.choice(boxes))]
        shares, tensors = [], []
        for i, box in self.held:
            itemsize = TORCH_DTYPES[trainer.model.specs[i].dtype].itemsize
            shares.append(Share(i, box.blocks(itemsize), box))
            tensors.append(as_bytes(self._part(i, box)).clone())
        self.memory = Memory(tensors, shares=shares)

    def _part(self, i: int, box: Slice) -> torch.Tensor:
        part = torch.empty(box.local_shape, dtype=self.trainer.full[i].dtype)
        for inside, own in box.parts():
            part[own] = self.trainer.full[i][inside]
        return part

    def wanted(self) -> Sequence[torch.Tensor]:
        return [self._part(i, box) for i, box in self.held]


def apply(
    trainer: Trainer, target: LoadTarget, memory: LineMemory, lines: list[StreamLines], step: int
) -> StreamDeltas:
    """Send what changed to a target, the packets of all ranks in turn."""
    base, now = str(step), str(step + 1)
    totals = trainer.totals()
    sent = trainer.deltas(now, base, to_shards=not all(each.proves_base for each in lines))
    written = StreamDeltas(target, memory, lines, totals)
    written.begin()
    left = [(source.tensors(), part) for source, part in zip(sent, written.parts, strict=True)]
    while left:
        packets, part = trainer.random.choice(left)
        pair = next(packets, None)
        if pair is None:
            left.remove((packets, part))
        else:
            part.load([pair])
    written.validate()
    return written


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_a_model_takes_the_lines_of_all_ranks(seed: int, flat: bool) -> None:
    torch.manual_seed(seed)
    trainer = Trainer(seed)
    receiver = Receiver(trainer, flat=flat)
    lines, layout = receiver.lines(), trainer.layout
    trainer.record("0")
    for step in range(4):
        assert [each.total() for each in lines] == trainer.totals()
        before = receiver.bits()
        trainer.change()
        target = Target(receiver.memory)
        recording = RecordingLines(layout, receiver.memory)
        written = apply(trainer, target, recording, lines, step)
        assert receiver.equal()
        after = receiver.bits()
        assert written.totals() == trainer.totals()
        # The marks cover what changed, and a hook is given exactly that.
        assert target.written is not None
        covered = {int(i) for block in marked(target.written) for i in block}
        patches = {patch.name: patch for patch in Patches(layout, recording)}
        for i, spec in enumerate(trainer.model.specs):
            width = TORCH_DTYPES[spec.dtype].itemsize
            changed = (before[i] != after[i]).nonzero()[0].tolist()
            assert {(layout.offsets[i] + at) // LINE for at in changed} <= covered
            elements = sorted({at // width for at in changed})
            given = patches[spec.name].indices.tolist() if spec.name in patches else []
            assert given == elements


@pytest.mark.parametrize("seed", range(60))
def test_shards_take_their_part_of_the_lines_of_all_ranks(seed: int) -> None:
    torch.manual_seed(seed)
    trainer = Trainer(seed)
    receiver = Shards(trainer)
    lines = receiver.lines()
    trainer.record("0")
    for step in range(4):
        for each, total in zip(lines, trainer.totals(), strict=True):
            if each.proves_base:
                assert each.total() == total
        trainer.change()
        target = Target(receiver.memory)
        memory = ShardLines(trainer.layout, receiver.memory)
        written = apply(trainer, target, memory, lines, step)
        assert receiver.equal()
        assert target.written is not None
        sent = any(part._lines for part in written.parts)
        assert bool(count_marked(target.written)) == sent


@pytest.mark.parametrize("seed", range(40))
def test_a_base_that_differs_is_refused(seed: int) -> None:
    """Where a byte differs that the delta overwrites, and where one differs that is read back."""
    torch.manual_seed(seed)
    trainer = Trainer(seed)
    receiver = Receiver(trainer, flat=bool(seed % 2))
    lines = receiver.lines()
    trainer.record("0")
    known = trainer.totals()
    trainer.random.seed(seed)
    flat = trainer.random.choice([each for each in receiver.memory.tensors if each.numel()])
    flat[trainer.random.randrange(flat.numel())] ^= 1
    assert [each.total() for each in lines] != known
    for tensor in trainer.full:  # all lines
        as_bytes(tensor).add_(1)
    model = LineMemory(trainer.layout, receiver.memory)
    with pytest.raises(ws.VerificationError, match="their base differs"):
        apply(trainer, Target(receiver.memory), model, lines, 0)


def test_bytes_beyond_a_box_do_not_count() -> None:
    """What is read back has none of them, so that the sender's sum is not reached."""
    spec = ws.TensorSpec("t", "uint8", (3, 6))
    model = ws.Manifest((spec,))
    columns = [Slice((3, 6), (((0, 3),), span)) for span in (((0, 2),), ((2, 6),))]
    streams = [RankStream(rank, model, [0], [box]) for rank, box in enumerate(columns)]
    memory = Memory([torch.zeros(18, dtype=torch.uint8)])
    layout, first = StreamLayout(model), np.zeros(1, np.uint32)
    for stream in streams:
        lines = StreamLines(stream, StreamPlaces(stream, memory).memory, layout, memory)
        assert lines.proves_base
        content = np.zeros(8, np.uint64)
        content.view(np.uint8)[stream.nbytes] = 1
        assert lines.write(first, content) == 0
        content.view(np.uint8)[stream.nbytes - 1] = 1
        assert lines.write(first, content) != 0
        assert not lines.read(first).view(np.uint8)[stream.nbytes :].any()


def test_a_packet_is_recorded_without_a_look_at_the_whole_model() -> None:
    """Of a model of sixteen million lines, whose marks alone have 2 MiB."""
    spec = ws.TensorSpec("t", "uint8", (1 << 10, 1 << 20))
    model = ws.Manifest((spec,))
    layout = StreamLayout(model)
    half = Slice((1 << 10, 1 << 20), (((0, 1 << 10),), ((1 << 19, 1 << 20),)))
    stream = RankStream(1, model, [0], [half])
    memory = Memory([torch.zeros(spec.nbytes, dtype=torch.uint8)])  # never touched, but two lines
    lines = StreamLines(stream, StreamPlaces(stream, memory).memory, layout, memory)
    recording, marks = RecordingLines(layout, memory), new_marks(count_lines(layout))
    lines.begin(marks, recording)
    lines.write(np.zeros(1, np.uint32), np.zeros(8, np.uint64))  # compiled
    tracemalloc.start()
    try:
        indices = np.array([1 << 20, (1 << 20) + 1], np.uint32)  # row 128
        lines.write(indices, np.full(16, 1, np.uint64))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(marks) // 2
    first = (128 * (1 << 20) + (1 << 19)) // LINE
    assert recording.changes()[0].tolist() == [first, first + 1]
    assert [i for block in marked(marks) for i in block.tolist()] == [
        (1 << 19) // LINE,
        first,
        first + 1,
    ]


@pytest.mark.parametrize(("width", "word"), [(128, 16), (100, 24)])
def test_shards_that_do_not_hold_what_arrived_are_refused(width: int, word: int) -> None:
    """Here two of them lie in the same memory; one byte of a line differs, or of a part of one."""
    layout = StreamLayout(ws.Manifest((ws.TensorSpec("t", "uint8", (2 * width,)),)))
    flat = torch.zeros(width, dtype=torch.uint8)
    boxes = [Slice((2 * width,), ((span,),)) for span in ((0, width), (width, 2 * width))]
    shares = [Share(0, box.blocks(1), box) for box in boxes]
    lines = ShardLines(layout, Memory([flat, flat], shares=shares))
    indices = np.arange(count_lines(layout), dtype=np.uint32)
    content = np.full(len(indices) * 8, 0x0101_0101_0101_0101, np.uint64)
    lines.write(indices, content)
    content[word] += 1
    with pytest.raises(ws.VerificationError, match="does not hold the lines"):
        lines.write(indices, content)
