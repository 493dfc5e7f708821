"""The bytes of one message, from a sender's ring or registered memory to a load target."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from weightsync.backends.base import LoadContext, Received
from weightsync.backends.ipc.payload import IpcInit, RingUpdate
from weightsync.cuda.events import OpenFence, wait_for
from weightsync.cuda.memory import OpenMemory
from weightsync.cuda.pinning import CudaDriver
from weightsync.errors import (
    ProtocolError,
    SegmentError,
    TransferError,
    TransferTimeout,
    VerificationError,
)
from weightsync.shm.ring import LOCAL, NETWORK, Control, RingReader, wait_until
from weightsync.specs import Manifest, TensorSpec
from weightsync.tensors import TORCH_DTYPES, from_bytes
from weightsync.weights import arena
from weightsync.weights.copy_plan import (
    CompiledUnit,
    CopyPlan,
    DeviceCopyUnit,
    DeviceShardRun,
    Memory,
    UnitCompiler,
    compiler_for,
)
from weightsync.weights.fingerprint import xxh3
from weightsync.weights.fused import FusedUnit, fuse, hashers, slot_reader
from weightsync.weights.layout import Chunk, CopyUnit, StreamLayout, TensorSlice
from weightsync.weights.packer import slot_views
from weightsync.weights.sink import LoadTarget, Verification, own_storage, refuse_kept, uses
from weightsync.wire.codec import decode_payload, manifest_from_wire
from weightsync.wire.messages import RegisteredUpdate


class Assembly:
    """Where tensors larger than a bucket are put together, one after the other.

    On the host it is kept from update to update, since memory that is touched for the first time
    costs ten times a warm copy; torch keeps a GPU's by itself.
    """

    def __init__(self) -> None:
        self._kept: torch.Tensor | None = None

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return `uint8[nbytes]` with anything in it, for one update. Raises TransferError."""
        if device.type != "cpu":
            with arena.no_room(nbytes, device):
                return torch.empty(nbytes, dtype=torch.uint8, device=device)
        if self._kept is None or self._kept.numel() < nbytes:
            self._kept = None  # before there are two
            self._kept = arena.allocate(nbytes, device)
        return self._kept[:nbytes]

    def clear(self) -> None:
        """Let the memory go."""
        self._kept = None


class HookFeeder:
    """Lends tensors to `landing.load`, in the manifest's order, each valid until that returns.

    A tensor larger than a bucket is put together in `assembly`, `uint8[plan.largest_cut_nbytes]`. A
    hook that kept a view is found out by its storage's use count: TransferError names the tensors.
    """

    def __init__(
        self,
        plan: StreamLayout,
        load_target: LoadTarget,
        reception: LoadContext,
        assembly: torch.Tensor | None = None,
    ) -> None:
        self._plan = plan
        self._load_target = load_target
        self._checks_views = reception.lends_views
        self._kept_advice = reception.kept_advice
        self._assembly = assembly
        self._next = 0

    def fingerprints(self, chunk: Chunk, slot: torch.Tensor, *, verify: bool) -> list[int]:
        """Fingerprint what arrived in a slot."""
        if not verify:
            return []
        if slot.device.type == "cpu":
            return [xxh3(view) for view in slot_views(self._plan, chunk, slot)]
        return slot_reader(self._plan, chunk, slot)()

    def deliver(self, chunk: Chunk, slot: torch.Tensor) -> None:
        """Lend every tensor that this chunk completes."""
        pairs: list[tuple[int, torch.Tensor]] = []
        for piece in self._plan.pieces(chunk.start, chunk.stop):
            spec = self._plan.manifest.specs[piece.index]
            begin = piece.start - chunk.start
            flat = slot[begin : begin + piece.nbytes]
            if piece.nbytes < spec.nbytes:
                if piece.begin == 0 and pairs:  # the tensor before it may lie in the assembly
                    self._lend(pairs, upto=piece.index)
                    pairs.clear()
                whole = self._assemble(piece, flat)
                if whole is None:
                    continue
                flat = whole
            pairs.append((piece.index, flat))
        self._lend(pairs, upto=pairs[-1][0] + 1 if pairs else self._next)
        _wait_for_copies(slot.device)

    def deliver_whole(self, memory: Memory) -> None:
        """Lend every tensor of registered memory at once."""
        self._lend(list(enumerate(memory.tensors)), upto=len(memory.tensors))
        for device in {tensor.device for tensor in memory.tensors}:
            _wait_for_copies(device)

    def finish(self) -> None:
        """Lend the tensors without bytes that no chunk completed."""
        self._lend([], upto=len(self._plan.manifest.specs))
        self._assembly = None

    def _lend(self, filled: Sequence[tuple[int, torch.Tensor]], *, upto: int) -> None:
        """Lend these tensors, and those without bytes that stand before `upto` in the manifest."""
        given = dict(filled)
        indices = range(self._next, upto)
        self._next = upto
        specs = self._plan.manifest.specs
        lent = [(specs[i].name, self._loan(specs[i], given.get(i))) for i in indices]
        if not lent:
            return
        counts = [uses(base) for _, base in lent]
        self._load_target.load(
            [
                (name, from_bytes(base, specs[i]))
                for i, (name, base) in zip(indices, lent, strict=True)
            ]
        )
        if self._checks_views:
            refuse_kept(lent, counts, self._kept_advice)

    def _loan(self, spec: TensorSpec, flat: torch.Tensor | None) -> torch.Tensor:
        if flat is None:
            flat = torch.empty(0, dtype=torch.uint8)
        elif flat.device.type == "cpu" and flat.numel():
            # A storage of its own for each, so that the count of its uses names this tensor.
            flat = own_storage(flat)
        elif flat.storage_offset() % TORCH_DTYPES[spec.dtype].itemsize:
            flat = flat.clone()  # tensors that lie one after another need not be aligned
        return flat

    def _assemble(self, piece: TensorSlice, flat: torch.Tensor) -> torch.Tensor | None:
        spec = self._plan.manifest.specs[piece.index]
        if self._assembly is None:
            raise ValueError("this plan cuts tensors; the lender needs a place to join them")
        whole = self._assembly[: spec.nbytes]
        whole[piece.begin : piece.begin + piece.nbytes].copy_(flat)
        return whole if piece.begin + piece.nbytes == spec.nbytes else None


