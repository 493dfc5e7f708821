"""One line of each tensor of a memory: read at a commit, and again before the next delta.

A delta leaves most bytes of the weights in use as they are. Where other code has thrown these away
(a tensor that was zeroed through `.data`, memory that was freed and mapped again), torch counts no
write. The lines that are read show it at once, and take a cache line for each tensor.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightsync.tensors import contiguous_bytes
from weightsync.weights.copying.checksums import GOLDEN, MULTIPLIERS
from weightsync.weights.copying.copy_plan import Memory
from weightsync.weights.lines.memory import LINE, WORDS, Words, kernels, why_no_kernels

_MIXED = np.uint64(GOLDEN)
_KEYS = np.array([pow(MULTIPLIERS[0], i, 1 << 64) for i in range(1, WORDS + 1)], np.uint64)

_COPIED_NBYTES = 64 << 20
"""Copies of strided tensors that exist at a time, but for the last."""


class SpotCheck:
    """One line of each tensor of `memory`, as it is now; the lines are others each time.

    Of a tensor of less than a line, all bytes. Takes 8 bytes for each tensor. `places` are those of
    an earlier check of the same memory, if there is one: it takes time to find them.
    """

    def __init__(self, memory: Memory, places: TensorPlaces | None = None) -> None:
        self.memory = memory
        self.places = TensorPlaces(memory.tensors) if places is None else places
        self._begins = self.places.choose(secrets.randbits(64)) * np.uint64(LINE)
        # Kept, since the sums of the two loops differ.
        compiles = self.places.on_host and not why_no_kernels()
        self._kernels: Any = kernels() if compiles else None
        self._sums = self._read(memory.tensors, self.places, self._begins)

    def changed(self) -> list[int]:
        """Return the positions of the tensors whose lines differ from what they were."""
        sums = self._read(self.memory.tensors, self.places, self._begins)
        return _positions(sums != self._sums)

    def changed_in(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the positions of those of these tensors that do not hold the lines of `memory`.

        The tensors have any layout. Those that are not contiguous are copied, a few at a time.
        """
        if len(tensors) != len(self._sums):
            return list(range(len(self._sums)))
        changed: list[int] = []
        for first, stop in _batches(tensors):
            batch = [contiguous_bytes(tensor) for tensor in tensors[first:stop]]
            places, own = TensorPlaces(batch), slice(first, stop)
            off_host = self._kernels is not None and not places.on_host
            if off_host or not places.fit(self.places, own):
                return list(range(len(tensors)))
            differs = self._read(batch, places, self._begins[own]) != self._sums[own]
            changed += [first + position for position in _positions(differs)]
        return changed

    def _read(self, tensors: Sequence[torch.Tensor], places: TensorPlaces, begins: Words) -> Words:
        """Return a sum of the line at `begins[i]` of each of `tensors`, `uint8[nbytes]`."""
        if self._kernels is None:
            return _sums_of(tensors, places.widths, begins)
        sums = np.zeros(len(begins), np.uint64)
        self._kernels.sums_at(places.addresses + begins, places.widths, sums)
        return sums


class Look:
    """One line of each of these tensors, as it is now. They have any layout, and are not kept."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._parts: list[tuple[int, int, SpotCheck]] = []
        for first, stop in _batches(tensors):
            memory = Memory([contiguous_bytes(tensor) for tensor in tensors[first:stop]])
            self._parts.append((first, stop, SpotCheck(memory)))
            memory.forget()  # copies, where tensors are not contiguous

    def finds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors hold the same lines."""
        return not any(check.changed_in(tensors[a:b]) for a, b, check in self._parts)


def _sums_of(tensors: Sequence[torch.Tensor], widths: Words, begins: Words) -> Words:
    """Return the sums of `SpotCheck`, by torch and NumPy."""
    content = torch.zeros((len(begins), LINE), dtype=torch.uint8)
    for width in np.unique(widths).tolist():  # one transfer from a GPU for each
        chosen = np.flatnonzero(widths == width)
        rows = [
            tensors[i][begin : begin + width]
            for i, begin in zip(chosen.tolist(), begins[chosen].tolist(), strict=True)
        ]
        if len({row.device for row in rows}) > 1:
            rows = [row.cpu() for row in rows]
        content[torch.from_numpy(chosen), :width] = torch.cat(rows).cpu().view(len(rows), width)
    words: Words = content.numpy().view(np.uint64)
    sums: Words = (words * _KEYS).sum(axis=1, dtype=np.uint64)
    return sums


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the first and the end of runs of tensors; their contiguous copies are small."""
    first = copied = 0
    for i, tensor in enumerate(tensors):
        copied += 0 if tensor.is_contiguous() else tensor.nbytes
        if copied > _COPIED_NBYTES:
            yield first, i + 1
            first, copied = i + 1, 0
    if first < len(tensors):
        yield first, len(tensors)


def _positions(where: npt.NDArray[np.bool_]) -> list[int]:
    positions: list[int] = np.flatnonzero(where).tolist()
    return positions


class TensorPlaces:
    """Where tensors (`uint8[nbytes]`) begin, how many lines each has, and how wide one is."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.on_host = all(tensor.device.type == "cpu" for tensor in tensors)
        self.addresses: Words = np.array([t.data_ptr() for t in tensors], np.uint64)
        self._sizes: Words = np.array([t.numel() for t in tensors], np.uint64)
        sizes = self._sizes
        self.widths: Words = np.minimum(sizes, np.uint64(LINE))
        self._counts: npt.NDArray[np.uint64] = np.maximum(sizes // np.uint64(LINE), np.uint64(1))
        self._numbers = np.arange(1, len(tensors) + 1, dtype=np.uint64) * _MIXED

    def fit(self, other: TensorPlaces, part: slice) -> bool:
        """Whether these tensors have memory, and the sizes of those in `part` of the others."""
        has_memory = (self.addresses != 0) | (self._sizes == 0)
        return bool(has_memory.all()) and np.array_equal(self._sizes, other._sizes[part])

    def choose(self, seed: int) -> Words:
        """Return the number of a whole line in each tensor, others for another seed."""
        mixed = (self._numbers + np.uint64(seed)) * _MIXED
        chosen: Words = (mixed >> np.uint64(24)) % self._counts
        return chosen
