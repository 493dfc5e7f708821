"""Memory that a sender registers for its readers, and its handles, hashers and names."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weightsync.backends.ring import Buckets, keyed_handle
from weightsync.cuda.device_stream import DeviceStream
from weightsync.cuda.pinning import CudaDriver
from weightsync.cuda.staging import CudaCopyStream, StagedBuckets
from weightsync.shm.ring import RingWriter
from weightsync.shm.shared_stream import SharedStream
from weightsync.tensors import TORCH_DTYPES
from weightsync.weights.copying.copy_plan import Memory, UnitCompiler
from weightsync.weights.copying.fused import hashers
from weightsync.weights.copying.layout import StreamLayout
from weightsync.wire.offers import StorageInfo


def stage_on_gpu(ring: Buckets, device: torch.device) -> StagedBuckets | None:
    """Stage a ring on the host for tensors on `device`; None for tensors on the host."""
    if device.type != "cuda":
        return None
    return ring.stage(device, CudaCopyStream(device), CudaDriver(device))


def register(
    layout: StreamLayout,
    stable: list[torch.Tensor] | None,
    device: torch.device | None,
    *,
    adopt: bool,
) -> SharedStream | DeviceStream:
    """Register a layout's tensors on the GPU `device`, or in a segment where `device` is None."""
    specs = layout.manifest.specs
    dtypes = [TORCH_DTYPES[spec.dtype] for spec in specs]
    shapes = [spec.shape for spec in specs]
    if device is not None:
        return DeviceStream(dtypes, shapes, device, stable)
    return SharedStream(layout.offsets, dtypes, shapes, layout.nbytes, adopt=adopt)


def in_place_hashers(
    memory: SharedStream | DeviceStream, layout: StreamLayout
) -> list[Callable[[], int]]:
    """Return a function for each copy unit of registered memory that fingerprints it in place."""
    in_place = Memory(memory.tensors, flat=isinstance(memory, SharedStream))
    compiler = UnitCompiler(layout, in_place, in_place)
    return hashers([compiler.compile(unit) for unit in layout.units])


def storage_info(
    memory: SharedStream | DeviceStream | None, layout: StreamLayout
) -> StorageInfo | None:
    """Return the handles of registered memory; GPU memory is exported once per call."""
    if memory is None:
        return None
    if isinstance(memory, SharedStream):
        return StorageInfo(
            handles=[keyed_handle(memory.segment)],
            storage=[0] * len(layout.offsets),
            offset=layout.offsets,
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
