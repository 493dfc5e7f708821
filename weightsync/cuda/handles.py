"""CUDA IPC handles: memory of one process, opened by another that sees its GPU.

The only module that knows torch's private tuple. torch wraps `cudaIpcGetMemHandle` and an
interprocess event, and counts readers in a shared file: `_share_cuda_` adds one, and the storage
that `_new_shared_cuda` returns subtracts one when it is freed. So every export is for exactly one
reader. Importing this module makes no CUDA context.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from weightsync.cuda import devices
from weightsync.errors import BackendUnavailableError, ConfigError, HandleError
from weightsync.shm.host_keys import host_key
from weightsync.wire.offers import CudaHandle

_SHARED_FIELDS = (
    "storage_device",
    "storage_handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)
"""The values that `_share_cuda_` returns and `_new_shared_cuda` takes, in order."""

_REBUILD_PARAMETERS = (
    "tensor_cls",
    "tensor_size",
    "tensor_stride",
    "tensor_offset",
    "storage_cls",
    "dtype",
    *_SHARED_FIELDS[:4],
    "requires_grad",
    *_SHARED_FIELDS[4:],
)

# c10/cuda/CUDACachingAllocator.cpp: a version byte, a kind byte, then a cudaIpcMemHandle_t ('c',
# from cudaMalloc) or a header of 24 bytes and one entry per mapped piece ('e', expandable segment).
_IPC_NBYTES = 64
_MALLOC_NBYTES = 2 + _IPC_NBYTES
_EXPANDABLE_HEADER = 2 + 24
_HANDLE_LIMIT = 1024
# torch/csrc/CudaIPCTypes.h: the file of counters has this many; the reader writes to the one named.
_COUNTERS = 10_000
_COUNTER_FILE = re.compile(rb"/torch_[0-9]+_[0-9]+(_[0-9]+)?")
_OFFSET_LIMIT = 1 << 62
_DEVICES = ("/dev/nvidiactl", "/dev/dxg")

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def normal_key(uuid: str) -> str:
    """Return the normal form of a GPU's id: `GPU-<uuid>` in lower case, `MIG-…` as it is.

    Raises ConfigError for other text.
    """
    text = uuid.strip()
    if text.startswith("MIG-"):
        return text
    bare = text.removeprefix("GPU-").lower()
    if _UUID.fullmatch(bare) is None:
        raise ConfigError(f"{uuid!r} is not a GPU id; give GPU-<uuid>, a bare uuid or MIG-…")
    return f"GPU-{bare}"


def device_keys(device: torch.device) -> list[str]:
    """Return the keys of a process whose weights are on `device`: its GPU's, if any, its host's."""
    return [*([gpu_key(device)] if device.type == "cuda" else []), host_key()]


def gpu_key(device: torch.device | int) -> str:
    """Return the device key of a GPU of this process."""
    return normal_key(str(torch.cuda.get_device_properties(device).uuid))


def is_gpu_attached() -> bool:
    """Return whether an NVIDIA GPU is attached to this machine; calls no driver."""
    return any(Path(device).exists() for device in _DEVICES)


def has_gpu() -> bool:
    """Return whether torch is built for an NVIDIA GPU that is attached; calls no driver."""
    return torch.version.cuda is not None and is_gpu_attached()


def local_gpu_keys() -> dict[str, int]:
    """Return the ordinal of every GPU that this process sees, by device key; empty without CUDA."""
    if torch.version.cuda is None or not torch.cuda.is_available() or _in_forked_child():
        return {}
    return {gpu_key(ordinal): ordinal for ordinal in range(torch.cuda.device_count())}


def peer_faults(own: str) -> dict[str, str]:
    """Return why GPU `own` of this process cannot read each other GPU that is seen here.

    By device key, "" where it can; `{}` where `own` is no GPU of this process.
    """
    keys = local_gpu_keys()
    if own not in keys:
        return {}
    return {key: _peer_fault(own, key, keys) for key in keys if key != own}


def _peer_fault(own: str, other: str, keys: dict[str, int]) -> str:
    if own.startswith("MIG-") or other.startswith("MIG-") or _on_mig():
        return "a MIG slice reads no memory of another GPU, and no other GPU its"
    pair = keys[own], keys[other]
    try:
        # The copies of torch run on the GPU that holds the source, and write to the other one.
        peers = devices.can_access_peer(*pair) and devices.can_access_peer(*reversed(pair))
    except (RuntimeError, AssertionError) as exc:
        return f"the driver does not say whether {own} reads {other}: {first_line(exc)}"
    return "" if peers else f"no peer access between {own} and {other} (cudaDeviceCanAccessPeer)"


def why_not() -> str | None:
    """Return the reason why CUDA IPC cannot work in this process, None where none is known."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU"
    if _in_forked_child():
        return "this process was forked after CUDA was initialised; start it with spawn"
    if setting := expandable_setting():
        return f"{setting} asks for expandable segments, whose memory is not shared by handle"
    if _on_mig():
        return "the GPU is a MIG slice, whose memory is not shared by handle"
    return None


