"""Lines of the streams of several ranks, in the memory of the model that they are boxes of."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from weightsync.weights.copying.copy_plan import Memory
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.copying.rank_streams import RankStream
from weightsync.weights.lines.memory import (
    LINE,
    Indices,
    LineMemory,
    Marks,
    Words,
    kernels,
    mark,
    marked,
    new_marks,
)
from weightsync.weights.lines.patches import RecordingLines
from weightsync.weights.lines.shard_lines import BoxLines, ShardLines, parts_of


@dataclass(frozen=True, slots=True)
class PlacedStreams:
    """The streams of several ranks, and where the boxes of each belong in one memory of the model.

    `digest` identifies the streams: the sums of their lines are comparable within one only.
    """

    digest: str
    streams: Sequence[RankStream]
    places: Sequence[Memory]


class StreamLines(LineMemory):
    """The lines of one rank's stream, in the memory `model` of the whole model or of its shards.

    `places` has a place for each box of the stream, in that memory. Raises ValueError for memory
    on a GPU.
    """

    def __init__(
        self, stream: RankStream, places: Memory, layout: StreamLayout, model: Memory
    ) -> None:
        if not (places.on_host() and model.on_host()):
            raise ValueError("the lines of several streams go to host memory")
        own = StreamLayout(stream.manifest)
        whole = model.shares is None
        self._inner: LineMemory
        if places.shares is None:
            self._inner = LineMemory(own, places)
        else:
            self._inner = BoxLines(own, places) if whole else ShardLines(own, places)
        self.proves_base = self._inner.proves_base
        self.lines = self._inner.lines
        self._blocks = _of_model(stream, own, places, layout, model) if whole else []
        self._starts = [first for first, _, _ in self._blocks]
        self._of_shards = [] if whole else _first_lines(stream, own, layout)
        self._firsts = [first for first, _, _ in self._of_shards]
        self._marks: Marks | None = None
        self._recording: RecordingLines | None = None

    def begin(self, marks: Marks, recording: RecordingLines | None) -> None:
        """Mark the lines of the model that `write` changes from now on, and record the bytes.

        Of shards only the first line of each tensor is marked.
        """
        self._marks, self._recording = marks, recording

    def end(self) -> None:
        """Mark and record nothing any more."""
        self._marks = self._recording = None

    def write(self, indices: Indices, lines: Words) -> int:
        with self._noting(indices):
            return self._inner.write(indices, lines)

    def read(self, indices: Indices) -> Words:
        return self._inner.read(indices)

    def sum_of(self, first: int, count: int) -> int:
        return self._inner.sum_of(first, count)

    @property
    def memory(self) -> Memory:
        """The places of the boxes."""
        return self._inner.memory

    def _noting(self, indices: Indices) -> AbstractContextManager[None]:
        if self._marks is None:
            return nullcontext()
        if self._recording is None:
            self._mark(self._marks, indices)
            return nullcontext()
        places = self._places_of(indices)
        mark(self._marks, places)
        return self._recording.recording(places)

    def _mark(self, marks: Marks, indices: Indices) -> None:
        for begin, end, blocks in parts_of(indices, self._starts, self._blocks):
            kernels().mark_places(blocks, indices[begin:end], marks)
        for _, _, line in parts_of(indices, self._firsts, self._of_shards):
            mark(marks, line)

    def _places_of(self, indices: Indices) -> Indices:
        """Return the lines of the model that `_mark` marks, growing.

        Takes time by the lines from the first to the last one in each box, not by the model.
        """
        found = [np.zeros(0, np.uint32)]
        for begin, end, blocks in parts_of(indices, self._starts, self._blocks):
            here = indices[begin:end]
            first, stop = _places_between(blocks, int(here[0]), int(here[-1]) + 1)
            marks, moved = new_marks(stop - first), blocks.copy()
            moved[:, 1] -= np.uint64(first * LINE)
            kernels().mark_places(moved, here, marks)
            found += [block + np.uint32(first) for block in marked(marks)]
        found += [line for _, _, line in parts_of(indices, self._firsts, self._of_shards)]
        return np.unique(np.concatenate(found))


def _places_between(blocks: Words, first: int, stop: int) -> tuple[int, int]:
    """Return a range of the model's lines that has the bytes of these lines of a box."""
    begin, end = first * LINE, stop * LINE
    source, target, width, height, apart, target_apart = blocks.astype(np.int64).T
    low = np.maximum((begin - source - width) // apart + 1, 0)
    high = np.minimum((end - 1 - source) // apart, height - 1)
    low_at, high_at = source + low * apart, source + high * apart
    places = target + low * target_apart + np.maximum(begin - low_at, 0)
    ends = target + high * target_apart + np.minimum(end - high_at, width)
    here = low <= high
    return int(places[here].min()) // LINE, -(-int(ends[here].max()) // LINE)


def _of_model(
    stream: RankStream, own: StreamLayout, places: Memory, layout: StreamLayout, model: Memory
) -> list[tuple[int, int, Words]]:
    """Return, for each box, its lines and where its bytes are in the stream of the whole model."""
    by_box: dict[int, list[list[int]]] = {}
    for at, tensor in enumerate(places.tensors):
        i = at if places.shares is None else places.shares[at].index
        index, begin, nbytes = stream.indices[i], own.offsets[i], own.manifest.specs[i].nbytes
        if not nbytes:
            continue
        place = layout.offsets[index] + tensor.data_ptr() - model.tensors[index].data_ptr()
        blocks = by_box.setdefault(i, [])
        if places.shares is None:
            blocks.append([begin, place, nbytes, 1, nbytes, nbytes])
            continue
        blocks.extend(
            [
                begin + block.source,
                place + block.target,
                block.width,
                block.height,
                block.source_stride,
                block.target_stride,
            ]
            for block in places.shares[at].blocks
        )
    return [
        (*_lines(own, i), np.array(blocks, np.uint64).reshape(-1, 6))
        for i, blocks in sorted(by_box.items())
    ]


def _first_lines(
    stream: RankStream, own: StreamLayout, layout: StreamLayout
) -> list[tuple[int, int, Indices]]:
    """Return, for each box, its lines and the first line of its tensor in the stream of a model."""
    return [
        (*_lines(own, i), np.array([layout.offsets[index] // LINE], np.uint32))
        for i, index in enumerate(stream.indices)
        if own.manifest.specs[i].nbytes
    ]


def _lines(layout: StreamLayout, i: int) -> tuple[int, int]:
    """Return the first line of a tensor, and the line after its last one."""
    begin = layout.offsets[i]
    return begin // LINE, -(-(begin + layout.manifest.specs[i].nbytes) // LINE)
