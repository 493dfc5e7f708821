"""Loads the bytes of one message from a sender's ring or registered memory into a load target."""

from __future__ import annotations

import time
import weakref
from collections.abc import Generator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from weightsync.backends.base import LoadContext, Received, Steps
from weightsync.backends.ipc.landing import (
    LandedPlan,
    Landing,
    from_bucket,
    from_tensors,
    groups_of,
)
from weightsync.backends.ipc.lending import DeliveryPlan, Lent
from weightsync.backends.ring import IpcInit, RingUpdate
from weightsync.cuda.memory import OpenMemory
from weightsync.cuda.pinning import CudaDriver
from weightsync.cuda.wait import wait_for_all_streams
from weightsync.errors import (
    ProtocolError,
    SegmentError,
    SourceLostError,
    TransferError,
    VerificationError,
    shorten,
)
from weightsync.shm.ring import Control, RingReader
from weightsync.shm.wait import SPIN_S
from weightsync.specs import Manifest, TensorSpec
from weightsync.tensors import TORCH_DTYPES, from_bytes
from weightsync.weights.copying import arena
from weightsync.weights.copying.checksums import MASK
from weightsync.weights.copying.copy_plan import (
    CopyPlan,
    Memory,
    Reads,
    UnitCompiler,
)
from weightsync.weights.copying.fingerprint import xxh3
from weightsync.weights.copying.fused import bucket_reader, fuse, hashers, settle
from weightsync.weights.copying.layout import Chunk, CopyUnit, StreamLayout, TensorSlice
from weightsync.weights.lines.memory import LINE, LineMemory, total_of, why_no_kernels
from weightsync.weights.sinks.base import (
    LoadTarget,
    NamedTensor,
    Together,
    Verification,
    own_storage,
    refuse_kept,
    users_code,
    uses,
    write_counts,
)
from weightsync.weights.sources.packer import bucket_views
from weightsync.wire.codec import decode_payload, manifest_from_wire
from weightsync.wire.messages import RegisteredUpdate


class Assembly:
    """Memory for tensors that a hook does not get from their bucket; see DeliveryPlan.

    Host memory is kept between updates, because memory that is touched for the first time costs ten
    times a warm copy. GPU memory is kept by torch's allocator.
    """

    def __init__(self) -> None:
        self._kept: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that are kept."""
        return 0 if self._kept is None else self._kept.numel()

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return uninitialised `uint8[nbytes]` for one update. Raises TransferError."""
        if device.type != "cpu":
            with arena.no_room(nbytes, device):
                return torch.empty(nbytes, dtype=torch.uint8, device=device)
        if self._kept is None or self._kept.numel() < nbytes:
            self._kept = None  # freed before the new one is allocated
            self._kept = arena.allocate(nbytes, device)
        return self._kept[:nbytes]

    def clear(self) -> None:
        """Free the memory."""
        self._kept = None


