"""Lines: the 64-byte pieces of a model's stream, their sums, and the lines that changed.

The sum of a line is that of its eight words, each mixed with its position in the stream as `mix64`
mixes them (weights.fingerprint). So the sums of all lines add up to a fingerprint of the model, and
it can be updated from the lines that changed. A `LineTable` keeps the sum of every line: it finds
the changed ones without a second copy of the model. Lines in host memory take loops that numba
compiles (lines.numba_kernels): torch would take longer than sending the whole model. On a GPU
Triton adds up the words of lines, and torch does the rest.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from weightsync.errors import BackendUnavailableError, install_hint
from weightsync.look import KnownForms
from weightsync.specs import Manifest, TensorSpec
from weightsync.tensors import PLAIN_CLASSES, TORCH_DTYPES, as_bytes, contiguous_bytes, is_plain
from weightsync.weights.copying.checksums import MASK
from weightsync.weights.copying.copy_plan import Memory
from weightsync.weights.copying.fingerprint import mixed_words
from weightsync.weights.copying.layout import ALIGNMENT, StreamLayout, aligned

logger = logging.getLogger(__name__)

LINE = ALIGNMENT
"""Bytes of a line. Every tensor begins at a line of its own."""
WORDS = LINE // 8
MAX_LINES = 1 << 32
"""Lines are numbered by 32 bits: a stream of 256 GiB."""
_BLOCK_LINES = 1 << 14
"""Lines that torch works on at a time, and elements that are cast at a time: they fit a cache."""
_GROUP_LINES = 1 << 24
"""Lines of a GPU that are looked at together, at most: 1 GiB, for which the host waits once."""
_LINES_AT_ONCE = 1 << 21
"""Lines that are copied by their numbers at once: 128 MiB, for which a GPU has a buffer."""
_LINES_PER_COPY, _LINES_PER_HOST_COPY = 16, 256
"""Where more than one line in so many has changed, all are copied. On a host one in a hundred takes
as long as all, and one in 256 half of it; by the bytes that move one in 16 takes a GPU an eighth,
which was not measured."""
_HOST = torch.device("cpu")
_MOST_SAMPLES, _MOST_APART = 4096, 512
"""Groups of eight lines that are looked at to estimate how many changed, and one of how many."""

Words = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.uint32]
Marks = npt.NDArray[np.uint8]
"""One bit for each line of a stream, from the lowest of each byte on."""
_NOTHING = np.zeros(0, np.uint8)
_EMPTY_ROWS = torch.zeros((0, 8 * LINE), dtype=torch.uint8)


@cache
def _compiled() -> ModuleType | str:
    """Return the compiled loops, or why there are none."""
    if find_spec("numba") is None:
        return f"numba is not installed: {install_hint('delta')}"
    try:
        from weightsync.weights.lines import numba_kernels  # noqa: PLC0415  # the extra `delta`
    except Exception as exc:  # noqa: BLE001  # a compiler fails in many ways
        logger.warning("no deltas: numba cannot be used: %s", exc)
        return f"numba cannot be used: {exc}"
    return numba_kernels


def kernels() -> Any:
    """Return the compiled loops. Raises BackendUnavailableError where numba cannot be used."""
    found = _compiled()
    if isinstance(found, str):
        raise BackendUnavailableError(f"no deltas here: {found}")
    return found


def why_no_kernels() -> str:
    """Return why there are no compiled loops, an empty string where there are; imports numba."""
    found = _compiled()
    return found if isinstance(found, str) else ""


def may_have_kernels() -> bool:
    """Whether there are compiled loops, as far as is known without importing numba."""
    tried = _compiled.cache_info().currsize > 0
    return not why_no_kernels() if tried else find_spec("numba") is not None


def warm_up() -> None:
    """Compile the loops, or load them from numba's cache: the first time it takes seconds."""
    if why_no_kernels():
        return
    compiled = kernels()
    memory = np.zeros(WORDS, np.uint64)
    spans = np.array([[memory.ctypes.data, LINE, 0]], np.uint64)
    state, table, marks = np.zeros(4, np.uint64), np.zeros(16, np.uint64), new_marks(8)
    indices, lines = np.zeros(8, np.uint32), np.zeros(64, np.uint64)
    compiled.scan(spans, state, table, marks, _NOTHING, indices, lines, np.zeros(512, np.uint8))
    base = np.uint64(memory.ctypes.data)
    compiled.sample(spans, np.uint64(8), table)
    compiled.swap(base, indices[:1], lines)
    compiled.are_growing(indices[:1], np.uint64(1))
    compiled.gather(base, indices[:1], lines)
    compiled.sums_at(spans[0, :1], spans[0, 1:2], table)
    compiled.list_changes(
        indices[:1], lines, lines, np.zeros(32, np.uint64), np.zeros(32, np.uint16)
    )
    compiled.list_differing_bytes(lines, lines, np.zeros(8, np.uint64))
    compiled.list_elements(indices[:1], np.zeros(1, np.uint64), np.uint64(2), np.zeros(0, np.int64))
    compiled.list_lines(np.zeros(1, np.uint64), indices[:1])
    compiled.apply_changes(
        indices[:1], lines.view(np.uint16), np.zeros(1, np.uint64), np.zeros(1, np.uint16)
    )
    compiled.sum_range(base, np.uint64(0), np.uint64(1))
    compiled.mark(marks, indices[:1])
    compiled.list_marked(marks, np.uint64(0), np.uint64(8), np.zeros(16, np.uint32))
    compiled.copy_lines(base, base, indices[:1])
    blocks = np.array([[0, memory.ctypes.data, LINE, 1, LINE, LINE]], np.uint64)
    compiled.scatter(blocks, indices[:1], lines, True)
    compiled.collect(blocks, indices[:1], lines)
    compiled.mark_places(np.zeros((1, 6), np.uint64), indices[:0], marks)
    compiled.sum_of_lines(indices[:1], lines[:8])


