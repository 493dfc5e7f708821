"""The sender's end: offers the chunks of its ring, or of its tensors, to the hosts that read."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.backends.base import Check
from weightsync.backends.ring import Relay, RingStream
from weightsync.backends.tcp.lent import LentChunks
from weightsync.backends.tcp.window import ChunkWindow, Data, Read
from weightsync.errors import BackendUnavailableError
from weightsync.runtime.interpreter_exit import TorchCalls
from weightsync.tensors import TORCH_DTYPES, contiguous_bytes
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.sources.base import WeightSource

_LOOK_NBYTES = 64 << 10


class Uplink(Relay):
    """One update: reads a ring and fills `window` for the `chains`, in a thread.

    Chunks that left the window are read again from the source, where its tensors stay: so a host
    whose source died may ask for any chunk, until the update ends. With `lent` the hosts read these
    chunks where they lie, and this reader leaves the ring. `left_out` are chunks, by host, that it
    does not want.
    """

    def __init__(
        self,
        stream: RingStream,
        window: ChunkWindow,
        chains: Sequence[Sequence[int]],
        source: WeightSource,
        lent: LentChunks | None = None,
        left_out: Mapping[int, Container[int]] | None = None,
    ) -> None:
        self.table: list[int] = []
        self._lent = lent
        self._calls = TorchCalls()
        if lent is not None:
            stream.leave()
        elif stream.device.type != "cpu":
            raise BackendUnavailableError(
                f"the path tcp sends from host memory, and this ring is on {stream.device}; take "
                "path shared_memory, which stages through the host"
            )
        self._stream = stream
        self._window = window
        again: Read | None = None
        if (stable := source.stable_tensors()) is not None:
            again = reread(stream.layout, stable)
            if lent is not None:
                again = partial(_again, lent, again)
        window.begin(stream.epoch, len(stream.layout.chunks), chains, again, left_out)
        super().__init__(self._offer_all, name="weightsync-uplink")

    def stop(self) -> None:
        """Abort the update, unless it is complete, and let go of its memory. Idempotent."""
        if not self.has_ended:
            self._window.abort()
        super().stop()
        self._window.release()

    def _offer_all(self, check: Check) -> None:
        stream, window = self._stream, self._window
        chunks = len(stream.layout.chunks)

        def check_and_beat() -> None:
            check()
            # The ring waits for this reader as long as there are hosts that live, however slow.
            stream.beat()

        try:
            for j in range(chunks):
                check_and_beat()
                window.make_room(j, check_and_beat)
                if j >= window.slots:
                    stream.release(j - window.slots)
                window.offer(j, *self._chunk(j, check_and_beat))
            window.complete(check_and_beat)
            if chunks:
                stream.release(chunks - 1)
        except BaseException:
            window.abort()
            raise

    def _chunk(self, j: int, check: Check) -> tuple[Data, list[int]]:
        """Return the bytes of chunk `j`, or where they lie, and the fingerprints of its units."""
        if self._lent is None:
            data, fingerprints = self._stream.read(j, check)
            return without_zeros(data.numpy()).data, fingerprints
        with self._calls.inside():
            pieces = self._lent.chunk(j)
            fingerprints = self._lent.fingerprints(j) if self._stream.verify else []
        self.table += fingerprints
        return pieces, fingerprints


def _again(lent: LentChunks, read: Read, j: int) -> Data:
    """Return where chunk `j` lies, or what `read` makes where parts of it are packed."""
    pieces = lent.again(j)
    return read(j) if pieces is None else pieces


def without_zeros(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the bytes of a chunk up to the last one that is not zero; the others are not sent."""
    end = len(data)
    while end:
        begin = (end - 1) // _LOOK_NBYTES * _LOOK_NBYTES
        words = data[begin : end - end % 8].view(np.uint64)
        if words.any() or data[end - end % 8 : end].any():
            return data[: begin + int(np.flatnonzero(data[begin:end])[-1]) + 1]
        end = begin
    return data[:0]


def reread(layout: StreamLayout, tensors: Sequence[torch.Tensor]) -> Read:
    """Return a function that reads chunk `j` of the stream from the source's own tensors."""
    specs = layout.manifest.specs
    calls = TorchCalls()

    def read(j: int) -> memoryview:
        chunk = layout.chunks[j]
        with calls.inside():
            made = torch.zeros(chunk.stop - chunk.start, dtype=torch.uint8)
            for part in layout.slices(chunk.start, chunk.stop):
                spec, tensor = specs[part.index], tensors[part.index]
                flat = contiguous_bytes(tensor.detach().to(TORCH_DTYPES[spec.dtype]))
                begin = part.start - chunk.start
                made[begin : begin + part.nbytes] = flat[part.begin : part.begin + part.nbytes]
            return made.numpy().data

    return read