class HookFeeder:
    """Passes tensors to `load_target.load`; valid until that returns.

    From a ring in the order of `plan`, with `memory` (`uint8[plan.nbytes]`) for tensors that wait
    for others of their part or are split over buckets. If the hook kept a view, which the use count
    of the storage shows, TransferError names the tensors. What it wrote to memory that is `lent` is
    dropped; on a GPU, where the sender and other receivers see it, TransferError names the tensors.
    Not of bytes that `landed` in memory of the receiver: nobody else sees these.
    """

    def __init__(
        self,
        layout: StreamLayout,
        load_target: LoadTarget,
        context: LoadContext,
        *,
        plan: DeliveryPlan | None = None,
        memory: torch.Tensor | None = None,
        lent: Lent | None = None,
        landed: bool = False,
    ) -> None:
        self._landed = landed
        self._layout = layout
        self._load_target = load_target
        self._lends = context.lends_views
        self._kept_advice = context.kept_advice
        self._plan = plan
        self._memory = memory
        self._lent = lent
        self._arrived: dict[int, torch.Tensor] = {}

    def fingerprints(self, chunk: Chunk, bucket: torch.Tensor, *, verify: bool) -> list[int]:
        """Return the fingerprints of a received chunk; [] without `verify`."""
        if not verify:
            return []
        if bucket.device.type == "cpu":
            return [xxh3(view) for view in bucket_views(self._layout, chunk, bucket)]
        return bucket_reader(self._layout, chunk, bucket)()

    def deliver(self, number: int, bucket: torch.Tensor) -> None:
        """Pass all tensors that are due with a chunk to the hook, and keep its others."""
        assert self._plan is not None
        chunk, due = self._layout.chunks[number], self._plan.due[number]
        ready = set(due)
        waiting: list[tuple[TensorSlice, torch.Tensor]] = []
        for part in self._layout.slices(chunk.start, chunk.stop):
            begin = part.start - chunk.start
            flat = bucket[begin : begin + part.nbytes]
            if part.index not in self._plan.kept:
                self._arrived[part.index] = flat
            elif part.index in ready:
                self._keep(part, flat)
            else:
                waiting.append((part, flat))
        self._pass_due(due)
        for part, flat in waiting:  # in memory that is free now
            self._keep(part, flat)
        # A hook has enqueued copies that read the bucket.
        wait_for_all_streams([bucket.device])

    def deliver_whole(self, memory: Memory) -> None:
        """Pass all tensors of registered memory to the hook at once."""
        self._arrived = dict(enumerate(memory.tensors))
        self._pass(range(len(memory.tensors)))
        wait_for_all_streams(tensor.device for tensor in memory.tensors)

    def finish(self) -> None:
        """Pass the remaining tensors without bytes to the hook."""
        if self._plan is not None:
            self._pass_due(self._plan.due_at_end)
        self._memory = None

    def _keep(self, part: TensorSlice, flat: torch.Tensor) -> None:
        """Copy a slice of a tensor to the memory in which the tensor waits, or is joined."""
        assert self._plan is not None
        if self._memory is None:
            raise ValueError("tensors wait for others of their part; the feeder needs memory")
        at = self._plan.kept[part.index]
        nbytes = self._layout.manifest.specs[part.index].nbytes
        self._memory[at + part.begin : at + part.begin + part.nbytes].copy_(flat)
        if part.begin + part.nbytes == nbytes:
            self._arrived[part.index] = self._memory[at : at + nbytes]

    def _pass_due(self, due: Sequence[int]) -> None:
        """Pass these tensors to the hook: in one call, or part by part where it gets clones."""
        plan = self._plan
        if plan is None or self._lends:
            self._pass(due)
            return
        parts: dict[int, list[int]] = {}
        for i in due:
            parts.setdefault(plan.parts[i], []).append(i)
        for part in parts.values() if self._load_target.together is not None else (due,):
            self._pass(part)

    def _pass(self, indices: Sequence[int]) -> None:
        """Pass these tensors to the hook in one call."""
        if not indices:
            return
        specs = self._layout.manifest.specs
        with torch.inference_mode(False):  # else torch counts no writes to the tensors
            passed = [
                (specs[i].name, self._tensor_for_hook(specs[i], self._arrived.pop(i, None)))
                for i in indices
            ]
        watched = self._watched(indices, passed)
        writes = write_counts(base for _, base in watched)
        counts = [uses(base) for _, base in passed]
        pairs = [
            (name, from_bytes(base, specs[i]))
            for i, (name, base) in zip(indices, passed, strict=True)
        ]
        try:
            with users_code("load_weights") if self._load_target.users_own else nullcontext():
                self._load_target.load(pairs)
            del pairs
            if self._lends:
                refuse_kept(passed, counts, self._kept_advice)
        finally:
            written = _written(watched, writes)
            if self._lent is not None:
                self._lent.restore(base for _, base in written)
        on_gpu = [name for name, base in written if base.device.type != "cpu"]
        if on_gpu:
            raise TransferError(
                f"load_weights wrote to {len(on_gpu)} tensors that it was given: "
                f"{shorten(on_gpu)}; on a GPU they are the memory of the sender, which other "
                "receivers read: write to copies, or give HookSink(hook, keeps_views=True), which "
                "hands out clones"
            )

    def _watched(self, indices: Sequence[int], passed: Sequence[NamedTensor]) -> list[NamedTensor]:
        """Return those of the tensors that are the sender's memory, and may be written to."""
        if self._landed or not self._load_target.users_own:
            return []
        kept = self._plan.kept if self._plan is not None else {}
        return [pair for i, pair in zip(indices, passed, strict=True) if i not in kept]

    def _tensor_for_hook(self, spec: TensorSpec, flat: torch.Tensor | None) -> torch.Tensor:
        if flat is None:
            flat = torch.empty(0, dtype=torch.uint8)
        elif flat.device.type == "cpu" and flat.numel():
            # A separate storage for each tensor, so that its use count identifies the tensor.
            flat = own_storage(flat)
        elif flat.storage_offset() % TORCH_DTYPES[spec.dtype].itemsize:
            flat = flat.clone()  # consecutive tensors need not be aligned
        else:
            flat = flat.data  # with a count of writes of its own
        return flat


