"""The sender's end: offers the chunks of its ring, or of its tensors, to the hosts that read."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.backends.base import Check
from weightsync.backends.ipc.sender import IpcTrainerEngine
from weightsync.backends.tcp.lent import LentChunks
from weightsync.backends.tcp.window import ChunkWindow, Read
from weightsync.errors import BackendUnavailableError, TransferError, WeightSyncError
from weightsync.runtime.interpreter_exit import TorchCalls, end_at_exit
from weightsync.shm.ring import RingReader
from weightsync.tensors import TORCH_DTYPES, contiguous_bytes
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.sources.base import WeightSource

_WAIT_S = 0.05
_LOOK_NBYTES = 64 << 10


class _Stopped(TransferError):
    """The update was aborted by its sender."""


class Uplink:
    """One update: reads the ring as `reader`, in a thread, and fills `window` for the `chains`.

    Chunks that left the window are read again from the source, where its tensors stay: so a host
    whose source died may ask for any chunk, until the update ends. With `lent` the hosts read these
    chunks where they lie, and this reader leaves the ring.
    """

    def __init__(
        self,
        engine: IpcTrainerEngine,
        reader: int,
        window: ChunkWindow,
        chains: Sequence[Sequence[int]],
        source: WeightSource,
        lent: LentChunks | None = None,
    ) -> None:
        stream = engine.stream
        self.table: list[int] = []
        self._lent = lent
        self._calls = TorchCalls()
        if lent is not None:
            engine.exclude(reader)
        elif (device := stream.buckets[0].device).type != "cpu":
            raise BackendUnavailableError(
                f"the path tcp sends from host memory, and this ring is on {device}; take path "
                "shared_memory, which stages through the host"
            )
        self.error: WeightSyncError | None = None
        self._stream = stream
        self._window = window
        self._chunks = stream.layout.chunks
        self._place = reader
        self._reader = RingReader(
            stream.control, reader, epoch=stream.epoch, base=stream.base, spin_s=0.0
        )
        engine.never_spin()
        self._stop = threading.Event()
        self._ended = threading.Event()
        again: Read | None = None
        if lent is not None:
            again = lent.chunk
        elif (stable := source.stable_tensors()) is not None:
            again = reread(stream.layout, stable)
        window.begin(stream.epoch, len(self._chunks), chains, again)
        self._thread = threading.Thread(target=self._run, name="weightsync-uplink", daemon=True)
        self._thread.start()
        end_at_exit(self)

    def check(self) -> None:
        """Raise the error of this update, if it has failed."""
        if self.error is not None:
            raise self.error

    def finish(self, check: Check) -> None:
        """Wait until the hosts that read here have every chunk."""
        while not self._ended.wait(_WAIT_S):
            check()
        self.check()

    def stop(self) -> None:
        """Abort the update, unless it is complete, and let go of its memory. Idempotent."""
        if not self._ended.is_set():
            self._window.abort()
        self._stop.set()
        self._thread.join()
        self._window.release()

    def end(self, timeout_s: float) -> None:
        """Have the thread end, and wait at most `timeout_s` for it. Idempotent."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            if self._lent is not None:
                self._lend_all(self._lent)
            else:
                self._read_all()
        except WeightSyncError as exc:
            self._window.abort()
            self.error = exc
        except Exception as exc:  # noqa: BLE001 # the caller that waits must get any error
            self._window.abort()
            self.error = TransferError(f"the chunks of this update could not be read: {exc!r}")
        finally:
            self._ended.set()

    def _read_all(self) -> None:
        stream, window = self._stream, self._window
        room = stream.control.entries // stream.control.slots
        for j, chunk in enumerate(self._chunks):
            window.make_room(j, self._check)
            if j >= window.slots:
                self._reader.release(j - window.slots)
            bucket = self._reader.wait(j, check=self._check, timeout_s=stream.timeout_s)
            count = chunk.last_unit - chunk.first_unit if stream.verify else 0
            fingerprints = stream.control.fingerprints(bucket * room, count)
            data = stream.buckets[bucket][: chunk.stop - chunk.start]
            window.offer(j, without_zeros(data.numpy()).data, fingerprints)
        window.complete(self._check)
        if self._chunks:
            self._reader.release(len(self._chunks) - 1)

    def _lend_all(self, lent: LentChunks) -> None:
        stream, window = self._stream, self._window

        def taken(chunks: int) -> None:  # for those who observe
            stream.control.release(self._place, stream.base + max(chunks, 0))

        for j in range(len(self._chunks)):
            self._check()
            window.make_room(j, self._check)
            taken(j - window.slots + 1)
            fingerprints: list[int] = []
            if stream.verify:
                with self._calls.inside():
                    fingerprints = lent.fingerprints(j)
                self.table += fingerprints
            window.offer(j, lent.chunk(j), fingerprints)
        window.complete(self._check)
        taken(len(self._chunks))

    def _check(self) -> None:
        if self._stop.is_set():
            raise _Stopped("the update was aborted by its sender")
        # The ring waits for this reader as long as there are hosts that live, however slow.
        self._stream.control.beat_reader(self._place)


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
