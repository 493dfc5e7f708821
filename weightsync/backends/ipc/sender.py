"""The `ipc` backend's trainer engine: a ring and registered memory, on a host or on one GPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing

import torch

from weightsync.backends.base import (
    Check,
    Handshake,
    Reader,
    Round,
    TransferOptions,
    TransferProgress,
)
from weightsync.backends.ipc.early import EarlyFingerprints
from weightsync.backends.ipc.memory import (
    held_tensors,
    in_place_units,
    is_occupied,
    memory_names,
    refresh_memory,
    register,
    stage_on_gpu,
    storage_info,
    unreleased,
)
from weightsync.backends.ring import (
    HOST_BUCKET_NBYTES,
    HOST_BUCKETS,
    MAX_READERS,
    MAX_RELAYS,
    Buckets,
    IpcInit,
    Ring,
    RingEngine,
    RingShape,
    RingStream,
    RingUpdate,
)
from weightsync.cuda.device_stream import DeviceStream
from weightsync.cuda.memory import PROBE_NBYTES
from weightsync.cuda.staging import StagedBuckets
from weightsync.errors import ConfigError
from weightsync.profiling import scope
from weightsync.shm.ring import Control, RingWriter
from weightsync.shm.shared_stream import SharedStream
from weightsync.specs import Manifest
from weightsync.weights.copying.copy_plan import CompiledUnit
from weightsync.weights.copying.fingerprint import table_digest
from weightsync.weights.copying.fused import hashers
from weightsync.weights.copying.layout import (
    ALIGNMENT,
    UNIT_NBYTES,
    StreamLayout,
    aligned,
    units_per_chunk,
)
from weightsync.weights.sources.base import WeightSource, Writers, WritingSource, checked
from weightsync.weights.sources.packer import Packer, StagedPacker
from weightsync.wire.messages import SharedMemoryUsage

logger = logging.getLogger(__name__)

LEAD_NBYTES = 1 << 20
"""Bytes. With 4 MiB verification takes twice as long, without a limit three to four times."""
STANDSTILL_S = 0.005
_NAP_S = 20e-6


class ReadAhead:
    """Limits the sender to LEAD_NBYTES ahead of the reader that is furthest.

    Bytes that one of them has just read are in the cache that their cores share, so the two passes
    cost little more than one. If no reader makes progress for STANDSTILL_S, the rest of the update
    is read without waiting.

    Args:
        taken: returns the bytes of the stream that the furthest reader has read.
    """

    def __init__(self, taken: Callable[[], int]) -> None:
        self._read_taken = taken
        self._taken = 0
        self._given_up = False

    def wait(self, start: int) -> None:
        """Wait until byte `start` of the stream may be read."""
        if self._given_up or start <= self._taken + LEAD_NBYTES:
            return
        since = time.monotonic()
        while start > (taken := self._read_taken()) + LEAD_NBYTES:
            now = time.monotonic()
            if taken > self._taken:
                self._taken, since = taken, now
            elif now - since > STANDSTILL_S:
                self._given_up = True
                return
            time.sleep(_NAP_S)
        self._taken = taken


class ReaderProgress:
    """The progress that the readers of one ring publish. Reading it never blocks.

    `layout` is the layout of the update in progress, cut into chunks if it is `packed`.
    """

    def __init__(self, control: Control, layout: StreamLayout) -> None:
        self.layout = layout
        self.packed = False
        self._control = control
        self._before: dict[int, int] = {}
        self._base = 0

    def begin_packed(self, layout: StreamLayout, base: int) -> None:
        """Begin an update whose first chunk has the sequence number after `base`."""
        self.layout, self._base, self.packed = layout, base, True

    def begin_unpacked(self, layout: StreamLayout, readers: Iterable[int]) -> None:
        """Begin an update that these readers read from registered memory."""
        self._before = {reader: self._control.loaded(reader) for reader in readers}
        self.layout, self.packed = layout, False

    def taken_nbytes(self, reader: int) -> int:
        """Return the bytes of the stream that a reader has read. Thread-safe, during the update."""
        if not self.packed:
            now = self._control.loaded(reader)
            return now - self._before.get(reader, now)
        chunks = self.layout.chunks
        released = self._control.released(reader) - self._base
        return chunks[min(released, len(chunks)) - 1].stop if released > 0 and chunks else 0

    def furthest(self) -> int:
        """Return the bytes that the furthest reader of an unpacked update has read."""
        return max((self.taken_nbytes(reader) for reader in self._before), default=0)


STAGED_BUCKET_NBYTES = 8 << 20
"""For copies from a GPU to the host: large enough that the start of a copy costs little."""
CUDA_RING_NBYTES = 1 << 30
"""The most bytes of a ring on a GPU, if its buckets are not given."""
CUDA_BUCKETS = 2
"""For models that do not fit into the ring: the best of what was measured (docs/performance.md)."""
CUDA_UNIT_NBYTES = 32 << 20


def cuda_ring(
    nbytes: int,
    *,
    by_launches: bool,
    bucket_nbytes: int | None = None,
    num_buckets: int | None = None,
    most_nbytes: int = CUDA_RING_NBYTES,
) -> tuple[int, int]:
    """Return the bytes of a bucket, and the number of buckets, for `nbytes` of weights on a GPU.

    Each bucket costs two changes of the GPU between the two processes, so there are as few as the
    memory allows. What is packed `by_launches` of a kernel and fits is packed at once, and needs no
    spare bucket: one GPU does not run the kernels of both at the same time. What the trainer makes
    tensor by tensor has two buckets, so that it makes the next ones while a receiver loads.
    """
    fits = nbytes <= most_nbytes
    number = num_buckets or (1 if fits and by_launches and not bucket_nbytes else CUDA_BUCKETS)
    most = most_nbytes // number // ALIGNMENT * ALIGNMENT
    share = aligned(max(-(-nbytes // number), CUDA_UNIT_NBYTES))
    return aligned(bucket_nbytes or max(min(share, most), ALIGNMENT)), number


def cuda_rings(
    nbytes: int,
    *,
    by_launches: bool,
    bucket_nbytes: int | None = None,
    num_buckets: int | None = None,
) -> list[tuple[int, int]]:
    """Return `cuda_ring`, and smaller ones for a GPU that has no room for it, down to two units.

    A bucket that is given is not made smaller.
    """
    found: dict[tuple[int, int], None] = {}
    most_nbytes = CUDA_RING_NBYTES
    while most_nbytes >= CUDA_BUCKETS * CUDA_UNIT_NBYTES:
        ring = cuda_ring(
            nbytes,
            by_launches=by_launches,
            bucket_nbytes=bucket_nbytes,
            num_buckets=num_buckets,
            most_nbytes=most_nbytes,
        )
        found[ring] = None
        most_nbytes //= 2
    return list(found)


class IpcTrainerEngine(RingEngine):
    """Sends a source through a ring (packed), or from registered memory (unpacked).

    `path` is `cuda_ipc` or `shared_memory`. `stage` adds staging memory on the source's device to a
    ring on the host. Raises SegmentError with the needed size at construction when `/dev/shm` has
    no room.
    """

    def __init__(
        self,
        source: WeightSource,
        options: TransferOptions,
        path: str = "shared_memory",
        *,
        stage: Callable[[Buckets, torch.device], StagedBuckets | None] = stage_on_gpu,
    ) -> None:
        self._source = source
        self._options = options
        self.manifest = source.manifest
        on_gpu = self._probes = path == "cuda_ipc"
        stable = source.stable_tensors()
        # Tensors on a GPU that no reader can open are copied through the host, chunk by chunk.
        staged = options.device.type == "cuda" and not on_gpu
        must_pack = stable is None or staged or not options.adopt
        packed = self._packed = must_pack if options.packed is None else options.packed
        ring_on_gpu = on_gpu and packed
        self._unit_nbytes = CUDA_UNIT_NBYTES if on_gpu else UNIT_NBYTES
        self._whole = StreamLayout(self.manifest, unit_nbytes=self._unit_nbytes)
        rings = [_host_ring(options)]
        if ring_on_gpu:
            rings = cuda_rings(
                self._whole.nbytes,
                by_launches=stable is not None,
                bucket_nbytes=options.bucket_nbytes,
                num_buckets=options.num_buckets,
            )
        self._relays = 0
        self._kept = ExitStack()
        keep = self._kept.enter_context
        try:
            gpu = options.device if on_gpu else None
            device = options.device if ring_on_gpu else torch.device("cpu")
            self._ring = keep(closing(self._ring_of(rings, device, gpu)))
            self._shape = self._ring.shape
            self._control = self._ring.control
            self._stage = None if on_gpu else stage(self._ring.buckets, options.device)
            memory = (
                None if packed else register(self._whole, source, stable, gpu, adopt=options.adopt)
            )
            self._memory = None if memory is None else keep(closing(memory))
            if isinstance(memory, SharedStream) and stable is not None:
                memory.adopt(held_tensors(memory, source) or ())
        except BaseException:
            self.close()
            raise
        self._writer = RingWriter(self._control)
        self.reader_progress = ReaderProgress(self._control, self._whole)
        self._since = time.monotonic()
        self._packer = self._packer_of(self.manifest)
        self._in_place: list[CompiledUnit] | None = None
        self._hashers: tuple[list[int], list[Callable[[], int]]] | None = None
        self._early: EarlyFingerprints | None = None
        self._read_early: dict[int, Callable[[], int]] = {}
        self._table: list[int] = []
        self._verify = True
        self._written_nbytes = 0
        self._update: Callable[[Check], None] | None = None
        self._begun: tuple[StreamLayout, RingUpdate] | None = None

    def _ring_of(
        self, rings: Sequence[tuple[int, int]], device: torch.device, gpu: torch.device | None
    ) -> Ring:
        """Return the first of these rings, bytes and number of buckets, for which there is room."""
        for bucket_nbytes, num_buckets in rings:
            units = num_buckets * units_per_chunk(bucket_nbytes, self._unit_nbytes)
            shape = RingShape(
                num_readers=MAX_READERS + MAX_RELAYS,
                entries=max(units, len(self._whole.units), 1),
                unit_nbytes=self._unit_nbytes,
                num_buckets=num_buckets,
                bucket_nbytes=bucket_nbytes,
            )
            try:
                return Ring(shape, device, gpu)
            except torch.OutOfMemoryError as exc:
                full = exc
                size = num_buckets * bucket_nbytes / 1e6
                logger.warning("%s has no room for a ring of %.0f MB", device, size)
        raise full

    @property
    def shape(self) -> RingShape:
        """The sizes of the ring."""
        return self._shape

    @property
    def buckets(self) -> list[torch.Tensor]:
        """The buckets of the ring, `uint8[nbytes]` each."""
        return self._ring.buckets.tensors

    @property
    def packed_layout(self) -> StreamLayout:
        """The layout of packed updates of the whole source."""
        return self._packer.layout

    def add_relay(self) -> int:
        """Return the reader index of another engine. Raises ConfigError for too many of them."""
        if self._relays == MAX_RELAYS:
            raise ConfigError(f"a ring has at most {MAX_RELAYS} relays, for one backend each")
        self._relays += 1
        return MAX_READERS + self._relays - 1

    def stream(self, reader: int) -> RingStream:
        """Return the packed update in progress. Raises ConfigError when there is none."""
        if self._begun is None:
            raise ConfigError("no packed update is in progress")
        self._writer.spin_s = 0.0  # a relay needs the processor
        layout, update = self._begun
        return RingStream(
            self._ring,
            layout,
            reader,
            update,
            verify=self._verify,
            timeout_s=self._options.timeout_s,
            exclude=self._exclude,
        )

    def _exclude(self, reader: int) -> None:
        """Go on without a reader in the packed update that has begun; without any, pack nothing."""
        control = self._control
        control.active = tuple(active for active in control.active if active != reader)
        if not control.active:
            self._update = lambda _: None

    def progress(self) -> TransferProgress:
        """Return the progress of the readers."""
        return self.reader_progress

    @property
    def packed(self) -> bool:
        """Whether tensors are copied through the ring."""
        return self._packed

    def handshake(self, readers: Sequence[Reader], generation: int) -> Handshake:
        """Connect readers; on a GPU after a probe, because an export that is not opened leaks."""
        if self._probes:
            probes = {reader.index: self._ring.probe.info() for reader in readers}
            replies = yield Round(messages=probes, probe=True)
            if replies.failed:
                return
        yield Round(messages={r.index: self.init_payload(r, generation) for r in readers})

    def init_payload(self, reader: Reader, generation: int) -> IpcInit:
        """Return the payload of a reader; GPU memory is exported once per call."""
        return self.offer(reader.index, generation)

    def offer(self, reader: int, generation: int) -> IpcInit:
        """Return the payload of a reader, by its index; GPU memory is exported once per call.

        Raises ConfigError for an index outside of the ring.
        """
        if reader >= self._shape.num_readers:
            raise ConfigError(f"one sender has at most {MAX_READERS} readers; {reader} is too many")
        return self._ring.offer(reader, generation, storage_info(self._memory))

    def begin(
        self, readers: Sequence[int], *, verify: bool, source: WeightSource | None = None
    ) -> RingUpdate:
        """Start an update. A packed update reads the source in `transfer` only."""
        given = self._source if source is None else source
        is_whole = given is self._source
        stable = self._source.stable_tensors() if is_whole else None
        self._verify = verify
        self._table = []
        self._written_nbytes = 0
        if self.packed or not is_whole:
            packer = self._packer if is_whole else self._packer_of(given.manifest)
            return self._begin_packed(list(readers), packer, given, stable)
        return self._begin_unpacked(list(readers), stable)

    def read_ahead(
        self,
        tensors: Mapping[int, torch.Tensor],
        counting: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        """Fingerprint registered memory whose tensors have the values of the next update."""
        if self._memory is None or not self.manifest.nbytes:
            return
        if self._early is None:
            units = self._units_in_place(self._memory)
            addresses = [flat.data_ptr() for flat in self._memory.tensors]
            early = EarlyFingerprints(self._whole, units, addresses)
            self._early = self._kept.enter_context(closing(early))
        self._early.note(tensors, counting)

    def _units_in_place(self, memory: SharedStream | DeviceStream) -> list[CompiledUnit]:
        if self._in_place is None:
            self._in_place = in_place_units(memory, self._whole)
        return self._in_place

    def is_adopted(self, index: int, address: int) -> bool:
        """Whether tensor `index` was moved to `address` by this engine."""
        memory = self._memory
        return isinstance(memory, SharedStream) and memory.is_adopted(index, address)

    def transfer(self, check: Check) -> None:
        """Pack and publish every chunk, or publish the fingerprints of registered memory."""
        if self._update is None:
            raise ConfigError("transfer without begin")
        self._update(check)

    def cancel(self) -> None:
        """Abort the update for waiting readers, by the epoch in shared memory."""
        self._control.epoch += 1

    def end(self) -> None:
        """Drop this update's tensors, and end it for readers that still read it."""
        self._update = None
        self._begun = None
        self._control.epoch += 1

    def liveness_counter(self, reader: int) -> int:
        """Return a value that grows while the reader lives and works."""
        return self._control.liveness(reader)

    def has_unread(self, reader: int) -> bool:
        """Whether a reader of a packed update has not released all of its chunks."""
        if self._begun is None:
            return False
        layout, update = self._begun
        return self._control.released(reader) < update.base + len(layout.chunks)

    @property
    def late_readers(self) -> list[int]:
        """The readers for which the last wait of the ring timed out."""
        return self._writer.late

    @property
    def table_digest(self) -> str | None:
        """The digest of the fingerprints, in order; None without verification."""
        return table_digest(self._table) if self._verify else None

    @property
    def needs_init(self) -> bool:
        """Whether registered memory has moved, so that readers need new handles.

        On a GPU: a storage was reallocated. On the host: a place in the segment has another tensor,
        which must not be overwritten.
        """
        memory, source = self._memory, self._source
        if isinstance(memory, DeviceStream):
            return memory.moved(held_tensors(memory, source) or [])
        return memory is not None and is_occupied(memory, source)

    @property
    def extra_nbytes(self) -> int:
        """Bytes of the ring, its staging memory, the control segment and tensors not adopted."""
        copied = self._memory.copied_nbytes if self._memory is not None else 0
        staged = self._stage.nbytes if self._stage else 0
        return self._ring.buckets.nbytes + staged + self._control.segment.nbytes + copied

    @property
    def written_nbytes(self) -> int:
        """Bytes that this update has written into buckets so far."""
        return self._written_nbytes

    def beat(self) -> None:
        """Show readers that this process lives and works."""
        self._control.beat_writer()

    def usage(self, names: Mapping[int, str]) -> list[SharedMemoryUsage]:
        """List what this engine exports, with its readers. Thread-safe, also during an update."""
        control = self._control.segment
        shared = [
            ("control", control.name, control.nbytes),
            ("ring", self._ring.buckets.name, self._ring.buckets.nbytes),
            ("probe", self._ring.probe.name, PROBE_NBYTES),
            *(("storage", name, nbytes) for name, nbytes in memory_names(self._memory)),
        ]
        readers = sorted(names.values())
        late = sorted(names.get(place, f"reader {place}") for place in unreleased(self._writer))
        age_s = time.monotonic() - self._since
        return [
            SharedMemoryUsage(
                kind=kind,
                name=name,
                nbytes=nbytes,
                owner=True,
                age_s=age_s,
                readers=readers,
                unreleased=late if kind == "ring" else [],
            )
            for kind, name, nbytes in shared
        ]

    def expect_finalizer(self) -> None:
        """Prepare for a close by the garbage collector, which must not move tensors in a step."""
        if isinstance(self._memory, SharedStream):
            self._memory.finalizing = True

    def close(self) -> None:
        """Free everything, in reverse order. Idempotent."""
        self._update = self._begun = self._hashers = self._in_place = self._early = None
        self._read_early = {}
        self._kept.close()

    def _packer_of(self, manifest: Manifest) -> Packer:
        layout, buckets = self._shape.layout(manifest), self.buckets
        return (
            StagedPacker(layout, buckets, self._stage) if self._stage else Packer(layout, buckets)
        )

    def _begin_packed(
        self,
        readers: list[int],
        packer: Packer,
        given: WeightSource,
        stable: list[torch.Tensor] | None,
    ) -> RingUpdate:
        chunks = len(packer.layout.chunks)
        epoch = self._writer.begin(readers, chunks)
        self.reader_progress.begin_packed(packer.layout, self._writer.base)
        update = RingUpdate(epoch=epoch, base=self._writer.base, packed=True)
        self._begun = packer.layout, update

        def pack(check: Check) -> None:
            timeout_s = self._options.timeout_s

            def acquire(j: int) -> int:
                check()
                with scope("weightsync wait for a bucket"):
                    return self._writer.acquire(j, check=check, timeout_s=timeout_s)

            if stable is not None:
                filled = packer.pack_stable(stable, acquire, verify=self._verify)
            elif (writers := self._writers_of(given, packer)) is not None:
                filled = packer.pack_written(writers, acquire, verify=self._verify)
            else:
                pairs = checked(given.tensors(), packer.layout.manifest)
                filled = packer.pack(pairs, acquire, verify=self._verify)
            room = self._control.room
            with closing(filled):
                for j, fingerprints in filled:
                    self._control.write_fingerprints(j % self._control.slots * room, fingerprints)
                    self._table += fingerprints
                    self._writer.publish(j)
                    self._written_nbytes += (
                        packer.layout.chunks[j].stop - packer.layout.chunks[j].start
                    )
            self._writer.drain(chunks, check=check, timeout_s=timeout_s)

        self._update = pack
        return update

    def _writers_of(self, given: WeightSource, packer: Packer) -> Writers | None:
        """Return what writes the tensors of a source into buckets in host memory, if it does."""
        if self.buckets[0].device.type != "cpu" or not isinstance(given, WritingSource):
            return None
        if given.writes_pieces:
            return given.writers() if self._stage is None else None  # it may make them on a GPU
        at_once = not packer.layout.largest_cut_nbytes and not self._verify
        return given.writers() if at_once else None

    def _begin_unpacked(self, readers: list[int], stable: list[torch.Tensor] | None) -> RingUpdate:
        if self._memory is None:
            raise ConfigError("nothing is registered")
        memory = self._memory
        epoch = self._writer.begin(readers, 0)
        self.reader_progress.begin_unpacked(self._whole, readers)
        if stable is None:
            for i, (_, tensor) in enumerate(self._source.tensors()):
                memory.write(i, tensor)
        else:
            refresh_memory(memory, self._source, stable)
        if isinstance(memory, DeviceStream):
            memory.wait()  # readers start when they get the message with this payload
        early = None if self._early is None or stable is None else self._early.take(stable)
        self._read_early = early or {}
        self._update = self._publish_table
        return RingUpdate(epoch=epoch, base=self._control.table_ready, packed=False)

    def _publish_table(self, check: Check) -> None:
        """Fingerprint registered memory while the receivers copy it, and publish the table."""
        if not self._verify or self._memory is None:
            return
        on_host = isinstance(self._memory, SharedStream)  # a GPU runs all passes at once
        limit = ReadAhead(self.reader_progress.furthest) if on_host else None
        early, self._read_early = self._read_early, {}
        units = self._whole.units
        left = [i for i in range(len(units)) if i not in early]
        if self._hashers is None or self._hashers[0] != left:
            in_place = self._units_in_place(self._memory)
            self._hashers = left, hashers([in_place[i] for i in left])
        readers = {**early, **dict(zip(left, self._hashers[1], strict=True))}
        for i, unit in enumerate(units):
            check()
            if limit and i not in early:
                limit.wait(unit.start)
            self._table.append(readers[i]())
        self._control.write_fingerprints(0, self._table)
        self._control.table_ready += len(self._table)


def _host_ring(options: TransferOptions) -> tuple[int, int]:
    staged = options.device.type == "cuda"
    host_bucket = STAGED_BUCKET_NBYTES if staged else HOST_BUCKET_NBYTES
    return aligned(options.bucket_nbytes or host_bucket), options.num_buckets or HOST_BUCKETS
