"""Memory that a sender registers for its readers, and its handles, hashers and names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightsync.backends.ring import Buckets, keyed_handle
from weightsync.cuda.device_stream import DeviceStream
from weightsync.cuda.pinning import CudaDriver
from weightsync.cuda.staging import CudaCopyStream, StagedBuckets
from weightsync.shm.ring import RingWriter
from weightsync.shm.shared_stream import SharedStream, address_of_storage, companion_sizes
from weightsync.tensors import TORCH_DTYPES
from weightsync.weights.copying.copy_plan import CompiledUnit, Memory, UnitCompiler
from weightsync.weights.copying.layout import StreamLayout, aligned
from weightsync.weights.sources.base import SourceMemory, WeightSource
from weightsync.wire.offers import StorageInfo


def stage_on_gpu(ring: Buckets, device: torch.device) -> StagedBuckets | None:
    """Stage a ring on the host for tensors on `device`; None for tensors on the host."""
    if device.type != "cuda":
        return None
    return ring.stage(device, CudaCopyStream(device), CudaDriver(device))


def register(
    layout: StreamLayout,
    source: WeightSource,
    stable: list[torch.Tensor] | None,
    device: torch.device | None,
    *,
    adopt: bool,
) -> SharedStream | DeviceStream:
    """Register the tensors of a source on the GPU `device`, or in a segment where it is None.

    A tensor of the host whose storage has more bytes, or of which parts are sent, has one place for
    all of them.
    """
    extras = SourceMemory(source)
    specs = layout.manifest.specs
    dtypes = [TORCH_DTYPES[spec.dtype] for spec in specs]
    shapes: list[Sequence[int]] = [spec.shape for spec in specs]
    if device is not None:
        return DeviceStream(dtypes, shapes, device, stable)
    offsets, nbytes, parts = layout.offsets, layout.nbytes, None
    bases = None if stable is None else extras.bases()
    held = stable
    if bases is not None:
        held = bases.tensors
        dtypes, shapes = [tensor.dtype for tensor in held], [tensor.shape for tensor in held]
        sizes = [spec.nbytes for spec in specs]
        parts = [(*place, size) for place, size in zip(bases.where, sizes, strict=True)]
    flats = extras.buffers() if held is not None else ()
    if held is not None and (flats or bases is not None):
        storages = companion_sizes([*flats, *extras.views()])
        offsets, nbytes = [], 0
        for tensor in held:
            offsets.append(nbytes)
            nbytes += aligned(max(tensor.nbytes, storages.get(address_of_storage(tensor), 0)))
    return SharedStream(
        offsets,
        dtypes,
        shapes,
        nbytes,
        adopt=adopt,
        buffers=extras.buffers,
        views=extras.views,
        parts=parts,
    )


def held_tensors(
    memory: SharedStream | DeviceStream, source: WeightSource
) -> list[torch.Tensor] | None:
    """Return the tensors that were registered, as they are now; None where they are made."""
    bases = SourceMemory(source).bases() if isinstance(memory, SharedStream) else None
    return source.stable_tensors() if bases is None else bases.tensors


def refresh_memory(
    memory: SharedStream | DeviceStream, source: WeightSource, stable: list[torch.Tensor]
) -> None:
    """Update every place of registered memory from the stable tensors."""
    held = held_tensors(memory, source) or stable
    if isinstance(memory, DeviceStream):
        memory.refresh(held)
        return
    look = SourceMemory(source).look_of(held)
    memory.refresh(held, look.addresses if look is not None and look.plain else None)


def is_occupied(memory: SharedStream, source: WeightSource) -> bool:
    """Whether registered memory of the host has to be made anew; see SharedStream.occupied."""
    held = held_tensors(memory, source)
    if held is None:
        return False
    moves = memory.moves
    found = memory.occupied(held, SourceMemory(source).look_of(held))
    if memory.moves != moves:  # else the end of the update takes it for a change of the source
        SourceMemory(source).note_places()
    return found


def has_offsets(memory: SharedStream | DeviceStream, layout: StreamLayout) -> bool:
    """Whether registered memory has the offsets of the stream, zeros between tensors included."""
    return isinstance(memory, SharedStream) and memory.offsets == layout.offsets


def in_place_units(memory: SharedStream | DeviceStream, layout: StreamLayout) -> list[CompiledUnit]:
    """Return the copy units of registered memory, whose sources and targets are that memory."""
    in_place = Memory(memory.tensors, flat=has_offsets(memory, layout))
    compiler = UnitCompiler(layout, in_place, in_place)
    return [compiler.compile(unit) for unit in layout.units]


def storage_info(memory: SharedStream | DeviceStream | None) -> StorageInfo | None:
    """Return the handles of registered memory; GPU memory is exported once per call."""
    if memory is None:
        return None
    if isinstance(memory, SharedStream):
        return StorageInfo(
            handles=[keyed_handle(memory.segment)],
            storage=[0] * len(memory.offsets),
            offset=memory.offsets,
        )
    storages, where, offsets = memory.storages()
    handles = [keyed_handle(None, storage) for storage in storages]
    return StorageInfo(handles=handles, storage=where, offset=offsets)


def memory_names(memory: SharedStream | DeviceStream | None) -> list[tuple[str, int]]:
    """Return a name for each piece of registered memory, and its bytes."""
    if isinstance(memory, SharedStream):
        return [(memory.segment.name, memory.segment.nbytes)]
    if isinstance(memory, DeviceStream):
        return [(str(storage.device), storage.numel()) for storage in memory.storages()[0]]
    return []


def unreleased(writer: RingWriter) -> list[int]:
    """Return the last update's readers that have not released a published chunk."""
    published = writer.control.published
    # A reader that joined since has released nothing of an earlier update.
    return writer.control.behind(published) if published > writer.base else []