def expandable_setting() -> str | None:
    """Return the environment variable that turns expandable segments on, if one does."""
    # torch reads the first that is set and ignores the other.
    name = next((name for name in _ALLOCATOR_SETTINGS if os.environ.get(name)), None)
    if name is None:
        return None
    compact = os.environ[name].replace(" ", "").lower()
    return name if "expandable_segments:true" in compact.split(",") else None


def check_torch(rebuild: Callable[..., object] = rebuild_cuda_tensor) -> None:
    """Check that torch's private interface is the one that this module uses.

    Called before every export and open. Raises BackendUnavailableError, naming torch's version.
    """
    found = tuple(inspect.signature(rebuild).parameters)
    lacking = [
        name
        for name in ("_share_cuda_", "_new_shared_cuda", "_release_ipc_counter_cuda")
        if not hasattr(torch.UntypedStorage, name)
    ]
    if found != _REBUILD_PARAMETERS or lacking:
        differs = [name for name in found if name not in _REBUILD_PARAMETERS]
        gone = [name for name in _REBUILD_PARAMETERS if name not in found]
        raise BackendUnavailableError(
            f"torch {torch.__version__} shares CUDA memory in a way that this weightsync does not "
            f"know (new: {_listed(differs)}; gone: {_listed(gone + lacking)}); use torch 2.11 to "
            "2.13, a newer weightsync, or the shared_memory path"
        )


def export(tensor: torch.Tensor) -> CudaHandle:
    """Export `uint8[nbytes]` on a GPU, contiguous, possibly a view of a larger storage.

    One reader opens the handle, once; a handle that no reader will open goes to `withdraw`. Until
    then the memory stays allocated, even after the caller drops the tensor. The reader's stream
    waits for the work that is now on the current stream of the tensor's GPU. Raises ConfigError
    for other tensors, HandleError where torch or the driver fails, and BackendUnavailableError for
    an unknown torch.
    """
    check_torch()
    _check_exportable(tensor)
    with _foreign_errors("exporting CUDA memory"), torch.cuda.device(tensor.device):
        # torch types nothing of this.
        storage: Any = tensor.untyped_storage()
        fields: Sequence[Any] = storage._share_cuda_()
    handle = _to_handle(
        fields, gpu_key(tensor.device), offset=int(tensor.storage_offset()), nbytes=tensor.numel()
    )
    try:
        _check_fields(handle)
    except HandleError:
        withdraw(handle)
        raise
    return handle


def open_handle(handle: CudaHandle) -> torch.Tensor:
    """Open another process's memory as `uint8[nbytes - offset]` on the GPU that `handle` names.

    All fields are checked before torch uses them. The current stream waits for the work that the
    exporter's stream had. The reader gives the memory back when the tensor and all views of it are
    freed. Raises HandleError, and BackendUnavailableError for an unknown torch.
    """
    check_torch()
    _check_fields(handle)
    ordinal = _local_ordinal(handle)
    with _foreign_errors("opening CUDA memory of another process"), torch.cuda.device(ordinal):
        _check_fits(handle, torch.cuda.get_device_properties(ordinal).total_memory)
        new_shared: Any = torch.UntypedStorage._new_shared_cuda
        # Not rebuild_cuda_tensor: its cache finds storages by address alone, whatever their size.
        storage = new_shared(*_to_fields(handle, ordinal))
        opened = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", ordinal))
        return opened.set_(storage, 0, (handle.nbytes,), (1,))[handle.offset :]


def withdraw(handle: CudaHandle) -> None:
    """Drop the reference of an export that no reader will open, so that its memory can be freed.

    Raises HandleError where torch fails.
    """
    release: Any = torch.UntypedStorage._release_ipc_counter_cuda
    with _foreign_errors("withdrawing an export"):
        release(handle.ref_counter_handle, handle.ref_counter_offset)


def collect() -> None:
    """Free exported memory that its owner dropped and its readers gave back; fast."""
    if devices.in_use():
        ipc_collect: Callable[[], None] = torch.cuda.ipc_collect
        ipc_collect()


def _to_handle(fields: Sequence[Any], device: str, *, offset: int, nbytes: int) -> CudaHandle:
    """Return the handle of torch's tuple; the view begins at byte `offset` of its storage."""
    if len(fields) != len(_SHARED_FIELDS):
        raise BackendUnavailableError(
            f"torch {torch.__version__} describes shared CUDA memory with {len(fields)} values, "
            f"this weightsync knows {len(_SHARED_FIELDS)}; use torch 2.11 to 2.13"
        )
    named = dict(zip(_SHARED_FIELDS, fields, strict=True))
    return CudaHandle(
        device=device,
        nbytes=nbytes,
        handle=named["storage_handle"],
        base_offset=named["storage_offset_bytes"] + offset,
        ref_counter_handle=named["ref_counter_handle"],
        ref_counter_offset=named["ref_counter_offset"],
        event_handle=named["event_handle"],
        event_sync_required=named["event_sync_required"],
    )


