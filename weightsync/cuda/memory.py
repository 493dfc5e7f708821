"""Memory of another process, opened from its handle, and the probe that tests a path.

A handle of another GPU is opened with the number that this process has for that GPU, so torch knows
where the memory lies. Nothing but copies of torch reads it: they need no kernel of this process's
GPU that has peer access, and a driver that refuses makes an error instead of a fault.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch

from weightsync.cuda import handles
from weightsync.cuda.pinning import Driver, Pinned
from weightsync.errors import HandleError, WeightSyncError
from weightsync.shm.host_keys import pick
from weightsync.shm.segment import PrivateMapping, Segment
from weightsync.wire.offers import CudaHandle, Handle, KeyedHandle, ProbeInfo, SegmentHandle


class OpenMemory:
    """Memory of another process: `tensor` is `uint8[nbytes - offset]` of the handle.

    Valid until `close`; a CUDA handle is opened once, and its memory is given back when the tensor
    and all views of it are gone. Raises HandleError for handles that cannot be opened, and
    SegmentError for segments.
    """

    def __init__(self, handle: Handle) -> None:
        self._segment: Segment | None = None
        self._private: PrivateMapping | None = None
        self._pinned: Pinned | None = None
        self._offset = handle.offset
        if isinstance(handle, SegmentHandle):
            if handle.offset > handle.nbytes:
                raise HandleError(
                    f"offset {handle.offset} lies outside segment {handle.name} "
                    f"of {handle.nbytes} bytes"
                )
            self._segment = Segment.open(handle.name, nbytes=handle.nbytes)
            tensor = self._segment.tensor(handle.offset)
        else:
            tensor = handles.open_handle(handle)
        self._tensor: torch.Tensor | None = tensor

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as `uint8[nbytes]`. Raises HandleError after `close`."""
        if self._tensor is None:
            raise HandleError("this memory was closed")
        return self._tensor

    @property
    def private(self) -> PrivateMapping | None:
        """The same memory, mapped so that writes stay in this process; None on a GPU.

        Mapped at the first use. Never pinned: that would copy its pages, for good.
        """
        if self._private is None and self._segment is not None:
            self._private = self._segment.private()
        return self._private

    def part(self, offset: int, nbytes: int, *, private: bool = False) -> torch.Tensor:
        """View bytes `offset` to `offset + nbytes`. Raises HandleError for a range outside.

        With `private` a view that may be written to, where there is one.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.tensor.numel():
            raise HandleError(
                f"bytes {offset} to {offset + nbytes} are outside this memory of "
                f"{self.tensor.numel()} bytes; the handle does not fit its tensors"
            )
        mapping = self.private if private else None
        memory = self.tensor if mapping is None else mapping.tensor(self._offset)
        return memory[offset : offset + nbytes]

    def pin(self, driver: Driver) -> None:
        """Pin a segment until `close`, for copies to a GPU; a failure is a warning. Idempotent."""
        if self._segment is not None and self._pinned is None:
            self._pinned = Pinned(self.tensor, driver, read_only=True)

    def close(self) -> None:
        """Release the memory; the caller has waited for copies that read it. Idempotent."""
        self._tensor = None
        if self._pinned is not None:
            self._pinned.close()
        if self._private is not None:
            self._private.close()
        if self._segment is not None:
            self._segment.close()
        else:
            handles.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pick_readable(offered: KeyedHandle, keys: Sequence[str]) -> tuple[Handle, torch.device | None]:
    """Return the handle that this process opens, and its GPU if the memory is another GPU's.

    `keys` are its device keys, its GPU's first. Raises HandleError where no handle is for it, or
    where the memory is that of a GPU that it does not see or that its GPU cannot read.
    """
    gpus = [key for key in offered if key.startswith(("GPU-", "MIG-"))]
    if not gpus or len(keys) < 2 or not set(offered).isdisjoint(keys):
        return pick(offered, list(keys)), None
    faults = handles.peer_faults(keys[0])
    unseen = "this process does not see GPU {} (CUDA_VISIBLE_DEVICES)"
    reasons = [faults.get(gpu, unseen.format(gpu[:128])) for gpu in gpus]
    for gpu, reason in zip(gpus, reasons, strict=True):
        handle = offered[gpu]
        if isinstance(handle, CudaHandle) and handle.device != gpu:
            raise HandleError(
                f"malformed CUDA handle: it is of GPU {handle.device}, and offered for {gpu[:128]}"
            )
        if not reason:
            return handle, torch.device("cuda", handles.local_gpu_keys()[keys[0]])
    raise HandleError(f"memory of another GPU cannot be read: {'; '.join(reasons)}")


@contextmanager
def reading_a_peer(peer: str, device: torch.device) -> Iterator[None]:
    """Raise errors of torch and the driver as HandleError while GPU `peer` is read."""
    try:
        yield
    except WeightSyncError:
        raise
    except RuntimeError as exc:
        raise HandleError(
            f"{device} cannot read the memory of GPU {peer}: {handles.first_line(exc)}; the sender "
            "takes another path"
        ) from exc


PROBE_NBYTES = 64
"""Bytes of a probe."""


def probe_digest(content: bytes) -> str:
    """Return the digest (32 hex digits) by which a receiver recognises the probe's bytes."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def check_probe(probe: ProbeInfo, keys: list[str]) -> None:
    """Open the probe and compare its bytes. Raises HandleError where they have another digest.

    `keys` are the device keys of this process; the probe's handle is taken from them. Bytes of
    another GPU come through this process's own: drivers report peer access that moves other bytes.
    """
    handle, gpu = pick_readable(probe.handle, keys)
    with OpenMemory(handle) as memory:
        part = memory.part(0, probe.nbytes)
        if gpu is not None:
            with reading_a_peer(", ".join(probe.handle), gpu):
                part = part.to(gpu)
        found = bytes(part.tolist())
    if probe_digest(found) != probe.digest:
        raise HandleError(
            "the probe opened, but holds other bytes than the sender wrote: this is the memory "
            "of another host or GPU with the same id"
        )
