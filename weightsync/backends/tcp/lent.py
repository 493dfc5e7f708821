"""Chunks that hosts read where the source's tensors lie, without a ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from weightsync.backends.tcp.window import Pieces
from weightsync.tensors import as_bytes, is_plain
from weightsync.weights.copying.copy_plan import Memory, UnitCompiler
from weightsync.weights.copying.fused import hashers
from weightsync.weights.copying.layout import StreamLayout


class LentChunks:
    """The chunks of `layout` in the memory of `tensors`, for which `why_packed` has no reason."""

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
        """Whether the source's tensors still lie in this memory, and in the same way."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        return addresses == self._addresses and not why_packed(self.layout, tensors)

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


def why_packed(layout: StreamLayout, tensors: Sequence[torch.Tensor]) -> str:
    """Return why the bytes of tensors cannot be sent as they lie; an empty string if they can."""
    if len({tensor.device for tensor in tensors}) > 1:
        return "they lie on several devices"
    for spec, tensor in zip(layout.manifest.specs, tensors, strict=True):
        if not is_plain(tensor, spec) or tensor.shape != spec.shape:
            return f"{spec.name} is stored otherwise than it is sent (a cast, strides)"
    return ""