def _to_fields(handle: CudaHandle, ordinal: int) -> tuple[object, ...]:
    """Return torch's tuple of a handle, for the local GPU `ordinal`."""
    named = {
        "storage_device": ordinal,
        "storage_handle": handle.handle,
        "storage_size_bytes": handle.nbytes,
        "storage_offset_bytes": handle.base_offset,
        "ref_counter_handle": handle.ref_counter_handle,
        "ref_counter_offset": handle.ref_counter_offset,
        "event_handle": handle.event_handle,
        "event_sync_required": handle.event_sync_required,
    }
    return tuple(named[name] for name in _SHARED_FIELDS)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text: torch adds its own to that of the driver."""
    return str(error).partition("\n")[0]


def _check_exportable(tensor: torch.Tensor) -> None:
    """Raise ConfigError for tensors that cannot be exported."""
    fits = tensor.is_cuda and tensor.dtype is torch.uint8 and tensor.is_contiguous()
    if not fits or tensor.numel() == 0:
        raise ConfigError(
            f"only a contiguous uint8 tensor on a GPU, not empty, can be exported; this is "
            f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on "
            f"{tensor.device}; export tensor.contiguous().view(torch.uint8)"
        )


def _check_fields(handle: CudaHandle) -> None:
    """Raise HandleError unless torch could have made every field: torch itself checks none."""
    faults = [
        _mem_handle_fault(handle.handle),
        _unless(
            len(handle.event_handle) == _IPC_NBYTES,
            f"an event handle has {_IPC_NBYTES} bytes, this has {len(handle.event_handle)}",
        ),
        _unless(
            len(handle.ref_counter_handle) <= _IPC_NBYTES
            and _COUNTER_FILE.fullmatch(handle.ref_counter_handle) is not None,
            f"{handle.ref_counter_handle[:_IPC_NBYTES]!r} is not a file of counters",
        ),
        _unless(
            0 <= handle.ref_counter_offset < _COUNTERS,
            f"counter {handle.ref_counter_offset} is not among {_COUNTERS}",
        ),
        _unless(0 < handle.nbytes <= _OFFSET_LIMIT, f"nbytes is {handle.nbytes}"),
        _unless(0 <= handle.base_offset <= _OFFSET_LIMIT, f"base_offset is {handle.base_offset}"),
        _unless(
            0 <= handle.offset <= handle.nbytes,
            f"offset {handle.offset} lies outside {handle.nbytes} bytes",
        ),
    ]
    found = [fault for fault in faults if fault is not None]
    if found:
        raise HandleError(
            f"malformed CUDA handle: {'; '.join(found)}; both sides need torch 2.11 to 2.13"
        )


def _mem_handle_fault(handle: bytes) -> str | None:
    """Return the fault of a storage handle (version, kind, payload), None where it has none."""
    size, kind = len(handle), handle[1:2]
    if kind == b"c":
        wanted = f"a cudaMalloc handle has {_MALLOC_NBYTES} bytes, this has {size}"
        return _unless(size == _MALLOC_NBYTES, wanted)
    if kind == b"e":
        wanted = (
            f"the handle of an expandable segment has at most {_HANDLE_LIMIT} bytes, this has "
            f"{size} (PYTORCH_ALLOC_CONF=expandable_segments:False makes short ones)"
        )
        return _unless(_EXPANDABLE_HEADER < size <= _HANDLE_LIMIT, wanted)
    return f"a memory handle of {size} bytes and kind {kind!r} is unknown"


def _check_fits(handle: CudaHandle, total_nbytes: int) -> None:
    """Raise HandleError for memory that is larger than the GPU."""
    end = handle.base_offset + handle.nbytes
    if end > total_nbytes:
        raise HandleError(
            f"malformed CUDA handle: it ends at byte {end} of an allocation, "
            f"but {handle.device} has {total_nbytes} bytes"
        )


def _local_ordinal(handle: CudaHandle) -> int:
    """Return the ordinal of the handle's GPU. Raises HandleError where it is not seen."""
    keys = local_gpu_keys()
    if handle.device not in keys:
        raise HandleError(
            f"the handle is for GPU {handle.device[:128]}, this process sees {_listed(keys)}; "
            "CUDA IPC needs a receiver that sees the sender's GPU (see CUDA_VISIBLE_DEVICES)"
        )
    return keys[handle.device]


def _on_mig() -> bool:
    if "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return True
    # The name of a GPU is not read before CUDA is initialised: that would make a context.
    return devices.in_use() and " MIG " in torch.cuda.get_device_name()


def _in_forked_child() -> bool:
    in_bad_fork: Callable[[], bool] = torch.cuda._is_in_bad_fork
    return in_bad_fork()


@contextmanager
def _foreign_errors(what: str) -> Iterator[None]:
    """Raise errors of torch and the driver as HandleError; `what` names the call."""
    try:
        yield
    except (RuntimeError, AssertionError, OSError, TypeError, ValueError) as exc:
        raise HandleError(
            f"{what} failed: {first_line(exc)}; CUDA IPC needs two processes that see one GPU, one "
            "container (or --ipc=host and a shared pid namespace) and no expandable segments"
        ) from exc


def _unless(holds: bool, fault: str) -> str | None:
    return None if holds else fault


def _listed(names: Sequence[str] | dict[str, int]) -> str:
    return ", ".join(names) or "none"
