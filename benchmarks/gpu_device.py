"""Device functions of the GPU benchmark, with a substitute on the host for runs without a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from weightsync.cuda import handles
from weightsync.shm.host_keys import host_key
from weightsync.shm.segment import Segment
from weightsync.weights.copying.fused import Batch
from weightsync.wire.offers import Handle, SegmentHandle


class Device:
    """A CUDA device by its events and its allocator, or the host by its clock."""

    def __init__(self, kind: str) -> None:
        self.torch = torch.device(kind)
        self.on_gpu = self.torch.type == "cuda"
        if self.on_gpu:
            if self.torch.index is not None:
                torch.cuda.set_device(self.torch)
            self.torch = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name() if self.on_gpu else "CPU"
        self.keys = list(handles.local_gpu_keys()) if self.on_gpu else [host_key()]

    def wait(self) -> None:
        """Wait for all work of the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], repeats: int, warm_ups: int = 2) -> float:
        """Return the median time of `work` on the device."""
        taken = [self._once(work) for _ in range(warm_ups + repeats)]
        return statistics.median(taken[warm_ups:])

    def allocated(self) -> int:
        """Bytes that torch holds on the device now; 0 on the host."""
        return torch.cuda.memory_allocated() if self.on_gpu else 0

    def begin_peak(self) -> None:
        """Reset the peak of allocated bytes."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """The most bytes that torch held since the reset; 0 on the host."""
        return torch.cuda.max_memory_allocated() if self.on_gpu else 0

    def free(self) -> int | None:
        """Free bytes of the device; None on the host."""
        return torch.cuda.mem_get_info()[0] if self.on_gpu else None

    def forget(self) -> None:
        """Free cached memory."""
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _once(self, work: Callable[[], object]) -> float:
        if not self.on_gpu:
            begin = time.perf_counter()
            work()
            return time.perf_counter() - begin
        event: Any = torch.cuda.Event  # untyped in torch
        first, last = (event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        work()
        # Batches have a stream of their own.
        torch.cuda.synchronize()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


class FreshBuffer:
    """`uint8[nbytes]` made for one chunk and shared by handle, as the re-enacted protocol does."""

    def __init__(self, nbytes: int, device: Device) -> None:
        self._segment: Segment | None = None
        if device.on_gpu:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device.torch)
        else:
            self._segment = Segment.create(nbytes, prefault=False)
            self.tensor = self._segment.tensor()

    def handle(self) -> Handle:
        """Export the buffer for one reader."""
        if self._segment is None:
            return handles.export(self.tensor)
        return SegmentHandle(name=self._segment.name, nbytes=self._segment.nbytes)

    def close(self) -> None:
        """Free the buffer; readers have closed."""
        del self.tensor
        if self._segment is not None:
            self._segment.close()
        else:
            handles.collect()


Span = tuple[torch.cuda.Event, torch.cuda.Event]
"""Events before and after a launch."""

_spans: list[Span] = []


def watch_launches() -> None:
    """Collect the events of fused launches in this process from now on; called once."""
    enqueue = Batch._enqueue

    def timed(self: Batch) -> None:
        first = _record()
        enqueue(self)
        _spans.append((first, _record()))

    Batch._enqueue = timed  # type: ignore[method-assign]


def _record() -> torch.cuda.Event:
    """Record a timed event on the current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
    event.record()
    return event


def launches() -> list[tuple[float, float]]:
    """Return the begin and the end of each launch since the last call, in seconds from the first.

    `[]` where none was fused.
    """
    spans = _spans.copy()
    _spans.clear()
    for _, last in spans:
        last.synchronize()
    return [
        (spans[0][0].elapsed_time(first) / 1e3, spans[0][0].elapsed_time(last) / 1e3)
        for first, last in spans
    ]
