"""Memory of another process, opened from its handle, and the probe that proves a path."""

from __future__ import annotations

import hashlib
from types import TracebackType
from typing import Self

import torch

from weightsync.cuda import handles
from weightsync.cuda.pinning import Driver, Pinned
from weightsync.errors import HandleError
from weightsync.shm.host_keys import pick
from weightsync.shm.segment import Segment
from weightsync.wire.offers import Handle, ProbeInfo, SegmentHandle


class OpenMemory:
    """A handle, opened: `tensor` is `uint8[…]`, valid until `close`."""

    def __init__(self, handle: Handle) -> None:
        self._segment: Segment | None = None
        self._pinned: Pinned | None = None
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
        """The memory. Raises HandleError after `close`."""
        if self._tensor is None:
            raise HandleError("this memory was closed")
        return self._tensor

    def part(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return bytes `offset` to `offset + nbytes`. Raises HandleError for a range outside."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.tensor.numel():
            raise HandleError(
                f"bytes {offset} to {offset + nbytes} are outside this memory of "
                f"{self.tensor.numel()} bytes; the handle does not fit its tensors"
            )
        return self.tensor[offset : offset + nbytes]

    def pin(self, driver: Driver) -> None:
        """Pin a segment until `close`, for copies to a GPU; fails open. Idempotent."""
        if self._segment is not None and self._pinned is None:
            self._pinned = Pinned(self.tensor, driver, read_only=True)

    def close(self) -> None:
        """Give the memory back, when no copy reads it any more. Idempotent."""
        self._tensor = None
        if self._pinned is not None:
            self._pinned.close()
        if self._segment is not None:
            self._segment.close()
        else:
            handles.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


PROBE_NBYTES = 64


def probe_digest(content: bytes) -> str:
    """Return the digest by which a receiver knows the probe's bytes."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def check_probe(probe: ProbeInfo, keys: list[str]) -> None:
    """Open the probe and look at its bytes. Raises HandleError when they are not the known ones."""
    with OpenMemory(pick(probe.handle, keys)) as memory:
        found = bytes(memory.part(0, probe.nbytes).tolist())
    if probe_digest(found) != probe.digest:
        raise HandleError(
            "the probe opened, but holds other bytes than the sender wrote: this is the memory "
            "of another host or GPU with the same id"
        )