def _wait_for_copies(device: torch.device) -> None:
    """Wait for what a hook has enqueued: the memory that it copies from is about to be released."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_LIVENESS_INTERVAL_S = 0.05
_SHOWN_RUNS = 2
"""How often readers of registered memory show how far they are; a sender that verifies follows."""
_JOINED_RUNS = 16
"""And others, for whoever looks on; or a hundred times an update, if that is more often."""
_CHECKED_STEPS = 8
_IN_PLACE = 4
"""Marks kept programs that read memory and write nothing; others are `ring` plus twice `verify`."""


@dataclass(frozen=True, slots=True)
class OpenedMemory:
    """What `init` opened: control, buckets, the unpacked path's tensors, and both plans."""

    info: IpcInit
    sender: str
    lease_s: float
    relayed: bool
    manifest: Manifest
    control: Control
    ring: OpenMemory
    slots: list[torch.Tensor]
    storages: list[OpenMemory]
    whole: StreamLayout
    chunked: StreamLayout
    registered: Memory | None
    fence: OpenFence | None = None


def chunked_plan(manifest: Manifest, info: IpcInit) -> StreamLayout:
    """The stream of `manifest` as a sender's ring cuts it."""
    return StreamLayout(manifest, bucket_nbytes=info.ring.slot_nbytes, run_nbytes=info.run_nbytes)