def _written(tensors: Sequence[NamedTensor], before: Sequence[int] | None) -> Sequence[NamedTensor]:
    """Return the tensors that were written since they had these counts; None: on the host all."""
    after = write_counts(tensor for _, tensor in tensors)
    if before is None or after is None:
        return [pair for pair in tensors if pair[1].device.type == "cpu"]
    return [pair for pair, old, new in zip(tensors, before, after, strict=True) if old != new]


_LIVENESS_INTERVAL_S = 0.05
_KEPT_COPY_PLANS = 4
"""Number of compiled lists of copy plans that are kept, for the ring and registered memory."""
_STEP_UNITS = 2
"""Copy units after which a reader of registered memory publishes its progress, if it verifies."""
_MAX_STEP_UNITS = 16
"""The maximum without verification, where it is 1 % of the update and for observers only."""
_CHECKED_STEPS = 8
_LANDED_GROUPS = 16
"""Turns of the two buffers on another GPU, half a gigabyte, after which progress is published."""
_IN_PLACE = 4
"""Marks kept copy plans that only read memory; the marks of others are `ring` + 2 * `verify`."""
_ADDED_UP = 8
"""Added to the mark of plans of another GPU's memory by which all lines are added up."""


class Compiled(NamedTuple):
    """Copy plans, and the copy units of which each has the copies; others have no place here.

    `nbytes` are the bytes of tensors in these units.
    """

    plans: Sequence[CopyPlan | LandedPlan]
    units: list[list[CopyUnit]]
    nbytes: int


@dataclass(frozen=True, slots=True)
class OpenedMemory:
    """The memory that an init opened: control segment, ring, registered tensors. Its layouts.

    Also what the transfers from it keep: compiled copy plans, and memory for large tensors. `kept`
    closes the memory. Memory of another GPU than this receiver's has a landing, through which all
    of it is read: the ring, or registered memory, or both.
    """

    info: IpcInit
    sender: str
    lease_s: float
    relayed: bool
    control: Control
    ring: OpenMemory
    buckets: list[torch.Tensor]
    storages: list[OpenMemory]
    whole: StreamLayout
    chunked: StreamLayout
    registered: Memory | None
    kept: ExitStack
    ring_landing: Landing | None = None
    storages_landing: Landing | None = None
    copy_plans: dict[tuple[int, int, int], tuple[object, object, Compiled]] = field(
        default_factory=dict
    )
    assembly: Assembly = field(default_factory=Assembly)
    landed: Assembly = field(default_factory=Assembly)
    deliveries: dict[Together | None, DeliveryPlan] = field(default_factory=dict)
    lent: list[Lent] = field(default_factory=list)

    def keep(self, layout: StreamLayout, memory: Memory, kind: int, plans: Compiled) -> None:
        """Keep copy plans for later updates while `memory` exists, and drop the oldest."""
        key, kept = (id(layout), id(memory), kind), self.copy_plans
        # Both references keep the ids unique: the weak one drops the plans before an id is reused.
        memory_lives = weakref.ref(memory, lambda _: kept.pop(key, None))
        kept[key] = layout, memory_lives, plans
        if len(kept) > _KEPT_COPY_PLANS:
            kept.pop(next(iter(kept)), None)

    def kept_plans(self, layout: StreamLayout, memory: Memory, kind: int) -> Compiled | None:
        """Return what `keep` was given, None where it is not kept."""
        found = self.copy_plans.get((id(layout), id(memory), kind))
        return None if found is None else found[2]

    def delivery(self, layout: StreamLayout, together: Together | None) -> DeliveryPlan:
        """Return when a hook gets the tensors of a layout of the ring; kept for the model's."""
        if layout is not self.chunked:
            return DeliveryPlan(layout, together)
        if together not in self.deliveries:
            self.deliveries.clear()
            self.deliveries[together] = DeliveryPlan(layout, together)
        return self.deliveries[together]

    def lend(self) -> Lent:
        """Return the memory as a hook gets it, mapped at the first use. Raises SegmentError."""
        if not self.lent:
            info, ring = self.info, self.info.ring
            known = info.storages
            places = zip(known.storage, known.offset, strict=True) if known is not None else ()
            self.lent.append(
                Lent.of(
                    self.ring,
                    ring.bucket_nbytes,
                    ring.num_buckets,
                    self.storages,
                    self.registered,
                    places,
                )
            )
        return self.lent[0]

    def close(self) -> None:
        """Free what is kept, and close the memory. Idempotent."""
        self.copy_plans.clear()
        self.assembly.clear()
        self.landed.clear()
        for lent in self.lent:
            lent.forget()
        self.lent.clear()
        if self.registered is not None:
            self.registered.forget()
        self.kept.close()


