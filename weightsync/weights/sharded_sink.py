"""A module of DTensor shards as a sink: of every full tensor only the slice held here is copied."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weightsync.errors import ConfigError, shorten
from weightsync.specs import TensorSpec
from weightsync.weights.buckets import StreamLayout
from weightsync.weights.checksum_parts import part_of
from weightsync.weights.dtypes import TORCH_DTYPES, as_bytes
from weightsync.weights.module_sink import Layout, ModuleSink, Place
from weightsync.weights.shard_copier import Share
from weightsync.weights.shards import Slice, Slicer, is_sharded, local_of
from weightsync.wire.messages import TensorPart


class ShardedModuleSink(ModuleSink):
    """Parameters and persistent buffers of a module of which some are DTensors.

    Senders see full tensors, so one stream serves every rank of a tensor-parallel group; each rank
    copies its own slice of it, and no collective runs. Staged memory and swaps are those of
    ModuleSink, over what is held here. Raises ConfigError naming tensors whose placements do not
    say which rows are held (partial sums, unknown placements).
    """

    def layout(self, plan: StreamLayout) -> Layout:
        """A place for each slice of a tensor; tied tensors may hold different ones."""
        places: list[Place] = []
        shares: list[Share] = []
        groups = self.targets(plan.manifest)
        for index, (spec, group) in enumerate(zip(plan.manifest.specs, groups, strict=True)):
            for held, targets in self._by_slice(group).items():
                places.append(Place(TensorSpec(spec.name, spec.dtype, held.local_shape), targets))
                shares.append(Share(index, held.blocks(TORCH_DTYPES[spec.dtype].itemsize)))
        return Layout(places, shares)

    def checksums(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Return mix64 of tensors that are whole here.

        Raises ConfigError for the others: a slice does not sum to what the full tensor sums to.
        """
        index = self._index()
        wanted = list(index) if names is None else list(names)
        tensors = self.tensors
        cut = [n for n in wanted if n in index and not self._slice(tensors[index[n]]).is_whole]
        if cut:
            raise ConfigError(
                f"{len(cut)} tensors are sharded, and this process holds a slice of each: "
                f"{shorten(cut)}; ask the server that all workers belong to, or name tensors that "
                "are whole here"
            )
        return super().checksums(wanted)

    def checksum_parts(
        self, names: Iterable[str] | None = None
    ) -> tuple[dict[str, str], dict[str, TensorPart]]:
        """Return mix64 of tensors that are whole here, and the parts of those that are cut."""
        index = self._index()
        tensors = self.tensors
        wanted = list(index) if names is None else list(names)
        parts: dict[str, TensorPart] = {}
        for name in wanted:
            held = tensors[index[name]] if name in index else None
            if held is not None and not self._slice(held).is_whole:
                flat = as_bytes(held.detach().contiguous())
                parts[name] = part_of(name, flat, self._slice(held), held.element_size())
        return super().checksums([name for name in wanted if name not in parts]), parts

    def _hold(self) -> list[torch.Tensor]:
        return [local_of(tensor) for tensor in self._found.tensors]

    def _inspect(self) -> None:
        """Find the slice of each tensor that is held."""
        slicer = Slicer()
        found = zip(self._found.names, self._found.tensors, self._held, strict=True)
        self._slices = {
            id(held): slicer.slice_of(name, tensor)
            for name, tensor, held in found
            if is_sharded(tensor)
        }

    def _slice(self, held: torch.Tensor) -> Slice:
        return self._slices.get(id(held)) or Slice.whole_of(tuple(held.shape))

    def _by_slice(self, group: list[torch.Tensor]) -> dict[Slice, list[torch.Tensor]]:
        grouped: dict[Slice, list[torch.Tensor]] = {}
        for tensor in group:
            grouped.setdefault(self._slice(tensor), []).append(tensor)
        return grouped
