"""Chunks that other hosts read where the source's own tensors lie, instead of from a ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from weightsync.backends.tcp.window import Pieces
from weightsync.tensors import TORCH_DTYPES, as_bytes
from weightsync.weights.copy_plan import Memory, UnitCompiler
from weightsync.weights.fused import hashers
from weightsync.weights.layout import StreamLayout


class LentChunks:
    """The chunks of `layout`, in the memory of `tensors`, which `are_plain`."""

    def __init__(self, layout: StreamLayout, tensors: Sequence[torch.Tensor]) -> None:
        self.layout = layout
        self._flat = [as_bytes(tensor) for tensor in tensors]  # their memory is not used again
        self._addresses = [flat.data_ptr() for flat in self._flat]
        self.is_on_gpu = bool(self._flat) and self._flat[0].device.type == "cuda"
        self._chunks = [self._pieces(chunk.start, chunk.stop) for chunk in layout.chunks]

    @cached_property
    def _hashers(self) -> list[Callable[[], int]]:
        memory = Memory(self._flat)
        compiler = UnitCompiler(self.layout, memory, memory)
        return hashers([compiler.compile(unit) for unit in self.layout.units])

    def lie_in(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether this is still the memory of the source's tensors."""
        return self._addresses == [tensor.data_ptr() for tensor in tensors] and all(
            map(torch.Tensor.is_contiguous, tensors)
        )

    def chunk(self, j: int) -> Pieces:
        """Return where chunk `j` lies."""
        return self._chunks[j]

    def fingerprints(self, j: int) -> list[int]:
        """Read chunk `j`; return the fingerprints of its copy units. In order of the chunks."""
        chunk = self.layout.chunks[j]
        return [hasher() for hasher in self._hashers[chunk.first_unit : chunk.last_unit]]

    def _pieces(self, start: int, stop: int) -> Pieces:
        places = [
            (part.start - start, self._addresses[part.index] + part.begin, part.nbytes)
            for part in self.layout.slices(start, stop)
        ]
        return Pieces(places, self._flat[0].device.index if self.is_on_gpu else None)


def are_plain(layout: StreamLayout, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the bytes of all tensors can be sent as they lie, from the memory of one device."""
    pairs = zip(layout.manifest.specs, tensors, strict=True)
    return len({tensor.device for tensor in tensors}) == 1 and all(
        tensor.dtype is TORCH_DTYPES[spec.dtype]
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        for spec, tensor in pairs
    )
