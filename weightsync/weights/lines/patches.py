"""Patches: the elements of tensors that a delta changed, for hooks that take index and value.

Deltas carry lines. `RecordingLines` compares each line with the one that it replaces, and keeps a
bit for each byte that differs. `Patches` turns these bits into elements, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weightsync.errors import TransferError
from weightsync.specs import DTYPE_NBYTES
from weightsync.tensors import TORCH_DTYPES
from weightsync.weights.copying.copy_plan import Memory
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.lines.memory import LINE, Indices, LineMemory, Words, kernels

_LOWEST_BITS = {
    1: 0xFFFF_FFFF_FFFF_FFFF,
    2: 0x5555_5555_5555_5555,
    4: 0x1111_1111_1111_1111,
    8: 0x0101_0101_0101_0101,
    16: 0x0001_0001_0001_0001,
}
"""By the bytes of an element: of the 64 bits of a line's bytes, the first one of each element."""
_COPIED_AS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""By the bytes of an element: a dtype that torch can select from, which not every dtype is."""


@dataclass(frozen=True, slots=True, eq=False)
class SparseWeightPatch:
    """The elements of one tensor that a delta changed.

    - `name`: the name of the tensor, as `load_weights` was given it.
    - `indices`: `int64[n]`, the positions in the flattened tensor, growing.
    - `values`: the new elements, n of them, in the tensor's dtype.

    Both tensors are on the device of the HookSink, and are the hook's own: it may keep and change
    them. A contiguous tensor takes a patch by `tensor.view(-1).index_copy_(0, indices, values)`.
    """

    name: str
    indices: torch.Tensor
    values: torch.Tensor


class RecordingLines(LineMemory):
    """The lines of a memory. Records which bytes `write` changes, in 12 bytes for each line.

    The lines of one write follow those of the write before; those of `recording` may not.
    """

    def __init__(self, layout: StreamLayout, memory: Memory) -> None:
        super().__init__(layout, memory)
        self._changes: list[tuple[Indices, Words]] = []

    def write(self, indices: Indices, lines: Words) -> int:
        if self._changes and len(indices) and indices[0] <= self._changes[-1][0][-1]:
            raise ValueError(f"line {indices[0]} comes twice, or after later ones")
        differing = _differing_bytes(self.read(indices), lines)
        result = super().write(indices, lines)
        changed = differing != 0
        if changed.any():
            self._changes.append((indices[changed], differing[changed]))
        return result

    @contextmanager
    def recording(self, indices: Indices) -> Iterator[None]:
        """Record which bytes of these lines, whose numbers grow, the block changes.

        Several blocks may change different bytes of one line.
        """
        before = self.read(indices)
        yield
        differing = _differing_bytes(before, self.read(indices))
        changed = differing != 0
        if changed.any():
            self._changes.append((indices[changed], differing[changed]))

    def changes(self) -> tuple[Indices, Words]:
        """Return the numbers of the changed lines, and a bit for each of their changed bytes."""
        indices = np.concatenate([np.zeros(0, np.uint32), *(lines for lines, _ in self._changes)])
        bits = np.concatenate([np.zeros(0, np.uint64), *(bits for _, bits in self._changes)])
        if (indices[1:] > indices[:-1]).all():
            return indices, bits
        order = np.argsort(indices, kind="stable")
        indices, bits = indices[order], bits[order]
        firsts = np.flatnonzero(np.concatenate([[True], indices[1:] != indices[:-1]]))
        return indices[firsts], np.bitwise_or.reduceat(bits, firsts)


class Patches(Iterable[SparseWeightPatch]):
    """The patches of one delta, in the order of the manifest, until `end` is called.

    Each is made when an iteration arrives at it. They may be iterated over several times.
    """

    def __init__(self, layout: StreamLayout, lines: RecordingLines) -> None:
        self._layout = layout
        self._memory = lines.memory
        self._indices, self._differing = lines.changes()
        filled = [i for i, spec in enumerate(layout.manifest.specs) if spec.nbytes]
        starts = np.array([layout.offsets[i] // LINE for i in filled], np.uint32)
        ends = [*np.searchsorted(self._indices, starts).tolist(), len(self._indices)]
        self._parts = [
            (i, begin, end)
            for i, begin, end in zip(filled, ends[:-1], ends[1:], strict=True)
            if begin < end
        ]
        self._ended = False

    @property
    def names(self) -> list[str]:
        """The names of the tensors that have changed."""
        return [self._layout.manifest.specs[i].name for i, _, _ in self._parts]

    def end(self) -> None:
        """Refuse to make more patches: the memory is about to change."""
        self._ended = True

    def __iter__(self) -> Iterator[SparseWeightPatch]:
        for i, begin, end in self._parts:
            if self._ended:
                raise TransferError(
                    "the patches of a delta are made until load_patches returns; iterate over them "
                    "inside the hook, and keep the patches"
                )
            yield self._patch(i, begin, end)

    def _patch(self, i: int, begin: int, end: int) -> SparseWeightPatch:
        spec, flat = self._layout.manifest.specs[i], self._memory.tensors[i]
        width = DTYPE_NBYTES[spec.dtype]
        lines = self._indices[begin:end] - np.uint32(self._layout.offsets[i] // LINE)
        indices = torch.from_numpy(_elements(lines, self._differing[begin:end], width))
        indices = indices.to(flat.device)
        values = flat.view(_COPIED_AS[width]).index_select(0, indices)
        return SparseWeightPatch(spec.name, indices, values.view(TORCH_DTYPES[spec.dtype]))


def _differing_bytes(old: Words, new: Words) -> Words:
    """Return 64 bits for each line (8 words), one for each byte in which the two differ."""
    differing = np.empty(len(old) * 8 // LINE, np.uint64)
    kernels().list_differing_bytes(old, new, differing)
    return differing


def _elements(lines: Indices, differing: Words, width: int) -> npt.NDArray[np.int64]:
    """Return the positions of the elements of `width` bytes that have differing bytes."""
    bits = differing.copy()
    step = 1
    while step < width:
        bits |= bits >> np.uint64(step)
        step *= 2
    bits &= np.uint64(_LOWEST_BITS[width])
    elements = np.empty(int(np.bitwise_count(bits).sum()), np.int64)
    kernels().list_elements(lines, bits, np.uint64(width), elements)
    return elements
