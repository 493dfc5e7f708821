"""Memory of another GPU, read once over the link between them: it lands on the receiver's GPU.

Kernels that copy and fingerprint, shards, hooks and sums of lines read what landed. So each byte
crosses the link once, and what is verified is what crossed. Two buffers take turns: one is filled
while the other is read. Not run on two GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from weightsync.cuda.memory import reading_a_peer
from weightsync.cuda.staging import CopyStream, CopyWork, CudaCopyStream
from weightsync.errors import HandleError
from weightsync.weights.copying.copy_plan import CompiledUnit, CopyPlan, Memory
from weightsync.weights.copying.fused import settle
from weightsync.weights.copying.layout import CopyUnit, StreamLayout

LANDING_NBYTES = 32 << 20
"""Bytes of one of the two buffers, if no copy unit is larger."""

Seen = Callable[[torch.Tensor, int], None]
"""Called with bytes that landed, and the byte of the stream at which they begin."""


def copy_stream(device: torch.device) -> CopyStream:
    """Return the stream of the receiver's GPU behind which bytes land."""
    return CudaCopyStream(device)


@dataclass(frozen=True, slots=True)
class Arrival:
    """The copies that bring the stream from byte `start` on to `buffer` (`uint8[nbytes]`).

    `zeros` are the gaps between tensors, which no copy fills.
    """

    start: int
    buffer: torch.Tensor
    targets: list[torch.Tensor]
    sources: list[torch.Tensor]
    zeros: list[torch.Tensor]

    def copy(self) -> None:
        """Enqueue the copies on the current stream of the buffer's GPU."""
        for gap in self.zeros:
            gap.zero_()
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources, non_blocking=True)


class Landing:
    """Two buffers of `nbytes` on `device`, in which memory of GPU `peer` lands.

    Raises HandleError where `device` has no memory left for them.
    """

    def __init__(self, device: torch.device, peer: str, nbytes: int) -> None:
        self.device = device
        self.peer = peer
        self.nbytes = nbytes
        try:
            # Tensors made in inference mode cannot be written outside of it.
            with torch.inference_mode(False):
                self._buffers = [
                    torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)
                ]
        except torch.OutOfMemoryError as exc:
            raise HandleError(
                f"{device} has no {2 * nbytes} bytes left, in which memory of GPU {peer} would "
                "land; the sender takes another path"
            ) from exc
        with reading_a_peer(peer, device):
            self._stream = copy_stream(device)

    def buffer(self, turn: int) -> torch.Tensor:
        """Return the buffer of a turn, `uint8[nbytes]`."""
        return self._buffers[turn % 2]

    def land(self, arrival: Arrival) -> CopyWork:
        """Enqueue the copies of an arrival; does not wait. Raises HandleError."""
        with reading_a_peer(self.peer, self.device), torch.inference_mode(False):
            return self._stream.run(arrival.copy)

    def land_now(self, arrival: Arrival) -> torch.Tensor:
        """Return the bytes of an arrival, complete. Raises HandleError."""
        work = self.land(arrival)
        with reading_a_peer(self.peer, self.device):
            work.wait()
        return arrival.buffer

    def close(self) -> None:
        """Wait for copies in progress, and free the buffers. Idempotent."""
        # A driver that fails copies nothing any more.
        with suppress(HandleError), reading_a_peer(self.peer, self.device):
            self._stream.close()
        self._buffers = []


@dataclass(frozen=True, slots=True)
class LandedPlan:
    """Copy plans that read what lands: one for each arrival, which fills their buffers in turn.

    As CopyPlan; complete on return of `run`.
    """

    start: int
    landing: Landing
    arrivals: Sequence[Arrival]
    plans: Sequence[CopyPlan]
    units: Sequence[CompiledUnit] = ()

    def run(self, seen: Seen | None = None) -> list[int]:
        """Copy all units, and return their fingerprints where the plans verify.

        Raises HandleError where the driver reads the other GPU no more; memory of the plans may be
        written in part.
        """
        got: list[int] = []
        landing, arrivals = self.landing, self.arrivals
        work = landing.land(arrivals[0]) if arrivals else None
        for i, (arrival, plan) in enumerate(zip(arrivals, self.plans, strict=True)):
            # Its buffer was read by the plan before the last one, which is complete.
            following = landing.land(arrivals[i + 1]) if i + 1 < len(arrivals) else None
            with reading_a_peer(landing.peer, landing.device):
                assert work is not None
                work.wait_on_stream()
                got += plan.run()
                settle([plan])
                if seen is not None:
                    seen(arrival.buffer, arrival.start)
            work = following
        return got


def groups_of(units: Sequence[CopyUnit], nbytes: int) -> Iterator[list[CopyUnit]]:
    """Yield runs of units that follow one another and fit into `nbytes`; one unit at least."""
    group: list[CopyUnit] = []
    for unit in units:
        if group and (unit.start != group[-1].stop or unit.stop - group[0].start > nbytes):
            yield group
            group = []
        group.append(unit)
    if group:
        yield group


def from_bucket(
    buffer: torch.Tensor, bucket: torch.Tensor, chunk_start: int, start: int, stop: int
) -> Arrival:
    """Return the arrival of bytes of a chunk that lies in a bucket, zeros included."""
    target = buffer[: stop - start]
    return Arrival(start, target, [target], [bucket[start - chunk_start : stop - chunk_start]], [])


def from_tensors(
    buffer: torch.Tensor, layout: StreamLayout, registered: Memory, start: int, stop: int
) -> Arrival:
    """Return the arrival of bytes of the stream that are those of registered tensors."""
    target = buffer[: stop - start]
    targets, sources = [], []
    for part in layout.slices(start, stop):
        targets.append(target[part.start - start :][: part.nbytes])
        sources.append(registered.tensors[part.index][part.begin : part.begin + part.nbytes])
    zeros = [target[at - start :][:nbytes] for at, nbytes in layout.gaps(start, stop)]
    return Arrival(start, target, targets, sources, zeros)
