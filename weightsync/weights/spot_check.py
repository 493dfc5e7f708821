"""One line of each tensor of a memory: read at a commit, and again before the next delta.

A delta leaves most bytes of the weights in use as they are. Where other code has thrown these away
(a tensor that was zeroed through `.data`, memory that was freed and mapped again), torch counts no
write. The lines that are read show it at once, and take a cache line for each tensor.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightsync.weights.checksums import GOLDEN, MULTIPLIERS
from weightsync.weights.copy_plan import Memory
from weightsync.weights.lines import LINE, WORDS, Words, kernels

_MIXED = np.uint64(GOLDEN)
_KEYS = np.array([pow(MULTIPLIERS[0], i, 1 << 64) for i in range(1, WORDS + 1)], np.uint64)


class SpotCheck:
    """One line of each tensor of `memory`, as it is now; the lines are others each time.

    Of a tensor of less than a line, all bytes. Takes 8 bytes for each tensor. `places` are those of
    an earlier check of the same memory, if there is one: it takes time to find them.
    """

    def __init__(self, memory: Memory, places: TensorPlaces | None = None) -> None:
        self.memory = memory
        self.places = TensorPlaces(memory) if places is None else places
        self._begins = self.places.choose(secrets.randbits(64)) * np.uint64(LINE)
        self._sums = self._read(memory, self.places)

    def changed(self, memory: Memory | None = None) -> list[int]:
        """Return the positions of the tensors whose lines differ from what they were.

        `memory` is another one that should hold the same tensors.
        """
        places = self.places
        if memory is not None:
            places = TensorPlaces(memory)
            if not places.may_hold(self.places):
                return list(range(len(self._begins)))
        sums = self._read(self.memory if memory is None else memory, places)
        found: list[int] = np.flatnonzero(sums != self._sums).tolist()
        return found

    def _read(self, memory: Memory, places: TensorPlaces) -> Words:
        compiled: Any = kernels()
        if compiled is None or not places.on_host:
            return self._read_with_torch(memory)
        sums = np.zeros(len(self._begins), np.uint64)
        compiled.sums_at(places.addresses + self._begins, places.widths, sums)
        return sums

    def _read_with_torch(self, memory: Memory) -> Words:
        content = torch.zeros((len(self._begins), LINE), dtype=torch.uint8)
        widths = self.places.widths
        for width in np.unique(widths).tolist():  # one transfer from a GPU for each
            chosen = np.flatnonzero(widths == width)
            rows = [
                memory.tensors[i][begin : begin + width]
                for i, begin in zip(chosen.tolist(), self._begins[chosen].tolist(), strict=True)
            ]
            if len({row.device for row in rows}) > 1:
                rows = [row.cpu() for row in rows]
            content[torch.from_numpy(chosen), :width] = torch.cat(rows).cpu().view(len(rows), width)
        words: Words = content.numpy().view(np.uint64)
        sums: Words = (words * _KEYS).sum(axis=1, dtype=np.uint64)
        return sums


class TensorPlaces:
    """Where the tensors of a memory begin, how many lines each has, and how wide one is."""

    def __init__(self, memory: Memory) -> None:
        tensors = memory.tensors
        self.on_host = memory.on_host()
        self.addresses: Words = np.array([t.data_ptr() for t in tensors], np.uint64)
        self._sizes: Words = np.array([t.numel() for t in tensors], np.uint64)
        sizes = self._sizes
        self.widths: Words = np.minimum(sizes, np.uint64(LINE))
        self._counts: npt.NDArray[np.uint64] = np.maximum(sizes // np.uint64(LINE), np.uint64(1))
        self._numbers = np.arange(1, len(tensors) + 1, dtype=np.uint64) * _MIXED

    def may_hold(self, other: TensorPlaces) -> bool:
        """Whether this memory has the sizes of another one, and an address for every tensor."""
        same = np.array_equal(self._sizes, other._sizes) and self.on_host == other.on_host
        return same and not (self.on_host and (self.addresses[self._sizes > 0] == 0).any())

    def choose(self, seed: int) -> Words:
        """Return the number of a whole line in each tensor, others for another seed."""
        mixed = (self._numbers + np.uint64(seed)) * _MIXED
        chosen: Words = (mixed >> np.uint64(24)) % self._counts
        return chosen