def count_lines(layout: StreamLayout) -> int:
    """Return the number of lines of a stream."""
    return layout.nbytes // LINE


def count_lines_of(manifest: Manifest) -> int:
    """Return the number of lines of a stream of these tensors."""
    return sum(aligned(spec.nbytes) for spec in manifest.specs) // LINE


def are_growing(indices: Indices, limit: int) -> bool:
    """Return whether each number is larger than the one before, and the last one below `limit`."""
    return bool(kernels().are_growing(indices, np.uint64(limit)))


def new_marks(lines: int) -> Marks:
    """Return marks of no line."""
    return np.zeros(aligned(lines // 8 + 2), np.uint8)


def mark(marks: Marks, indices: Indices) -> None:
    """Mark the lines with these numbers."""
    kernels().mark(marks, indices)


def marked(marks: Marks) -> Iterator[Indices]:
    """Yield the numbers of the marked lines, in order, in blocks; a block is valid until the next.

    Takes time by the line of the stream, some 0.3 ns.
    """
    compiled = kernels()
    lines = (len(marks) - 1) * 8
    buffer = np.zeros((1 << 16) + 8, np.uint32)
    for first in range(0, lines, 1 << 16):
        stop = min(first + (1 << 16), lines)
        count = int(compiled.list_marked(marks, np.uint64(first), np.uint64(stop), buffer))
        if count:
            yield buffer[:count]


def _together(blocks: Iterable[Indices]) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the numbers of several blocks at once: a GPU is asked seldom, and for many lines."""
    held: list[npt.NDArray[np.int64]] = []
    count = 0
    for block in blocks:
        held.append(block.astype(np.int64))
        count += len(block)
        if count >= _LINES_AT_ONCE:
            yield np.concatenate(held)
            held, count = [], 0
    if held:
        yield np.concatenate(held)


def count_marked(marks: Marks) -> int:
    """Return the number of marked lines."""
    return int(np.bitwise_count(marks.view(np.uint64)).sum())


def touched(layout: StreamLayout, marks: Marks) -> list[int]:
    """Return the positions in the manifest of the tensors that have marked lines."""
    filled = [i for i, spec in enumerate(layout.manifest.specs) if spec.nbytes]
    starts = np.array([layout.offsets[i] // LINE for i in filled])
    found: set[int] = set()
    for indices in marked(marks):
        found.update(np.unique(np.searchsorted(starts, indices, side="right") - 1).tolist())
    return [filled[i] for i in sorted(found)]


@cache
def _kernels_of(device: torch.device) -> ModuleType | None:
    """Return the Triton kernels, None where they do not sum lines as torch does."""
    try:
        from weightsync.cuda import triton_kernels as found  # noqa: PLC0415  # imports triton

        words = torch.arange(8 * 300, device=device)
        mixed = mixed_words(words, torch.arange(57, 57 + words.numel(), device=device))
        if not torch.equal(found.line_sums(words, 7), mixed.view(-1, WORDS).sum(1)):
            raise RuntimeError("it does not add up as torch does")
    except Exception as exc:  # noqa: BLE001  # a compiler at run time fails in many ways
        logger.warning("torch adds up lines on %s, more slowly than Triton would: %s", device, exc)
        return None
    return found


def total_of(flat: torch.Tensor, first: int) -> int:
    """Return the sum of the lines of `uint8[64 * n]`, the first of which is number `first`."""
    if flat.device != _HOST or flat.data_ptr() % 8:
        return int(line_sums(flat, first).sum()) & MASK
    address, count = np.uint64(flat.data_ptr()), np.uint64(flat.numel() // LINE)
    return int(kernels().sum_range(address, np.uint64(first), count))


def line_sums(flat: torch.Tensor, first: int) -> torch.Tensor:
    """Return the sums (`int64[n]`) of `uint8[64 * n]`, whose first line is number `first`."""
    if flat.data_ptr() % 8 or flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat.view(torch.int64)
    compiled = _kernels_of(flat.device) if flat.device.type == "cuda" else None
    if compiled is not None:
        return cast("torch.Tensor", compiled.line_sums(words, first))
    sums = []
    for at in range(0, words.numel(), _BLOCK_LINES * WORDS):
        block = words[at : at + _BLOCK_LINES * WORDS]
        start = first * WORDS + at + 1
        keys = torch.arange(start, start + block.numel(), device=block.device)
        sums.append(mixed_words(block, keys).view(-1, WORDS).sum(1))
    return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.int64, device=flat.device)


def _lines_of(first: int, groups: range) -> npt.NDArray[np.int64]:
    """Return the numbers of the lines in `groups` of a tensor that begins at line `first`."""
    return ((np.array(groups) * 8 + first)[:, None] + np.arange(8)).reshape(-1)


def _keys(lines: torch.Tensor) -> torch.Tensor:
    """Return the positions, from 1 on, of the words of these lines (`int64[n, 8]`)."""
    return lines.unsqueeze(1) * WORDS + torch.arange(1, WORDS + 1, device=lines.device)


def _padded(flat: torch.Tensor) -> torch.Tensor:
    """Return whole lines of these bytes, the last one filled with zeros."""
    missing = -flat.numel() % LINE
    return flat if not missing else torch.cat([flat, flat.new_zeros(missing)])


class LineBuffer:
    """Room for `capacity` changed lines: `indices[i]` is the number of `lines[i]` (`uint64[8]`).

    `memory` is `uint8[capacity * 68]`, in which both lie; the capacity is a multiple of 16.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        capacity = memory.numel() // (LINE + 4)
        words = memory.numpy()
        self.indices: Indices = words[: 4 * capacity].view(np.uint32)
        self.lines: Words = words[4 * capacity :].view(np.uint64)
        self.count = 0

    @property
    def capacity(self) -> int:
        """The number of lines that fit."""
        return len(self.indices)

    @property
    def filled(self) -> Indices:
        """The numbers of the lines that were written."""
        return self.indices[: self.count]

    @property
    def content(self) -> Words:
        """The lines that were written."""
        return self.lines[: self.count * WORDS]


@dataclass(slots=True)
class _Span:
    """Consecutive bytes of the stream in one memory, from line `first` on.

    Unless it `stays`, the memory is valid until the next span.
    """

    flat: torch.Tensor
    first: int
    stays: bool = True

    @property
    def stop(self) -> int:
        """The line after the last one."""
        return self.first + -(-self.flat.numel() // LINE)

    def whole_lines(self) -> Iterator[_Span]:
        """Yield the whole lines, and a last line that is filled with zeros."""
        filled = self.flat.numel() // LINE * LINE
        if filled:
            yield _Span(self.flat[:filled], self.first)
        if filled < self.flat.numel():
            yield _Span(_padded(self.flat[filled:]), self.first + filled // LINE)


def _places(spans: Sequence[_Span]) -> Words:
    """Return spans in host memory as the compiled loops want them."""
    places = [(span.flat.data_ptr(), span.flat.numel(), span.first) for span in spans]
    return np.array(places, np.uint64).reshape(-1, 3)


class KnownSpans:
    """Finds where the tensors of a source lie in host memory; at once if they have not moved."""

    def __init__(self, layout: StreamLayout) -> None:
        self._layout = layout
        self._forms = KnownForms()
        self._known: tuple[list[int], Words] | None = None

    def find(self, tensors: Sequence[torch.Tensor]) -> Words | None:
        """Return the spans of all tensors, None unless their own memory is what is sent."""
        look = self._forms.look(tensors, versions=False)
        if self._known is not None and look.known and look.addresses == self._known[0]:
            return self._known[1]
        self._known = None
        for tensor, spec in zip(tensors, self._layout.manifest.specs, strict=True):
            whole = tensor.device == _HOST and _is_sampled(tensor, spec)
            if not whole or tensor.dtype is not TORCH_DTYPES[spec.dtype]:
                return None
        filled = zip(tensors, self._layout.offsets, strict=True)
        places = _places([_Span(as_bytes(t), at // LINE) for t, at in filled if t.numel()])
        self._forms.note(tensors)
        self._known = look.addresses, places
        return places


class LineSample:
    """The sums of some lines of a source, to estimate cheaply how many change between updates.

    It looks at 4096 groups of eight lines, at one in 512 where these are more, at all of a small
    stream. Only contiguous tensors: those that are sent, or those of which casts are sent.
    """

    def __init__(self, layout: StreamLayout) -> None:
        groups = count_lines(layout) // 8
        self._step = min(max(groups // _MOST_SAMPLES, 1), _MOST_APART)
        self._known = KnownSpans(layout)
        self._layout = layout
        self._sent: Words | None = None
        self._sums: Words | None = None

    def note_sent(self) -> None:
        """Note that what the last call of `changed_share` has looked at was sent."""
        self._sent = self._sums

    def changed_share(self, tensors: Sequence[torch.Tensor]) -> float | None:
        """Return the share of lines that changed since the tensors that were sent; None if unknown.

        An update may look more than once before it sends, or fail.
        """
        spans = self._known.find(tensors)
        if spans is None and not all(map(_is_sampled, tensors, self._layout.manifest.specs)):
            return None
        if spans is not None:
            room = int(sum(spans[:, 1]) // (512 * self._step) + len(spans) + 1) * 8
            sums = np.zeros(room, np.uint64)
            sums = sums[: int(kernels().sample(spans, np.uint64(self._step), sums))]
        else:
            sums = self._sample_with_torch(tensors)
        before, self._sums = self._sent, sums
        if before is None or len(before) != len(sums) or not len(sums):
            return None
        return float((before != sums).mean())

    def _sample_with_torch(self, tensors: Sequence[torch.Tensor]) -> Words:
        rows = [_EMPTY_ROWS.to(tensors[0].device) if tensors else _EMPTY_ROWS]
        numbers = [np.zeros(0, np.int64)]
        specs = self._layout.manifest.specs
        for tensor, spec, offset in zip(tensors, specs, self._layout.offsets, strict=True):
            first, groups = offset // LINE, spec.nbytes // LINE // 8
            at = -(first // 8) % self._step
            if at < groups:
                dtype = TORCH_DTYPES[spec.dtype]
                elements = 8 * LINE // dtype.itemsize
                flat = tensor.detach().view(-1)[: groups * elements].view(groups, elements)
                rows.append(flat[at :: self._step].to(dtype).view(torch.uint8))
                numbers.append(_lines_of(first, range(at, groups, self._step)))
        same = len({part.device for part in rows}) == 1
        words = (
            torch.cat(rows if same else [part.cpu() for part in rows]).view(torch.int64).view(-1)
        )
        keys = _keys(torch.from_numpy(np.concatenate(numbers)).to(words.device)).view(-1)
        sums = mixed_words(words, keys).view(-1, WORDS).sum(1)
        return sums.cpu().numpy().view(np.uint64)


def _is_sampled(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    """Whether lines of the tensor, or of its cast, can be read without the others."""
    casts = tensor.is_floating_point() and TORCH_DTYPES[spec.dtype].is_floating_point
    return (
        type(tensor) in PLAIN_CLASSES
        and tensor.shape == spec.shape
        and (casts or tensor.dtype is TORCH_DTYPES[spec.dtype])
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj())
        and (tensor.data_ptr() != 0 or not spec.nbytes)
    )


class LineTable:
    """The sum of every line of a source's stream, by which the next scan finds what changed.

    It takes an eighth of the model's bytes, on the device of the tensors: those of tensors on a GPU
    are on the host only where the GPU has no room. `total` is the sum of all lines, modulo 2^64:
    the fingerprint of the stream. A scan that ends in the middle leaves a table in which each line
    is either as before or as it is now.
    """

    def __init__(self, layout: StreamLayout) -> None:
        self._layout = layout
        self.lines = count_lines(layout)
        self._sums: Words = np.zeros(self.lines + WORDS, np.uint64)
        with torch.inference_mode(False):
            self._on_host = torch.from_numpy(self._sums.view(np.int64))
        self._on_gpus: dict[torch.device, torch.Tensor] = {}
        self._crowded: set[torch.device] = set()
        # Where the sums of each tensor are; they are zeros in the tables of other devices.
        self._places: list[torch.device | None] = [None] * len(layout.manifest.specs)
        self._scratch = np.zeros(8 * LINE, np.uint8)
        self._known = KnownSpans(layout)
        self.total = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        used = any(place not in self._on_gpus for place in self._places)  # else it has no pages
        return used * self._sums.nbytes + sum(table.nbytes for table in self._on_gpus.values())

    def scan(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        marks: Marks,
        *,
        also: Marks | None = None,
        packs: bool = False,
        start: int = 0,
    ) -> Generator[None, LineBuffer, None]:
        """Compare all tensors of the source with the table, and mark the lines that changed.

        `tensors` are in the manifest's order from position `start` on, as the source yields them or
        has them. If it `packs`, changed lines and those that are marked in `also` are written to
        buffers: this yields first, and when a buffer is full, and is sent the next one.
        """
        extra = _NOTHING if also is None else also
        into = (yield) if packs else None
        whole = isinstance(tensors, Sized) and len(tensors) == len(self._layout.manifest.specs)
        if whole:
            spans = self._known.find([tensor for _, tensor in tensors])
            if spans is not None:
                for i in range(len(self._places) if self._on_gpus else 0):
                    self._place(i, _HOST)
                yield from self._scan_compiled(spans, marks, extra, into)
                return
        for spans_together in _grouped(self._spans(tensors, start), stay=whole):
            if spans_together[0].flat.device == _HOST:
                places = _places(spans_together)
                into = yield from self._scan_compiled(places, marks, extra, into)
            else:
                into = yield from self._scan_with_torch(spans_together, marks, extra, into)

    def sum_of(self, first: int, count: int) -> int:
        """Return the sum of `count` lines as the last scan saw them."""
        return int(sum(int(t[first : first + count].sum()) for t in self._tables())) & MASK

    def sum_of_lines(self, indices: Indices) -> int:
        """Return the sum of the lines with these numbers as the last scan saw them."""
        places = torch.from_numpy(indices.astype(np.int64))
        return int(sum(int(t[places.to(t.device)].sum()) for t in self._tables())) & MASK

    def _tables(self) -> Iterator[torch.Tensor]:
        """Yield the tables (`int64[lines]`) of all devices."""
        yield self._on_host
        yield from self._on_gpus.values()

    def _table(self, device: torch.device) -> torch.Tensor:
        """Return the table in which the sums of tensors on this device are."""
        return self._on_gpus.get(device, self._on_host)

    def _place(self, i: int, device: torch.device) -> None:
        """Keep the sums of tensor `i`, which is on `device` now, in that device's table."""
        former = self._places[i]
        if former == device:
            return
        if device != _HOST and device not in self._on_gpus and device not in self._crowded:
            try:
                with torch.inference_mode(False):
                    self._on_gpus[device] = torch.zeros(
                        self.lines + WORDS, dtype=torch.int64, device=device
                    )
            except torch.OutOfMemoryError:
                self._crowded.add(device)
                logger.warning(
                    "%s has no room for %d sums; they are on the host", device, self.lines
                )
        self._places[i] = device
        first = self._layout.offsets[i] // LINE
        stop = first + -(-self._layout.manifest.specs[i].nbytes // LINE)
        if former is not None and self._table(former) is not self._table(device):
            before, now = (self._table(place)[first:stop] for place in (former, device))
            now.copy_(before)
            before.zero_()

    def _spans(self, tensors: Iterable[tuple[str, torch.Tensor]], start: int) -> Iterator[_Span]:
        """Yield the bytes that are sent, each span valid until the next."""
        layout = self._layout
        for i, (_, tensor) in enumerate(tensors, start):
            spec, first = layout.manifest.specs[i], layout.offsets[i] // LINE
            self._place(i, tensor.device)
            if spec.nbytes and is_plain(tensor, spec):
                yield _Span(as_bytes(tensor), first)
            elif spec.nbytes:
                yield from _cast(tensor, spec, first)

    def _scan_compiled(
        self, spans: Words, marks: Marks, also: Marks, into: LineBuffer | None
    ) -> Generator[None, LineBuffer, LineBuffer | None]:
        compiled = kernels()
        state = np.zeros(4, np.uint64)
        while True:
            indices = np.zeros(0, np.uint32) if into is None else into.indices
            lines = np.zeros(0, np.uint64) if into is None else into.lines
            state[2], state[3] = 0 if into is None else into.count, 0
            done = compiled.scan(
                spans, state, self._sums, marks, also, indices, lines, self._scratch
            )
            self.total = self.total + int(state[3]) & MASK
            if into is not None:
                into.count = int(state[2])
            if done:
                return into
            into = yield

    def _scan_with_torch(
        self, group: Sequence[_Span], marks: Marks, also: Marks, into: LineBuffer | None
    ) -> Generator[None, LineBuffer, LineBuffer | None]:
        """Scan spans that follow one another on one device, with one wait for a GPU."""
        first, stop = group[0].first, group[-1].stop
        pieces = [piece for span in group for piece in span.whole_lines()]
        table = self._table(pieces[0].flat.device)[first:stop]
        sums = [line_sums(piece.flat, piece.first) for piece in pieces]
        now = (sums[0] if len(sums) == 1 else torch.cat(sums)).to(table.device)
        changed = now != table
        self.total = self.total + int((now - table).sum()) & MASK
        table.copy_(now)
        found = changed.nonzero().view(-1).cpu().numpy() + first
        mark(marks, found.astype(np.uint32))
        if into is None:
            return None
        if len(also):
            bits = np.unpackbits(also[first // 8 : stop // 8 + 1], bitorder="little")
            marked_too = np.flatnonzero(bits[first % 8 :][: stop - first]) + first
            found = np.union1d(found, marked_too)
        lines = _gathered(pieces, found)
        at = 0
        while at < len(found):
            if into.count == into.capacity:
                into = yield
            until = min(len(found), at + into.capacity - into.count)
            stop_at = into.count + until - at
            into.indices[into.count : stop_at] = found[at:until]
            into.lines[into.count * WORDS : stop_at * WORDS] = lines[at * WORDS : until * WORDS]
            into.count, at = stop_at, until
        return into


def _grouped(spans: Iterator[_Span], *, stay: bool) -> Iterator[list[_Span]]:
    """Yield spans that follow one another on one device together, up to `_GROUP_LINES` of a GPU.

    Unless they `stay` valid, one by one.
    """
    group: list[_Span] = []
    for span in spans:
        if group and (
            span.flat.device != group[-1].flat.device
            or span.first != group[-1].stop
            or span.stop - group[0].first > _GROUP_LINES
        ):
            yield group
            group = []
        group.append(span)
        if not (stay and span.stays) or span.flat.device == _HOST:
            yield group
            group = []
    if group:
        yield group


def _gathered(pieces: Sequence[_Span], indices: npt.NDArray[np.int64]) -> Words:
    """Return the contents (`uint64[8 * n]`) of lines of the stream, which lie in these pieces."""
    on_device = torch.from_numpy(indices).to(pieces[0].flat.device)
    ends = np.searchsorted(indices, [piece.stop for piece in pieces]).tolist()
    rows, at = [torch.zeros((0, LINE), dtype=torch.uint8, device=on_device.device)], 0
    for piece, end in zip(pieces, ends, strict=True):
        if end > at:
            rows.append(piece.flat.view(-1, LINE)[on_device[at:end] - piece.first])
        at = end
    return torch.cat(rows).view(-1).cpu().numpy().view(np.uint64)


def _cast(tensor: torch.Tensor, spec: TensorSpec, first: int) -> Iterator[_Span]:
    """Yield the bytes of a tensor that is cast, block by block, each valid until the next."""
    dtype = TORCH_DTYPES[spec.dtype]
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        yield _Span(contiguous_bytes(tensor.detach().to(dtype)), first)
        return
    flat = tensor.detach().view(-1)
    lines = _BLOCK_LINES if tensor.device == _HOST else _GROUP_LINES // 4
    size = lines * LINE // dtype.itemsize
    block = torch.empty(min(size, flat.numel()), dtype=dtype, device=tensor.device)
    for at in range(0, flat.numel(), size):
        part = flat[at : at + size]
        block[: part.numel()].copy_(part)
        here = first + at * dtype.itemsize // LINE
        yield _Span(as_bytes(block[: part.numel()]), here, stays=False)


class LineMemory:
    """The lines of a receiver's memory, whole tensors in the layout of a stream.

    Where it `proves_base`, `write` tells what the lines held before. Raises ValueError for shards
    (ShardLines takes those), and for words on a GPU that are not aligned.
    """

    proves_base = True
    is_flat = False

    def __init__(self, layout: StreamLayout, memory: Memory) -> None:
        if memory.shares is not None:
            raise ValueError("shards of tensors have no whole lines")
        self.lines = count_lines(layout)
        self._tensors: list[tuple[int, torch.Tensor]] = []
        self._base = 0
        filled = [
            (offset // LINE, flat)
            for offset, flat in zip(layout.offsets, memory.tensors, strict=True)
            if flat.numel()
        ]
        flat = memory.flat and bool(filled)
        on_host = all(tensor.device == _HOST for tensor in memory.tensors)
        self.is_flat = flat and on_host
        self._on_host = on_host
        self._rows: torch.Tensor | None = None
        if self.is_flat:
            self._base = filled[0][1].data_ptr() - filled[0][0] * LINE
        else:
            if not on_host and any(flat.data_ptr() % 8 for _, flat in filled):
                raise ValueError("the memory of a tensor is not aligned")
            self._tensors = filled
            if flat:
                self._rows = _all_rows(*filled[0], self.lines)
        self._starts = [first for first, _ in self._tensors]
        self._filled = np.array([first for first, _ in filled], np.int64)
        self._sizes = np.array([flat.numel() for _, flat in filled], np.int64)
        self._memory = memory
        ends = [(first + f.numel() // LINE, f.numel() % LINE) for first, f in filled]
        self._ends = np.array([end for end in ends if end[1]], np.int64).reshape(-1, 2)

    @property
    def memory(self) -> Memory:
        """The memory that has the lines."""
        return self._memory

    def write(self, indices: Indices, lines: Words) -> int:
        """Overwrite lines; return the sum of the new ones, read back, less that of the old ones.

        `indices` is uint32[n], growing, each below `lines`; `lines` is uint64[8 * n].
        """
        if self.is_flat or self._rows is not None:
            self._check_ends(indices, lines)
        if self.is_flat:
            return self._swap_compiled(self._base, indices, lines)
        if self._rows is not None:
            return _swap_rows(self._rows, 0, indices, lines) & MASK
        change, at = 0, 0
        while at < len(indices):
            first, flat = self._tensors[bisect_right(self._starts, int(indices[at])) - 1]
            whole = flat.numel() // LINE
            stop = int(np.searchsorted(indices, first + whole))
            if stop > at:
                change += self._swap_whole(
                    flat, first, indices[at:stop], lines[at * WORDS : stop * WORDS]
                )
                at = stop
            elif int(indices[at]) == first + whole and flat.numel() % LINE:
                change += _swap_last(flat, first, lines[at * WORDS : (at + 1) * WORDS])
                at += 1
            else:
                raise ValueError(f"line {indices[at]} is none of the stream's tensors")
        return change & MASK

    def _check_ends(self, indices: Indices, lines: Words) -> None:
        """Raise ValueError for bytes beyond the end of a tensor that are not zeros.

        They would stay in the gaps of flat memory, which fingerprints of whole updates include.
        """
        ends, filled = self._ends[:, 0], self._ends[:, 1:]
        at = np.searchsorted(indices, ends)
        found = (at < len(indices)) & (indices[np.minimum(at, len(indices) - 1)] == ends)
        rows = lines.view(np.uint8).reshape(-1, LINE)[at[found]]
        if (rows[np.arange(LINE) >= filled[found]] != 0).any():
            raise ValueError("a line has bytes beyond the end of its tensor")

    def read(self, indices: Indices) -> Words:
        """Return the contents of lines (`uint64[8 * n]`); `indices` as those of `write`.

        Of the last line of a tensor, zeros beyond its bytes.
        """
        lines = np.zeros(len(indices) * WORDS, np.uint64)
        if self.is_flat:
            kernels().gather(np.uint64(self._base & MASK), indices, lines)
            return lines
        if self._rows is not None:
            chosen = torch.from_numpy(indices.astype(np.int64)).to(self._rows.device)
            return self._rows[chosen].view(-1).cpu().numpy().view(np.uint64)
        at, out = 0, torch.from_numpy(lines.view(np.uint8))
        while at < len(indices):
            first, flat = self._tensors[bisect_right(self._starts, int(indices[at])) - 1]
            stop = int(np.searchsorted(indices, first + -(-flat.numel() // LINE)))
            if stop == at:
                raise ValueError(f"line {indices[at]} is none of the stream's tensors")
            rows = _padded(flat).view(-1, LINE)
            chosen = torch.from_numpy((indices[at:stop] - np.uint32(first)).astype(np.int64))
            out[at * LINE : stop * LINE] = rows[chosen.to(rows.device)].view(-1).cpu()
            at = stop
        return lines

    def sum_of(self, first: int, count: int) -> int:
        """Return the sum of `count` lines as they are in memory now."""
        if self.is_flat:
            return self._sum_compiled(self._base + first * LINE, first, count)
        if self._rows is not None:
            rows = self._rows[first : first + count].view(-1).view(torch.uint8)
            return int(line_sums(rows, first).sum()) & MASK
        total, stop = 0, first + count
        for start, flat in self._tensors:
            begin, end = max(first, start), min(stop, start + -(-flat.numel() // LINE))
            if begin < end:
                part = _padded(flat[(begin - start) * LINE : (end - start) * LINE])
                if part.device == _HOST:
                    total += self._sum_compiled(part.data_ptr(), begin, end - begin)
                else:
                    total += int(line_sums(part, begin).sum())
        return total & MASK

    def total(self) -> int:
        """Return the sum of all lines as they are in memory now: the fingerprint of the stream."""
        firsts = range(0, self.lines, _GROUP_LINES)
        return sum(self.sum_of(at, min(_GROUP_LINES, self.lines - at)) for at in firsts) & MASK

    def copy_from(self, other: LineMemory, marks: Marks | None) -> None:
        """Copy at least the marked lines of a memory of the same layout, None: all of them."""
        if self.is_flat and other.is_flat and marks is not None:
            for indices in marked(marks):
                kernels().copy_lines(np.uint64(self._base), np.uint64(other._base), indices)
            return
        per_copy = _LINES_PER_HOST_COPY if self._on_host else _LINES_PER_COPY
        if marks is not None and count_marked(marks) * per_copy < self.lines:
            for numbers in _together(marked(marks)):
                self._copy_lines(other, numbers)
            return
        for mine, theirs in zip(self._memory.tensors, other.memory.tensors, strict=True):
            mine.copy_(theirs)

    def _copy_lines(self, other: LineMemory, indices: npt.NDArray[np.int64]) -> None:
        """Copy these lines of a memory of the same layout; does not wait for a GPU."""
        if self._rows is not None and other._rows is not None:
            chosen = torch.from_numpy(indices).to(self._rows.device)
            self._rows[chosen] = other._rows[chosen]
            return
        mine, theirs = (
            [flat for flat in memory.tensors if flat.numel()]
            for memory in (self._memory, other.memory)
        )
        begins = np.searchsorted(indices, self._filled)
        ends = np.searchsorted(indices, self._filled + -(-self._sizes // LINE))
        for i in np.flatnonzero(ends > begins).tolist():
            chosen = indices[begins[i] : ends[i]] - self._filled[i]
            whole = int(self._sizes[i]) // LINE
            if chosen[-1] == whole:  # the last line, which the tensor does not fill
                mine[i][whole * LINE :].copy_(theirs[i][whole * LINE :])
                chosen = chosen[:-1]
            if len(chosen):
                at = torch.from_numpy(chosen).to(mine[i].device)
                rows, sources = (
                    flat[: whole * LINE].view(-1, LINE) for flat in (mine[i], theirs[i])
                )
                rows[at] = sources[at]

    def _swap_whole(self, flat: torch.Tensor, first: int, indices: Indices, lines: Words) -> int:
        """Overwrite whole lines of one tensor, which begins at line `first`."""
        if flat.device == _HOST:
            return self._swap_compiled(flat.data_ptr() - first * LINE, indices, lines)
        rows = flat[: flat.numel() // LINE * LINE].view(torch.int64).view(-1, WORDS)
        return _swap_rows(rows, first, indices, lines)

    @staticmethod
    def _swap_compiled(base: int, indices: Indices, lines: Words) -> int:
        return int(kernels().swap(np.uint64(base & MASK), indices, lines))

    @staticmethod
    def _sum_compiled(address: int, first: int, count: int) -> int:
        return int(kernels().sum_range(np.uint64(address), np.uint64(first), np.uint64(count)))


def _all_rows(first: int, flat: torch.Tensor, lines: int) -> torch.Tensor:
    """View the memory of a stream, in which `flat` begins at line `first`, as `int64[lines, 8]`."""
    begin = flat.storage_offset() - first * LINE
    return flat.as_strided((lines * LINE,), (1,), begin).view(torch.int64).view(-1, WORDS)


def _swap_rows(rows: torch.Tensor, first: int, indices: Indices, lines: Words) -> int:
    """Overwrite lines of `int64[n, 8]`, whose first is number `first`; return as LineMemory.write.

    Waits once for a GPU.
    """
    lines_there = torch.from_numpy(indices.astype(np.int64)).to(rows.device)
    new = torch.from_numpy(lines.view(np.int64).reshape(-1, WORDS)).to(rows.device)
    chosen, keys = lines_there - first, _keys(lines_there)
    before = mixed_words(rows[chosen], keys.clone()).sum()
    rows[chosen] = new
    return int(mixed_words(rows[chosen], keys).sum() - before)


def _swap_last(flat: torch.Tensor, first: int, line: Words) -> int:
    """Overwrite the last line of a tensor, which it does not fill."""
    begin = flat.numel() // LINE * LINE
    number, last = first + begin // LINE, flat[begin:]
    old = int(line_sums(_padded(last), number))
    new = torch.from_numpy(line.view(np.uint8))
    last.copy_(new[: last.numel()])
    beyond = new.clone()
    beyond[: last.numel()] = last  # bytes beyond the tensor count, so that they are zeros
    return int(line_sums(beyond, number)) - old