def chunked_layout(manifest: Manifest, info: IpcInit) -> StreamLayout:
    """Return the layout of `manifest` in a sender's ring."""
    return StreamLayout(
        manifest, bucket_nbytes=info.ring.bucket_nbytes, unit_nbytes=info.unit_nbytes
    )


class IncomingTransfer:
    """The transfer of one message: packed or unpacked, into memory or through a hook."""

    def __init__(
        self,
        opened: OpenedMemory,
        info: RegisteredUpdate,
        context: LoadContext,
    ) -> None:
        self._opened = opened
        self._info = info
        self._context = context
        self._control = opened.control
        self._fingerprints: list[int] = []
        self._lines_total: int | None = None
        self._waited_s = 0.0
        self._wrong: list[CopyUnit] = []
        self._checked_at = 0.0  # the sender may have died while its message waited for its turn
        ring_update = self._ring_update = decode_payload(info.payload, RingUpdate)
        if info.manifest is not None:
            if not ring_update.packed:
                raise ProtocolError(
                    "an unpacked update sends the tensors of its init; send others through the ring"
                )
            manifest = manifest_from_wire(info.manifest)
            self._layout = chunked_layout(manifest, opened.info)
        else:
            self._layout = opened.chunked if ring_update.packed else opened.whole
        self._read_nbytes = self._layout.manifest.nbytes
        packed = ring_update.packed
        self._landing = landing = opened.ring_landing if packed else opened.storages_landing
        self._landed_nbytes = 0 if landing is None else 2 * landing.nbytes
        self._reader = RingReader(
            self._control,
            opened.info.reader,
            epoch=ring_update.epoch,
            base=ring_update.base,
            spin_s=0.0 if opened.relayed else SPIN_S,
        )

    def run(self) -> Steps:
        """Load the tensors, compare the fingerprints, and return the result."""
        try:
            yield  # from here on this reader leaves the ring, whatever ends this
            self._await_epoch()
            return (yield from self._load())
        except BaseException as exc:
            # The ring's other readers would wait: of a failure they may hear only when they end.
            if self._ring_update.packed:
                self._reader.leave(len(self._layout.chunks))
            if self._opened.relayed and self._is_over and type(exc) is TransferError:
                raise SourceLostError(str(exc)) from exc  # another reader is to blame, perhaps
            raise

    @property
    def _is_over(self) -> bool:
        """Whether the writer of the ring has ended this update."""
        return self._control.epoch > self._ring_update.epoch

    def _load(self) -> Steps:
        load_target = self._context.open_target(self._layout)
        adds_up = self._info.delta_follows and load_target.takes_deltas and _has_shards(load_target)
        if adds_up and not why_no_kernels():
            self._lines_total = 0
        if self._ring_update.packed:
            yield from self._through_ring(load_target)
        else:
            yield from self._from_storages(load_target)
        if self._wrong:
            raise VerificationError(names=self._wrong_names())
        return Received(
            self._layout.manifest,
            self._fingerprints,
            self._level(load_target),
            lines_total=self._lines_total,
            waited_s=self._waited_s,
            read_nbytes=self._read_nbytes,
            extra_nbytes=self._landed_nbytes,
        )

    def _await_chunk(self, j: int) -> int:
        """Return the bucket of chunk `j`, once the sender has published it."""
        started = time.perf_counter()
        bucket = self._reader.wait(j, check=self._check, timeout_s=self._opened.lease_s)
        self._waited_s += time.perf_counter() - started
        return bucket

    def _await_epoch(self) -> None:
        """Wait until the ring is at this update: a relayed ring may be later than its readers.

        Raises TransferTimeout, or TransferError where the update is over.
        """
        control, epoch = self._control, self._ring_update.epoch
        if self._opened.relayed:
            started = time.perf_counter()
            self._reader.wait_epoch(check=self._check, timeout_s=self._opened.lease_s)
            self._waited_s += time.perf_counter() - started
        if control.epoch != epoch:
            raise TransferError(
                f"the message has epoch {epoch}, the ring is at {control.epoch}; this update "
                "is over"
            )

    def _through_ring(self, load_target: LoadTarget) -> Generator[None, None, None]:
        if load_target.memory is None:
            yield from self._through_hook(load_target)
            return
        compiled = self._compile(load_target, ring=True)
        self._read_nbytes = compiled.nbytes
        for j, chunk in enumerate(self._layout.chunks):
            self._check()
            bucket = self._await_chunk(j)
            units = self._layout.units[chunk.first_unit : chunk.last_unit]
            expected = self._expected_of(j, len(units))
            self._context.mark_dirty()
            got = self._run(compiled.plans[j])
            self._compare_taken(units, compiled.units[j], got, expected)
            if self._landing is None:
                # No name for the view: an error's frames would keep it, and the memory mapped.
                self._add_up(self._opened.buckets[bucket][: chunk.stop - chunk.start], chunk.start)
            self._reader.release(j)
            yield

    def _through_hook(self, load_target: LoadTarget) -> Generator[None, None, None]:
        """Pass the chunks of the ring to a hook."""
        verify, lent = self._info.verify, self._lent(load_target)
        feeder = self._feeder(load_target, lent, self._layout)
        buckets = self._opened.buckets if lent is None else lent.buckets
        for j, chunk in enumerate(self._layout.chunks):
            self._check()
            bucket = self._await_chunk(j)
            units = self._layout.units[chunk.first_unit : chunk.last_unit]
            expected, buffer = self._expected_of(j, len(units)), buckets[bucket]
            if self._landing is not None:
                buffer = self._land_chunk(self._landing, self._layout, chunk, buffer)
            if lent is not None and not verify:
                lent.restore_written([buffer])
            got = feeder.fingerprints(chunk, buffer, verify=verify)
            if got != expected and lent is not None and lent.restore([buffer]):
                # A hook wrote where torch does not count it: through NumPy, or `.data`.
                got = feeder.fingerprints(chunk, buffer, verify=verify)
            self._compare(units, got, expected)
            self._reader.check_current(j)
            self._refuse_wrong()
            self._context.mark_dirty()
            feeder.deliver(j, buffer)
            self._reader.release(j)
            yield
        self._context.mark_dirty()  # where all tensors are empty, no chunk has called it
        feeder.finish()

    def _from_storages(self, load_target: LoadTarget) -> Generator[None, None, None]:
        registered = self._opened.registered
        if registered is None:
            raise ProtocolError(
                "an unpacked update needs storages, and init had none; init again with them"
            )
        self._check()
        if load_target.memory is None and self._landing is not None:
            yield from self._through_landing(load_target, self._landing, registered)
        elif load_target.memory is None:
            lent = self._lent(load_target)
            given = registered if lent is None else lent.registered
            assert given is not None
            feeder = HookFeeder(self._layout, load_target, self._context, lent=lent)
            if self._info.verify:
                got = yield from self._each(self._read_in_place(given).plans)
                expected = self._published_table()
                if got != expected and lent is not None and lent.restore(given.tensors):
                    plans = self._read_in_place(given).plans
                    got = [f for plan in plans for f in plan.run()]  # as above
                self._compare(self._layout.units, got, expected)
            elif lent is not None:
                lent.restore_written(given.tensors)
            self._refuse_wrong()
            self._context.mark_dirty()
            feeder.deliver_whole(given)
        else:
            self._context.mark_dirty()
            compiled = self._compile(load_target, ring=False)
            self._read_nbytes = compiled.nbytes
            got = yield from self._each(compiled.plans)
            settle([plan for plan in compiled.plans if isinstance(plan, CopyPlan)])
            taken = [unit for units in compiled.units for unit in units]
            self._compare_taken(self._layout.units, taken, got, self._published_table())
            if self._lines_total is not None and self._landing is None:
                self._lines_total = LineMemory(self._layout, registered).total()
        if self._control.epoch != self._ring_update.epoch:
            raise TransferError("the sender began another update while this one was read")

    def _through_landing(
        self, load_target: LoadTarget, landing: Landing, registered: Memory
    ) -> Generator[None, None, None]:
        """Pass registered tensors of another GPU to a hook, as many at once as a bucket holds."""
        layout = self._layout.in_chunks(self._opened.info.ring.bucket_nbytes)
        feeder = self._feeder(load_target, None, layout)
        expected = self._published_table()
        reader = self._opened.info.reader
        before = self._control.loaded(reader)
        for j, chunk in enumerate(layout.chunks):
            self._check()
            buffer = self._land_chunk(landing, layout, chunk, registered)
            got = feeder.fingerprints(chunk, buffer, verify=self._info.verify)
            cut = slice(chunk.first_unit, chunk.last_unit)
            self._compare(layout.units[cut], got, expected[cut])
            self._refuse_wrong()
            self._context.mark_dirty()
            feeder.deliver(j, buffer)
            self._control.load(reader, before + chunk.stop)
            yield
        self._context.mark_dirty()
        feeder.finish()

    def _land_chunk(
        self, landing: Landing, layout: StreamLayout, chunk: Chunk, source: torch.Tensor | Memory
    ) -> torch.Tensor:
        """Return a chunk that landed from a bucket or from registered tensors."""
        largest = max(chunk.stop - chunk.start for chunk in layout.chunks)
        buffer = self._opened.landed.take(largest, landing.device)
        self._landed_nbytes = 2 * landing.nbytes + largest
        start, stop = chunk.start, chunk.stop
        if isinstance(source, Memory):
            return landing.land_now(from_tensors(buffer, layout, source, start, stop))
        return landing.land_now(from_bucket(buffer, source, start, start, stop))

    def _run(self, plan: CopyPlan | LandedPlan) -> list[int]:
        """Run the copies of a chunk of the ring; complete on return."""
        if isinstance(plan, LandedPlan):
            return plan.run(self._add_up)
        got = plan.run()
        settle([plan])
        return got

    def _add_up(self, lines: torch.Tensor, start: int) -> None:
        """Add lines, the first of them at byte `start`, to their total, where it is wanted."""
        if self._lines_total is not None:
            self._lines_total = self._lines_total + total_of(lines, start // LINE) & MASK

    def _lent(self, load_target: LoadTarget) -> Lent | None:
        """Return the memory that a hook may write to; None where none of the user's gets it."""
        if self._landing is not None:
            return None
        return self._opened.lend() if load_target.users_own else None

    def _feeder(
        self, load_target: LoadTarget, lent: Lent | None, layout: StreamLayout
    ) -> HookFeeder:
        """Return the feeder of a hook, with memory for tensors that wait."""
        opened, landing, memory = self._opened, self._landing, None
        plan = opened.delivery(layout, load_target.together)
        if plan.nbytes:
            # Memory is kept for the model only: other tensors may be larger than all of its own.
            kept = layout is opened.chunked or plan.nbytes <= opened.assembly.nbytes
            assembly = opened.assembly if kept else Assembly()
            device = opened.buckets[0].device if landing is None else landing.device
            memory = assembly.take(plan.nbytes, device)
        return HookFeeder(
            layout,
            load_target,
            self._context,
            plan=plan,
            memory=memory,
            lent=lent,
            landed=landing is not None,
        )

    def _each(
        self, copy_plans: Sequence[CopyPlan | LandedPlan]
    ) -> Generator[None, None, list[int]]:
        """Run the plans of registered memory, and publish the progress for the sender."""
        got: list[int] = []
        reader = self._opened.info.reader
        before = self._control.loaded(reader)
        for i, copy_plan in enumerate(copy_plans):
            if i % _CHECKED_STEPS == 0:
                self._check()
            self._control.load(reader, before + copy_plan.start)
            if isinstance(copy_plan, LandedPlan):
                self._check()
                got += copy_plan.run(self._add_up)
            else:
                got += copy_plan.run()
            yield
        self._control.load(reader, before + self._layout.nbytes)
        return got

    def _read_in_place(self, registered: Memory) -> Compiled:
        """Return plans that fingerprint registered memory in place, before a hook gets it."""
        kept = self._opened.kept_plans(self._layout, registered, _IN_PLACE)
        if kept is not None:
            return kept
        compiler = UnitCompiler(self._layout, registered, registered)
        units = self._layout.units
        read = hashers([compiler.compile(unit) for unit in units])
        steps = range(0, len(units), _STEP_UNITS)
        plans = [
            CopyPlan(units[i].start, (), True, Reads(read[i : i + _STEP_UNITS])) for i in steps
        ]
        taken = [units[i : i + _STEP_UNITS] for i in steps]
        compiled = Compiled(plans, taken, self._layout.manifest.nbytes)
        self._opened.keep(self._layout, registered, _IN_PLACE, compiled)
        return compiled

    def _compile(self, load_target: LoadTarget, *, ring: bool) -> Compiled:
        """Return a copy plan for each chunk, or for each step through registered memory."""
        memory = load_target.memory
        if memory is None:
            raise TransferError("this load target has no memory of its own")
        verify = self._info.verify
        kind = int(ring) + 2 * verify
        if self._landing is not None and self._lines_total is not None:
            kind += _ADDED_UP
        kept = self._opened.kept_plans(self._layout, memory, kind)
        if kept is not None:
            return kept
        registered = None if ring else self._opened.registered
        landing = self._landing
        compiler = UnitCompiler(self._layout, memory, registered if landing is None else None)
        buckets = self._opened.buckets
        if ring and buckets[0].device.type == "cpu":
            _pin_for(memory, self._opened.ring)
        plans: list[CopyPlan | LandedPlan] = []
        taken: list[list[CopyUnit]] = []
        for j, chunk in enumerate(self._layout.chunks):
            bucket = buckets[j % len(buckets)] if ring else None
            units = self._layout.units[chunk.first_unit : chunk.last_unit]
            if landing is not None:
                for piece in self._pieces(units, compiler, landing, ring=ring):
                    plans.append(self._landed(landing, compiler, chunk, bucket, piece))
                    taken.append([unit for unit in piece if compiler.takes(unit)])
                continue
            units = [unit for unit in units if compiler.takes(unit)]
            compiled = fuse(
                [compiler.compile(r, bucket, chunk.start) for r in units], verify=verify
            )
            step = max(len(units), 1) if ring else self._step_units
            for i in range(0, max(len(units), int(ring)), step):  # a chunk of the ring has a plan
                start = units[i].start if units else chunk.start
                plans.append(CopyPlan.of(start, compiled[i : i + step], verify=verify))
                taken.append(units[i : i + step])
        nbytes = sum(
            part.nbytes
            for units in taken
            for unit in units
            for part in self._layout.slices(unit.start, unit.stop)
        )
        found = Compiled(plans, taken, nbytes)
        if self._info.manifest is None:
            self._opened.keep(self._layout, memory, kind, found)
        return found

    def _pieces(
        self, units: list[CopyUnit], compiler: UnitCompiler, landing: Landing, *, ring: bool
    ) -> list[list[CopyUnit]]:
        """Return the units of each plan: those of a chunk of the ring, or of several turns.

        Those that have no place here land only where all lines are added up.
        """
        if self._lines_total is None:
            units = [unit for unit in units if compiler.takes(unit)]
        if ring:
            return [units]
        groups = list(groups_of(units, landing.nbytes))
        return [
            [unit for group in groups[i : i + _LANDED_GROUPS] for unit in group]
            for i in range(0, len(groups), _LANDED_GROUPS)
        ]

    def _landed(
        self,
        landing: Landing,
        compiler: UnitCompiler,
        chunk: Chunk,
        bucket: torch.Tensor | None,
        units: Sequence[CopyUnit],
    ) -> LandedPlan:
        """Return the plan of units that land from a bucket, or from registered tensors."""
        verify, registered = self._info.verify, self._opened.registered
        arrivals, plans = [], []
        for turn, group in enumerate(groups_of(units, landing.nbytes)):
            start, stop, buffer = group[0].start, group[-1].stop, landing.buffer(turn)
            if bucket is not None:
                arrivals.append(from_bucket(buffer, bucket, chunk.start, start, stop))
            else:
                assert registered is not None
                arrivals.append(from_tensors(buffer, self._layout, registered, start, stop))
            compiled = fuse(
                [compiler.compile(unit, buffer, start) for unit in group if compiler.takes(unit)],
                verify=verify,
            )
            plans.append(CopyPlan.of(start, compiled, verify=verify))
        return LandedPlan(units[0].start if units else chunk.start, landing, arrivals, plans)

    @property
    def _step_units(self) -> int:
        """Number of copy units of registered memory after which progress is published."""
        if self._info.verify:
            return _STEP_UNITS
        return min(max(_STEP_UNITS, len(self._layout.units) // 100), _MAX_STEP_UNITS)

    def _expected_of(self, j: int, count: int) -> list[int]:
        if not self._info.verify:
            return []
        control = self._control
        return control.fingerprints(j % control.slots * control.room, count)

    def _published_table(self) -> list[int]:
        """Wait for the sender's fingerprints of registered memory. Raises TransferTimeout."""
        if not self._info.verify:
            return []
        count = len(self._layout.units)
        started = time.perf_counter()
        self._reader.wait_table(count, check=self._check, timeout_s=self._opened.lease_s)
        self._waited_s += time.perf_counter() - started
        return self._control.fingerprints(0, count)

    def _compare(self, units: Sequence[CopyUnit], got: list[int], expected: list[int]) -> None:
        self._fingerprints += got
        if got != expected:
            pairs = zip(units, got, expected, strict=True)
            self._wrong += [unit for unit, have, want in pairs if have != want]

    def _compare_taken(
        self,
        units: Sequence[CopyUnit],
        taken: Sequence[CopyUnit],
        got: list[int],
        expected: list[int],
    ) -> None:
        """Compare the units that have a place here; those of others count as the sender's."""
        if len(taken) < len(units) and self._info.verify:
            places = {unit.start: i for i, unit in enumerate(units)}
            found = list(expected)
            for unit, fingerprint in zip(taken, got, strict=True):
                found[places[unit.start]] = fingerprint
            got = found
        self._compare(units, got, expected)

    def _refuse_wrong(self) -> None:
        """Raise VerificationError before a hook gets tensors, because it cannot undo a load."""
        if self._wrong:
            raise VerificationError(names=self._wrong_names())

    def _wrong_names(self) -> list[str]:
        return list(
            dict.fromkeys(name for unit in self._wrong for name in self._layout.names(unit))
        )

    def _level(self, load_target: LoadTarget) -> Verification:
        if not self._info.verify:
            return "none"
        reads_back = load_target.memory is not None and self._same_side(load_target.memory)
        return self._context.verification if reads_back else "arrived"

    def _same_side(self, memory: Memory) -> bool:
        """Whether loaded memory was fingerprinted. False where a GPU reads memory of the host."""
        on_gpu = any(device.type != "cpu" for device in memory.devices)
        return not (on_gpu and self._source_device.type == "cpu")

    @property
    def _source_device(self) -> torch.device:
        """Where the bytes lie that are copied to the load target."""
        registered = self._opened.registered
        if self._landing is not None:
            return self._landing.device
        if self._ring_update.packed or registered is None or not registered.tensors:
            return self._opened.buckets[0].device
        return registered.tensors[0].device

    def _check(self) -> None:
        self._context.check()
        now = time.monotonic()
        if now - self._checked_at > _LIVENESS_INTERVAL_S:
            self._checked_at = now
            if self._is_over:
                by = "sender, or the relay of this host," if self._opened.relayed else "sender"
                raise TransferError(f"the {by} has ended this update")
            if not self._control.segment.owner_alive():
                raise SegmentError("the sender died in the middle of the update")


def _has_shards(load_target: LoadTarget) -> bool:
    return load_target.memory is not None and load_target.memory.shares is not None


def _pin_for(memory: Memory, ring: OpenMemory) -> None:
    """Pin buckets on the host that a GPU reads, before the first copy."""
    device = next((t.device for t in memory.tensors if t.device.type == "cuda"), None)
    if device is not None:
        ring.pin(CudaDriver(device))
