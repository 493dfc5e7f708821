"""Boxes of tensors that a receiver stages in one arena."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from weightsync.specs import Manifest, TensorSpec
from weightsync.tensors import TORCH_DTYPES
from weightsync.weights.copying.copy_plan import Memory, Share
from weightsync.weights.copying.layout import aligned
from weightsync.weights.copying.shards import Slice


@dataclass(frozen=True)
class Boxes:
    """At most one box of each of a manifest's tensors, by the positions of the tensors."""

    boxes: list[tuple[int, Slice]]

    @cached_property
    def places(self) -> Mapping[int, int]:
        """The index of the box of each tensor that has one, by the position of the tensor."""
        return {index: i for i, (index, _) in enumerate(self.boxes)}

    def nbytes(self, manifest: Manifest) -> int:
        """Return the bytes of an arena that holds all boxes."""
        return sum(aligned(spec.nbytes) for spec in self.specs(manifest))

    def in_arena(self, manifest: Manifest, buffer: torch.Tensor) -> Memory:
        """Return the memory of all boxes in an arena, `uint8[nbytes]`."""
        tensors: list[torch.Tensor] = []
        shares: list[Share] = []
        at = 0
        for (index, box), spec in zip(self.boxes, self.specs(manifest), strict=True):
            tensors.append(buffer[at : at + spec.nbytes])
            at += aligned(spec.nbytes)
            blocks = box.blocks(TORCH_DTYPES[spec.dtype].itemsize)
            shares.append(Share(index, blocks, box))
        return Memory(tensors, flat=True, shares=shares)

    def specs(self, manifest: Manifest) -> Iterator[TensorSpec]:
        """Yield the spec of each box: the name and dtype of its tensor, the shape of the box."""
        for index, box in self.boxes:
            spec = manifest.specs[index]
            yield TensorSpec(spec.name, spec.dtype, box.local_shape)