class IncomingTransfer:
    """One message's worth of bytes: packed or unpacked, into memory or through a hook."""

    def __init__(
        self,
        opened: OpenedMemory,
        info: RegisteredUpdate,
        reception: LoadContext,
        programs: dict[tuple[int, int, int], tuple[object, list[CopyPlan]]],
        assembly: Assembly,
    ) -> None:
        self._opened = opened
        self._info = info
        self._reception = reception
        self._programs = programs
        self._assembly = assembly
        self._control = opened.control
        self._got: list[int] = []
        self._wrong: list[CopyUnit] = []
        self._looked = 0.0
        ring_update = self._ring_update = decode_payload(info.payload, RingUpdate)
        if info.manifest is not None:
            manifest = manifest_from_wire(info.manifest)
            self._plan = chunked_plan(manifest, opened.info)
        else:
            self._plan = opened.chunked if ring_update.packed else opened.whole
        self._reader = RingReader(
            self._control,
            opened.info.reader,
            epoch=ring_update.epoch,
            base=ring_update.base,
            pace=NETWORK if opened.relayed else LOCAL,
        )

    def run(self) -> Received:
        """Move, compare, report."""
        self._await_epoch()
        load_target = self._reception.open_target(self._plan)
        if self._ring_update.packed:
            self._through_ring(load_target)
        else:
            self._from_storages(load_target)
        if self._wrong:
            raise VerificationError(names=self._wrong_names())
        return Received(self._plan.manifest, self._got, self._level(load_target))

    def _await_epoch(self) -> None:
        """A ring that is fed from another host may learn of an update after its readers."""
        control, epoch = self._control, self._ring_update.epoch
        fed = self._opened.relayed
        begun = not fed or wait_until(
            lambda: control.epoch >= epoch,
            check=self._check,
            timeout_s=self._opened.lease_s,
            progress=lambda: (0, control.writer_beat),
        )
        if not begun:
            raise TransferTimeout(
                f"the update of epoch {epoch} did not begin for {self._opened.lease_s:g} s; "
                f"the ring is at {control.epoch}"
            )
        if control.epoch != epoch:
            raise TransferError(
                f"the message is of epoch {epoch}, the ring is at {control.epoch}; this update "
                "is over"
            )

    def _through_ring(self, load_target: LoadTarget) -> None:
        lender = self._lender(load_target) if load_target.memory is None else None
        programs = None if lender else self._compile(load_target, ring=True)
        for j, chunk in enumerate(self._plan.chunks):
            self._check()
            slot = self._reader.wait(j, check=self._check, timeout_s=self._opened.lease_s)
            runs = self._plan.runs[chunk.first_run : chunk.last_run]
            expected = self._expected_of(j, len(runs))
            self._arrive(slot)
            if lender:
                buffer = self._opened.slots[slot]
                self._compare(
                    runs, lender.fingerprints(chunk, buffer, verify=self._info.verify), expected
                )
                self._reader.check_current(j)
                self._refuse_wrong()
                self._reception.touch()
                lender.deliver(chunk, buffer)
            elif programs:
                self._reception.touch()
                self._run(programs[j], runs, expected)
            self._reader.release(j)
        if lender:
            self._reception.touch()  # of a model whose tensors are all empty nothing was lent yet
            lender.finish()

    def _from_storages(self, load_target: LoadTarget) -> None:
        registered = self._opened.registered
        if registered is None:
            raise ProtocolError(
                "an unpacked update needs storages, and init gave none; init again with them"
            )
        self._arrive(None)
        if load_target.memory is None:
            lender = self._lender(load_target)
            if self._info.verify:
                read = hashers(self._compiled_in_place(registered))
                cut = range(0, len(read), _SHOWN_RUNS)
                got = self._each(
                    [self._plan.runs[i].start for i in cut],
                    [partial(_call_all, read[i : i + _SHOWN_RUNS]) for i in cut],
                )
                self._compare(self._plan.runs, got, self._published_table())
            self._refuse_wrong()
            self._reception.touch()
            lender.deliver_whole(registered)
        else:
            self._reception.touch()
            programs = self._compile(load_target, ring=False)
            got = self._each([p.start for p in programs], [p.run for p in programs])
            _settle(programs)
            self._compare(self._plan.runs, got, self._published_table())
        if self._control.epoch != self._ring_update.epoch:
            raise TransferError("the sender went on to another update while this one was read")

    def _arrive(self, slot: int | None) -> None:
        """Before anything reads a slot, or registered memory: the sender's GPU may be at it yet."""
        if self._opened.fence is not None:
            self._opened.fence.arrive(
                slot,
                check=self._check,
                beat=lambda: self._control.writer_beat,
                timeout_s=self._opened.lease_s,
            )

    def _lender(self, load_target: LoadTarget) -> HookFeeder:
        """What lends to a hook; memory for large tensors is there before anything is touched."""
        place = None
        if nbytes := self._plan.largest_cut_nbytes:
            # What the model needs is kept; a block may bring tensors larger than any of its.
            kept = nbytes <= self._opened.chunked.largest_cut_nbytes
            assembly = self._assembly if kept else Assembly()
            place = assembly.take(nbytes, self._opened.slots[0].device)
        return HookFeeder(self._plan, load_target, self._reception, place)

    def _each(self, starts: Sequence[int], steps: Sequence[Callable[[], list[int]]]) -> list[int]:
        """Take steps through registered memory, and let the sender see how far this is."""
        got: list[int] = []
        reader = self._opened.info.reader
        before = self._control.loaded(reader)
        for i, (start, step) in enumerate(zip(starts, steps, strict=True)):
            if i % _CHECKED_STEPS == 0:
                self._check()
            self._control.load(reader, before + start)
            got += step()
        self._control.load(reader, before + self._plan.nbytes)
        return got

    def _run(self, program: CopyPlan, runs: list[CopyUnit], expected: list[int]) -> None:
        got = program.run()
        _settle([program])
        self._compare(runs, got, expected)

    def _compiled_in_place(self, registered: Memory) -> Sequence[CompiledUnit]:
        """What fingerprints registered memory where it lies, before a hook is given it."""
        key = (id(self._plan), id(registered), _IN_PLACE)
        kept = self._programs.get(key)
        if kept is None:
            compiler = UnitCompiler(self._plan, registered, registered)
            program = CopyPlan.of(0, [compiler.compile(r) for r in self._plan.runs], verify=True)
            kept = self._programs[key] = ((self._plan, registered), [program])
        return kept[1][0].runs

    def _compile(self, load_target: LoadTarget, *, ring: bool) -> list[CopyPlan]:
        """Plan a program for each chunk, or some for registered memory as often as it is shown."""
        memory = load_target.memory
        if memory is None:
            raise TransferError("this landing has no memory of its own")
        verify = self._info.verify
        key = (id(self._plan), id(memory), int(ring) + 2 * verify)
        kept = self._programs.get(key)
        if kept is not None:
            return kept[1]
        registered = None if ring else self._opened.registered
        compiler = compiler_for(self._plan, memory, registered)
        slots = self._opened.slots
        if ring and slots[0].device.type == "cpu":
            _pin_for(memory, self._opened.ring)
        programs: list[CopyPlan] = []
        for j, chunk in enumerate(self._plan.chunks):
            slot = slots[j % len(slots)] if ring else None
            runs = self._plan.runs[chunk.first_run : chunk.last_run]
            compiled = fuse([compiler.compile(r, slot, chunk.start) for r in runs], verify=verify)
            step = len(runs) if ring else self._shown_runs
            programs += [
                CopyPlan.of(runs[i].start, compiled[i : i + step], verify=verify)
                for i in range(0, len(runs), step)
            ]
        if self._info.manifest is None:
            # The plan and the memory ride along: while they live, their ids are theirs alone.
            self._programs[key] = ((self._plan, memory), programs)
        return programs

    @property
    def _shown_runs(self) -> int:
        """After how many runs of registered memory this shows how far it is."""
        if self._info.verify:
            return _SHOWN_RUNS
        return min(max(_SHOWN_RUNS, len(self._plan.runs) // 100), _JOINED_RUNS)

    def _expected_of(self, j: int, count: int) -> list[int]:
        if not self._info.verify:
            return []
        room = self._control.entries // self._control.slots
        return self._control.fingerprints(j % self._control.slots * room, count)

    def _published_table(self) -> list[int]:
        """Wait for the sender's fingerprints of registered memory."""
        if not self._info.verify:
            return []
        count = len(self._plan.runs)
        wanted = self._ring_update.base + count
        ready = wait_until(
            lambda: self._control.table_ready >= wanted,
            check=self._check,
            timeout_s=self._opened.lease_s,
            progress=lambda: (0, self._control.writer_beat),
        )
        if not ready:
            raise TransferTimeout(
                f"the sender published no fingerprints for {self._opened.lease_s:g} s"
            )
        return self._control.fingerprints(0, count)

    def _compare(self, runs: Sequence[CopyUnit], got: list[int], expected: list[int]) -> None:
        self._got += got
        if got != expected:
            pairs = zip(runs, got, expected, strict=True)
            self._wrong += [run for run, have, want in pairs if have != want]

    def _refuse_wrong(self) -> None:
        """Before a hook is given anything: it cannot take it back."""
        if self._wrong:
            raise VerificationError(names=self._wrong_names())

    def _wrong_names(self) -> list[str]:
        return list(dict.fromkeys(name for run in self._wrong for name in self._plan.names(run)))

    def _level(self, load_target: LoadTarget) -> Verification:
        if not self._info.verify:
            return "none"
        reads_back = load_target.memory is not None and self._same_side(load_target.memory)
        return self._reception.verification if reads_back else "arrived"

    def _same_side(self, memory: Memory) -> bool:
        """A slot on the host that a GPU reads from is fingerprinted itself, not what was held."""
        on_gpu = any(t.device.type != "cpu" for t in memory.tensors)
        return not (on_gpu and self._opened.slots[0].device.type == "cpu")

    def _check(self) -> None:
        self._reception.check()
        now = time.monotonic()
        if now - self._looked > _LIVENESS_INTERVAL_S:
            self._looked = now
            if self._control.epoch > self._ring_update.epoch:
                raise TransferError("the sender has ended this update")
            if not self._control.segment.owner_alive():
                raise SegmentError("the sender died in the middle of the update")


def _pin_for(memory: Memory, ring: OpenMemory) -> None:
    """Pin buckets on the host that go to a GPU, before the first copy."""
    device = next((t.device for t in memory.tensors if t.device.type == "cuda"), None)
    if device is not None:
        ring.pin(CudaDriver(device))


def _call_all(calls: Sequence[Callable[[], int]]) -> list[int]:
    return [call() for call in calls]


def _settle(programs: Sequence[CopyPlan]) -> None:
    """Wait for copies that a GPU still makes; the sender may overwrite their source afterwards."""
    if not programs or programs[0].runs[0].on_host:
        return
    runs = [run for program in programs for run in program.runs]
    if isinstance(runs[0], FusedUnit):
        for run in runs:
            if isinstance(run, FusedUnit) and run.index == 0:
                run.wait()
        return
    moving = [run.gpus() for run in runs if isinstance(run, DeviceCopyUnit | DeviceShardRun)]
    wait_for(set[torch.device]().union(*moving))
