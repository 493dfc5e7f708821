"""The worker of one rank: its source, and the trainer engines that its receivers read."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from msgspec import structs

from weightsync.backends.base import (
    Backend,
    Handshake,
    HeldMemory,
    Reader,
    ReaderChanges,
    ReaderWatch,
    Round,
    TrainerWeightTransferEngine,
    TransferOptions,
    TransferProgress,
    check_contract,
    check_plain,
    expect,
    naming,
    part,
)
from weightsync.backends.registry import endpoints, get_backend
from weightsync.cuda.handles import device_keys
from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    ProtocolError,
    VerificationError,
    shorten,
)
from weightsync.profiling import scope
from weightsync.ranks.comm import Cancellation, CancelledError, RankComm
from weightsync.ranks.commands import (
    LINES_DIGEST,
    AnyCommand,
    BeforeBegin,
    Begin,
    ChangeEstimate,
    CheckMoved,
    CommandResult,
    Connect,
    DeltaOffer,
    DeltaTask,
    End,
    KeepAlive,
    Open,
    RankInfo,
    ReadersByRank,
    TakeSnapshot,
    Transfer,
    Withdraw,
    decode_before_begin,
    encode,
)
from weightsync.ranks.replicas import CheckReplicas, ReplicaCheck
from weightsync.ranks.sources import (
    CollectiveSource,
    SourceOfUpdate,
    join_parts,
    join_snapshots,
    source_device,
)
from weightsync.ranks.stop import StopSignal
from weightsync.ranks.streams import StreamPlan, StreamSource, encode_held
from weightsync.ranks.update_source import (
    DeltaUpdate,
    ModelComparison,
    PairsUpdate,
    RecordedUpdate,
    UpdateSource,
)
from weightsync.runtime.interpreter_exit import TorchCalls
from weightsync.shm.wait import Heartbeat
from weightsync.specs import owner_of
from weightsync.tensors import TORCH_DTYPES, contiguous_bytes
from weightsync.weights.copying.fingerprint import parts_of
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.copying.rank_streams import RankStream, met_by, wants_of
from weightsync.weights.copying.shards import Slice
from weightsync.weights.deltas.change_log import ChangeLog
from weightsync.weights.lines.memory import count_lines_of, why_no_kernels
from weightsync.weights.sources.base import (
    NamedTensors,
    Snapshot,
    SourceExtras,
    SplitSource,
    WeightSource,
)
from weightsync.weights.sources.finite import CheckFinite
from weightsync.weights.sources.wrapping import innermost
from weightsync.wire.codec import manifest_to_wire
from weightsync.wire.messages import SharedMemoryUsage, TensorPart
from weightsync.wire.offers import WantsInfo

logger = logging.getLogger(__name__)

_CAST_NBYTES = 4 << 20
"""Most memory for the casts of boxes that are summed up: they were sent from somewhere else."""


class _Known(NamedTuple):
    """What this rank sends, until the next update: see `note_written`.

    `boxes` has the indices of a model's tensor in the stable ones, None where these are the model's
    own. `counting` has tensors on which torch counts writes to those, by their names, or by that of
    the parameter that they are in.
    """

    stable: list[torch.Tensor]
    boxes: Mapping[int, Sequence[int]] | None
    counting: Mapping[str, Sequence[torch.Tensor]]

    def places_of(self, index: int) -> Sequence[int]:
        """Return the indices in the stable tensors of a model's tensor."""
        return (index,) if self.boxes is None else self.boxes.get(index, ())

    def counting_of(self, name: str) -> Sequence[torch.Tensor]:
        """Return the further tensors on which torch counts writes to a model's tensor."""
        owner = name if name in self.counting else owner_of(name, self.counting)
        return () if owner is None else self.counting[owner]


class RankWorker:
    """Executes rank 0's commands on one rank. `engines` has the engines by backend, bases first.

    `stop`, when set, cancels the call that is executed: a transfer ends on all ranks, and no
    further command uses this rank's source. `pairs` are the tensors of the next Begin
    that sends other tensors than the model's. `fault`, when set, makes every further step fail,
    because this rank's caller left the update. `reading` has the readers of the last update, by
    backend; their signs of life are reported until it is finished. `calls` are its commands.
    `stream_lines` are the lines of the streams of all ranks, of the last plan that was opened.
    `may_cast` are the tensors that receivers keep in unlike dtypes and cast themselves, `casts` the
    numbers of those that the source casts, for the report.
    `is_apart`: no rank waits for another one in this update, and `late` is the error of this one.
    `address` is that of this host for all readers, where it is known better here than on rank 0.
    """

    address: str | None = None
    _places: dict[str, int] | None = None
    _known: _Known | None = None

    def __init__(
        self,
        source: WeightSource,
        options: TransferOptions,
        ranks: RankComm,
        backends: Sequence[Backend],
        check_finite: CheckFinite = "off",
        check_replicas: CheckReplicas = "off",
    ) -> None:
        self._check_finite: CheckFinite = check_finite
        self._ranks = ranks
        described = innermost(source)
        if isinstance(described, SplitSource):
            join_parts(described, ranks)
        self._snapshot: Snapshot | None = None
        self._copied: SourceOfUpdate | None = None
        self._copied_stream: StreamSource | None = None
        self._collective = CollectiveSource(source, ranks) if ranks.size > 1 else None
        self._original = SourceOfUpdate(source, self._collective)
        self.replicas = ReplicaCheck(ranks, check_replicas)
        names = [spec.name for spec in described.manifest.specs]
        self._holdings = SourceExtras(source).holdings() if ranks.size > 1 else None
        self._comparison = ModelComparison(
            self.replicas, self._original, self._collective, names, self._holdings
        )
        self.rounded = SourceExtras(source).rounded
        self.source = SourceOfUpdate(source, self._collective, check_finite)
        self._given = source
        self.may_cast: frozenset[str] = frozenset()
        self.casts: Mapping[str, int] = {}
        self.plan = StreamPlan(why_not="one rank sends")
        self._model_layout: StreamLayout | None = None
        self._cuts: tuple[StreamPlan, list[WantsInfo], StreamPlan] | None = None
        self._stream: SourceOfUpdate | None = None
        self._own_boxes: RankStream | None = None
        self._wants: list[WantsInfo] = []
        self._sums = False
        self._parts: dict[str, list[TensorPart]] = {}
        self._streamed: StreamSource | None = None
        self._options = replace(options, device=source_device(source))
        self._backends = {backend.name: backend for backend in backends}
        self.sender_id = secrets.token_hex(8)
        self.engines: dict[str, TrainerWeightTransferEngine] = {}
        self.reading: dict[str, list[int]] = {}
        self.pairs: NamedTensors | None = None
        self.stop = StopSignal()
        self._used: StopSignal | None = None
        self.fault: BaseException | None = None
        self._check: Callable[[], None] = lambda: None
        self._heartbeat: Heartbeat | None = None
        self._handshakes: dict[str, Handshake] = {}
        self._packed: bool | None = None
        self._passes: list[str] = []
        self._changes: ChangeLog | None = None
        self._logged_stream = self._stream_digest = ""
        self.stream_lines: list[int] = []
        self._update: UpdateSource | None = None
        self.is_apart = self._transfers = self._has_failed = False
        self.late: BaseException | None = None
        self._senders: set[int] = set()
        self.calls = TorchCalls()

    def rank_info(self) -> RankInfo:
        """Return the facts about this rank."""
        facts, unusable = endpoints(self._backends.values(), self._options.device)
        return RankInfo(
            keys=device_keys(self._options.device),
            stable=not self.source.is_made,
            sender_id=self.sender_id,
            backends=facts,
            unusable=unusable,
        )

    def describe_holdings(self) -> bytes:
        """Return what this rank tells the others about the boxes that it holds."""
        host = device_keys(self._options.device)[-1]
        return encode_held(self._holdings, self.source.manifest, host)

    @property
    def sent(self) -> SourceOfUpdate:
        """The source that the engines read: the stream of this rank, or the model."""
        return self._stream or self.source

    def backend(self, name: str) -> Backend:
        """Return a backend of this sender, or one that these require."""
        return self._backends.get(name) or get_backend(name)

    def do(  # noqa: PLR0911  # one for each command
        self, command: AnyCommand, check: Callable[[], None]
    ) -> CommandResult:
        """Execute one command, and return its result. `check` raises when a transfer must stop.

        Raises TransferCancelled while the interpreter exits, except in the main thread, and after a
        cancellation, where the command would use the source.
        """
        self._check = check
        name = type(command).__name__.lower()
        with self.calls.inside(), self._source_used(command), scope(f"weightsync {name}"):
            match command:
                case Open():
                    return self._open(command)
                case Connect():
                    return self._connect(command)
                case CheckMoved():
                    return self._check_moved()
                case TakeSnapshot():
                    return self._take_snapshot(command)
                case Begin():
                    return self._begin(command)
                case Transfer():
                    return self._transfer()
                case KeepAlive():
                    return self._keep_alive(command)
                case End():
                    return self._end_of_all()
                case Withdraw():
                    self.close()
                    return CommandResult()
                case _:
                    raise ConfigError(f"{type(command).__name__} is no command for a rank")

    @contextmanager
    def _source_used(self, command: AnyCommand) -> Iterator[None]:
        """Count the source as used: by an update from Begin to End, or by one other command.

        To open and to close engines moves its tensors; KeepAlive leaves them alone.
        """
        # With several ranks these two check that inside their step, in which the ranks meet.
        check = self._collective is None or not isinstance(command, Begin | TakeSnapshot)
        match command:
            case KeepAlive() | Transfer():
                yield
            case Begin():
                self._end_use()  # of an update whose End never came, because a rank was lost
                self.stop.begin_use(check=check)
                self._used = self.stop
                yield
            case End():
                try:
                    yield
                finally:
                    self._end_use()
            case _:
                stop = self.stop
                stop.begin_use(check=check)
                try:
                    yield
                finally:
                    stop.end_use()

    def _end_use(self) -> None:
        used, self._used = self._used, None
        if used is not None:
            used.end_use()

    def progress(self) -> dict[str, TransferProgress]:
        """Return the progress of the update that has begun, by backend, for observers."""
        found = {name: part(self.engines[name], ReaderWatch).progress() for name in self.reading}
        known = {name: progress for name, progress in found.items() if progress is not None}
        if self._stream is None:
            return known
        layout = self._model_layout = self._model_layout or StreamLayout(self.source.manifest)
        return {name: _OfModel(progress, layout) for name, progress in known.items()}

    def usage(self, targets: Mapping[tuple[str, int], str]) -> list[SharedMemoryUsage]:
        """Return the memory that this rank shares; `targets` are its readers' names, by backend."""
        engines = dict(self.engines)
        names: dict[str, dict[int, str]] = {name: {} for name in engines}
        for (backend, reader), target in targets.items():
            names.setdefault(backend, {})[reader] = target
        for name, engine in engines.items():
            for base in self.backend(name).requires:
                relays = part(engine, ReaderChanges).base_readers(list(names[name]))
                names[base].update(dict.fromkeys(relays, "other hosts"))
        return [
            entry
            for name, engine in engines.items()
            for entry in part(engine, HeldMemory).usage(names[name])
        ]

    def close(self) -> None:
        """Free everything, even where an engine raises. Idempotent."""
        engines, self.engines = self.engines, {}
        heartbeat, self._heartbeat = self._heartbeat, None
        handshakes, self._handshakes = self._handshakes, {}
        self.reading, self._known = {}, None
        self.sent.refresh()
        with ExitStack() as last:
            for engine in engines.values():
                last.callback(_named, engine, "close")
            if heartbeat is not None:
                last.callback(heartbeat.close)
            for handshake in handshakes.values():
                last.callback(handshake.close)
            self.sent.end_watch()
            self._stream = self._streamed = self._own_boxes = None

    def expect_finalizer(self) -> None:
        """Notify the engines that the garbage collector closes this worker next."""
        for engine in self.engines.values():
            part(engine, HeldMemory).expect_finalizer()

    def _open(self, command: Open) -> CommandResult:
        self.close()
        self._packed = command.packed
        self._comparison.sends_streams = bool(command.streams)
        self._comparison.has_replicas = self.plan.has_replicas
        self._stream_digest = command.streams
        if command.streams:
            self._stream = self._open_stream(command)
        elif self._copied not in (None, self._original) and self._snapshot is not None:
            # The copies are of the boxes of each rank, and one rank sends the model from now on.
            whole = join_snapshots(self._snapshot, self.plan.streams, self._ranks)
            self._send_whole_snapshot(whole)
        self._senders = {rank for paths in command.paths.values() for rank in paths}
        options = replace(
            self._options,
            packed=command.packed,
            bucket_nbytes=command.bucket_nbytes,
            num_buckets=command.num_buckets,
            streams=self._ranks.size if command.streams else 1,
            turn=self.plan.hosts[self._ranks.rank] if command.streams else 0,
        )
        for name in sorted(command.paths, key=lambda name: bool(self.backend(name).requires)):
            path = command.paths[name].get(self._ranks.rank)
            if path is None:
                continue
            backend = self.backend(name)
            bases = {base: self.engines[base] for base in backend.requires if base in self.engines}
            if len(bases) < len(backend.requires):
                raise ConfigError(
                    f"backend {name!r} requires {', '.join(backend.requires)}; a backend that is "
                    "required must itself require none"
                )
            method = f"backend {name!r}: trainer_engine()"
            with naming(method, BackendUnavailableError):
                engine = backend.trainer_engine(self.sent, path, options, bases)
            self.engines[name] = expect(engine, TrainerWeightTransferEngine, f"{method} returned")
            check_contract(type(engine), TrainerWeightTransferEngine)
        if self.engines:
            self._heartbeat = Heartbeat(self._beat)
        return CommandResult(extra_nbytes=self._extra_nbytes())

    def cut_plan(self, wants: Sequence[WantsInfo]) -> StreamPlan:
        """Return the plan whose boxes are cut where the receivers' are; those of a copy are not."""
        if self._snapshot is not None:
            return self.plan
        known = self._cuts
        if known is None or known[0] is not self.plan or known[1] != wants:
            known = self._cuts = self.plan, list(wants), self.plan.cut(wants)
        return known[2]

    def _open_stream(self, command: Open) -> SourceOfUpdate:
        """Return the source of this rank's stream. Raises ProtocolError for another plan."""
        plan = self.cut_plan(command.wants)
        digest = plan.digest
        if digest != command.streams:
            raise ProtocolError(
                f"this rank planned which rank sends what as {digest or 'nothing'}, and rank 0 as "
                f"{command.streams}; connect again"
            )
        self.stream_lines = [count_lines_of(stream.manifest) for stream in plan.streams]
        self._own_boxes, self._wants = plan.streams[self._ranks.rank], command.wants
        if self._snapshot is not None:
            return SourceOfUpdate(self._snapshot, None, self._check_finite)
        source = self._streamed = self._stream_source(plan)
        source.gather(self._ranks.agree)  # so that their memory is known
        return SourceOfUpdate(source, None, self._check_finite)

    def _beat(self) -> None:
        for engine in list(self.engines.values()):
            try:
                part(engine, ReaderWatch).beat()
            except Exception:  # the heartbeats of the other engines go on
                logger.warning("%s.beat() failed", type(engine).__name__, exc_info=True)

    def _extra_nbytes(self) -> int:
        engines: int = sum(_of_memory(engine, "extra_nbytes") for engine in self.engines.values())
        changes = self._changes.nbytes if self._changes is not None else 0
        return engines + changes + (self._snapshot.nbytes if self._snapshot else 0)

    def _connect(self, command: Connect) -> CommandResult:
        """Take one step of a handshake, on a rank that has readers in it."""
        rank, name = self._ranks.rank, command.backend
        going_on = command.replies is not None and not command.over
        if going_on and rank not in (command.replies or {}):
            return CommandResult()  # its last round waits for those of other ranks, or it has ended
        try:
            if command.replies is None and rank in command.readers:
                self.end_handshake(name)
                if rank:
                    changes = part(self.engines[name], ReaderChanges)
                    for reader in command.removed:
                        changes.remove_reader(reader)
                    if command.using:
                        changes.unready(command.using)
                readers = self._with_wants(command.readers[rank], command.wants)
                handshake = self.engines[name].handshake(readers, command.generation)
                method = f"backend {name!r}: handshake()"
                self._handshakes[name] = expect(handshake, Generator, f"{method} returned")
                return CommandResult(round=_checked_round(name, next(handshake)))
            replies = command.replies or {}
            if name in self._handshakes and rank in replies:
                step = self._handshakes[name].send(replies[rank])
                if going_on:
                    return CommandResult(round=_checked_round(name, step))
            self.end_handshake(name)
            return CommandResult()
        except StopIteration:
            self._handshakes.pop(name, None)
            return CommandResult()

    def _with_wants(self, readers: Sequence[Reader], wants: Mapping[int, int]) -> list[Reader]:
        """Return readers with what they want of this rank's stream."""
        if self.address is not None:
            readers = [structs.replace(one, local_address=self.address) for one in readers]
        stream = self._own_boxes
        if stream is None or not wants:
            return list(readers)
        met: dict[int, list[int]] = {}
        for place in set(wants.values()):
            met[place] = met_by(stream, wants_of(self._wants[place], stream.model, "a receiver"))
        return [
            structs.replace(reader, wants=met[wants[reader.index]])
            if reader.index in wants
            else reader
            for reader in readers
        ]

    def end_handshake(self, name: str) -> None:
        """End a handshake of this rank that is not complete, if there is one."""
        handshake = self._handshakes.pop(name, None)
        if handshake is not None:
            handshake.close()

    def _readers_of(self, by_rank: ReadersByRank) -> dict[str, list[int]]:
        """Return the readers of each engine of this rank, those of engines built on it included."""
        reading: dict[str, list[int]] = {}
        for name, engine in reversed(self.engines.items()):
            readers = by_rank.get(name, {}).get(self._ranks.rank, [])
            reading[name] = [*readers, *reading.get(name, [])]
            for base in self.backend(name).requires:
                reading.setdefault(base, []).extend(
                    part(engine, ReaderChanges).base_readers(readers)
                )
        return {name: reading[name] for name in self.engines if reading[name]}

    def note_written(self, names: Iterable[str] | None) -> None:
        """Have the engines fingerprint tensors that have the values of the next update.

        None are all tensors; with several ranks, what this one sends of them. Does nothing for
        sources that are made or copied for each update. Raises ConfigError for names that are not
        sent.
        """
        if self._places is None:
            specs = self.source.manifest.specs
            self._places = {spec.name: index for index, spec in enumerate(specs)}
        named = list(self._places if names is None else names)
        unknown = [name for name in named if name not in self._places]
        if unknown:
            raise ConfigError(
                f"{len(unknown)} tensors are not among those that are sent: {shorten(unknown)}"
            )
        source, streamed = self.sent, self._streamed
        gathers = self._collective is not None and streamed is None
        if gathers or self._snapshot is not None or source.is_made:
            return
        if not self.engines:  # released: nothing would drop what is known of the tensors
            return
        if self._known is None:  # a module of thousands of tensors is inspected once for an update
            boxes: dict[int, list[int]] | None = None
            if streamed is not None:
                boxes = {}
                for i, index in enumerate(streamed.stream.indices):
                    boxes.setdefault(index, []).append(i)
            self._known = _Known(source.stable_tensors() or [], boxes, source.counting())
            source.refresh()
        known = self._known
        if not known.stable:
            return
        read = [(i, n) for n in named for i in known.places_of(self._places[n])]
        tensors = {i: known.stable[i] for i, _ in read}
        counting = {i: known.counting_of(name) for i, name in read} if known.counting else {}
        for engine in self.engines.values():
            part(engine, HeldMemory).read_ahead(tensors, counting)

    def _check_moved(self) -> CommandResult:
        """Return whether registered memory has moved. Raises in a block that sent too much."""
        self._check_own()
        if self.pairs is not None:
            self.pairs = None
            raise ProtocolError(
                "this rank sends tensors that rank 0 does not; every rank has to call send() as "
                "often as rank 0"
            )
        self.sent.refresh()
        return CommandResult(moved=self._has_moved)

    @property
    def _has_moved(self) -> bool:
        return any(part(engine, HeldMemory).needs_init for engine in self.engines.values())

    def _take_snapshot(self, command: TakeSnapshot) -> CommandResult:
        """Copy the source's tensors; the first time, the copy takes the place of the source."""
        snapshot, copied = self._snapshot, self._copied
        if snapshot is None or copied is None:
            self.close()
            copied, self._copied_stream = self._original, None
            if command.streams:
                stream = self._copied_stream = self._stream_source(self.plan)
                stream.gather(self._ranks.agree)  # so that their memory is known
                copied = SourceOfUpdate(stream, None)
            snapshot = Snapshot(copied.manifest)
        copied.refresh()
        self._comparison.begin()
        with ExitStack() as stack:
            if self._snapshot is None:  # nobody can use it, and the error's frames would keep it
                stack.callback(snapshot.drop)
            self._fill(snapshot, copied)
            stack.pop_all()
        self._comparison.end()
        if self._snapshot is None:
            self._snapshot, self._copied = snapshot, copied
            if not command.streams:
                self._send_whole_snapshot(snapshot)
        return CommandResult(extra_nbytes=snapshot.nbytes)

    def _fill(self, snapshot: Snapshot, copied: SourceOfUpdate) -> None:
        """Copy the source's tensors, in a step of all ranks."""
        with self._step():
            if self._copied_stream is not None and self._collective is not None:
                self._copied_stream.gather(self._collective.meet)
            copied.watch(None, reads=True)
            try:
                self._comparison.note()
                snapshot.take(copied, self._check_all)
                snapshot.merged = copied.take_merged()
            finally:
                changed = copied.end_watch()
            if changed:
                snapshot.drop()
                raise VerificationError(
                    f"the source changed while it was copied: {len(changed)} tensors: "
                    f"{shorten(changed)}; send again when nothing else changes it",
                    names=changed,
                )

    def _send_whole_snapshot(self, snapshot: Snapshot) -> None:
        """Send a copy of the whole model, as one rank would, from now on."""
        self._snapshot, self._copied = snapshot, self._original
        self._copied_stream = None
        self.plan = StreamPlan(why_not="send_async() sends a copy of the whole model")
        self.source = SourceOfUpdate(snapshot, None, self._check_finite)

    def _stream_source(self, plan: StreamPlan) -> StreamSource:
        """Return the source of the boxes that this rank sends."""
        if self._holdings is None or not plan.streams:
            raise ProtocolError("this rank has no stream of its own; connect again")
        return StreamSource(self._given, plan, self._ranks.rank, self._holdings)

    def drop_snapshot(self) -> None:
        """Free the copy of the source's tensors; the next update makes another one."""
        if self._snapshot is not None:
            self._snapshot.drop()
            self.source.refresh()

    def _before_begin(self, command: Begin, offer: DeltaOffer | None) -> BeforeBegin:
        """Return what an update has to know before it begins; of all ranks where they need it."""
        found = BeforeBegin(
            moved=command.checks_memory and self._has_moved,
            estimate=None if offer is None else self._estimate(offer.task),
        )
        if command.apart:  # it is in the reply, and no rank transfers where they differ
            return found
        # Where one rank sends, and the others gather nothing for it, it decides by itself.
        if self._collective is None or (len(self._senders) <= 1 and not self.sent.is_made):
            return found
        return BeforeBegin.of_all(
            map(decode_before_begin, self._collective.exchange(encode(found)))
        )

    def _own_offer(self, offer: DeltaOffer | None) -> DeltaOffer | None:
        """Return the offer of a delta for what this rank sends: the model, or its own stream."""
        if offer is None or self._stream is None:
            return offer
        return offer.of_lines(self.stream_lines[self._ranks.rank])

    def _estimate(self, task: DeltaTask) -> ChangeEstimate | None:
        """Return about how much has changed; None on a rank that no receiver reads."""
        if not self.engines:
            return None
        if cannot := why_no_kernels():
            return ChangeEstimate(cannot=cannot)
        changes = self._log_of_changes(keeps=task.keeps)
        return ChangeEstimate(
            share=changes.changed_share(self.sent.tensors_to_sample()),
            marked=changes.lines_since(task.bases),
            are_newest=changes.marks_since(task.bases) is None,
        )

    def _log_of_changes(self, *, keeps: bool = False) -> ChangeLog:
        """Return the log of what this rank sends, with a copy of the stream if it `keeps` one.

        A new one where the rank sends other boxes than before.
        """
        known, same = self._changes, self._logged_stream == self._stream_digest
        if known is None or known.keeps < keeps or not same:
            known = self._changes = ChangeLog(StreamLayout(self.sent.manifest), keeps=keeps)
            self._logged_stream = self._stream_digest
        return known

    @property
    def sums_for(self) -> str:
        """The plan of which the sums over all ranks are compared with those of receivers.

        "" for none: a source that makes its tensors for each update has them no more when they are
        sent.
        """
        return self._stream_digest if self.plan.stays else ""

    @property
    def lines_digest(self) -> str:
        """The key of the fingerprint of the lines that this rank sends, among the digests."""
        return f"{LINES_DIGEST} {self._stream_digest}" if self._stream_digest else LINES_DIGEST

    def _pairs_update(self) -> PairsUpdate:
        given, self.pairs = self.pairs, None
        reads = bool(self.reading)
        return PairsUpdate(self.sent, given or (), self._ranks, self.replicas, is_read=reads)

    def _model_update(self, task: DeltaTask | None) -> UpdateSource:
        """Return what an update of the model sends: all of it, or a delta."""
        reads = bool(self.reading)
        # A snapshot was compared when it was taken.
        comparison = self._comparison if self._snapshot is None else None
        if task is None or (not task.bases and why_no_kernels()):
            return UpdateSource(self.sent, comparison, is_read=reads)
        log = partial(self._log_of_changes, keeps=task.keeps)
        if not task.bases:
            return RecordedUpdate(
                self.sent, comparison, is_read=reads, task=task, log=log, lines=self.lines_digest
            )
        return DeltaUpdate(
            self.sent,
            comparison,
            is_read=reads,
            task=task,
            log=log,
            lines=self.lines_digest,
            one_pass=len(self._passes) == 1,
        )

    @property
    def can_be_apart(self) -> bool:
        """Whether the next update of the model needs no agreement between Begin and End.

        Its ranks send streams, gather nothing, and compare no replicas.
        """
        return (
            self._stream is not None
            and not (self._streamed is not None and self.plan.gathered)
            and not (self._snapshot is None and self._comparison.is_next)
        )

    def transfer_apart(self, check: Callable[[], None]) -> None:
        """Transfer after a Begin `apart`; an error is also kept for the reply to the End.

        Not one of a check of rank 0, whose caller has it, nor that of a rank that cancelled it.
        """
        try:
            self.do(Transfer(), check)
        except BaseException as exc:
            if not isinstance(exc, CancelledError):
                if self._ranks.rank > 0 or self.is_own_error(exc):
                    self.late = exc
                self._cancel_apart()
            raise

    def skip_transfer(self, error: BaseException) -> None:
        """Leave a transfer `apart` that this rank has not begun, by an interrupt before."""
        if not self._transfers:
            self.late = error
            self._cancel_apart()

    def _cancel_apart(self) -> None:
        """Cancel the transfer on the other ranks, and on receivers that wait for this one.

        Wherever the interrupt came that ended it here.
        """
        if not self._has_failed:
            self._has_failed = True
            self._cancel_engines()
        if self._collective is not None:
            self._collective.cancel_next()

    def _cancel_engines(self) -> None:
        for name in self.reading:
            try:
                self.engines[name].cancel()
            except Exception:  # the error of the transfer counts
                logger.exception("backend %s: cancel() failed", name)

    def _begin(self, command: Begin) -> CommandResult:
        """Start an update: watch its tensors, and begin it on the engines that have readers."""
        self.is_apart, self._transfers, self.late = command.apart, False, None
        self._known = None
        self._has_failed = False
        self._sums, self._parts = command.sums, {}
        self.reading = self._readers_of(command.readers)
        self._passes = [name for name in command.readers if not self.backend(name).requires]
        self.sent.refresh(passes=len(self._passes))
        found = BeforeBegin()
        update: UpdateSource | None = None
        self._update = None
        if command.pairs:
            self._update = update = pairs = self._pairs_update()
            pairs.prepare(self._step)
        updates: dict[str, Any] = {}
        with self._step(apart=command.apart):
            if update is None:
                if self._streamed is not None and self._collective is not None:
                    self._streamed.gather(self._collective.meet)  # the estimate looks at them
                offer = self._own_offer(command.offer)
                self.sent.watch(None, reads=bool(self.reading))
                found = self._before_begin(command, offer)
                if found.moved:
                    self.sent.end_watch()
                    self.reading = {}
                    return CommandResult(moved=True)
                task = command.delta
                if offer is not None and found.estimate is not None:
                    task, _ = offer.decide(found.estimate)
                update = self._update = self._model_update(task)
            source = update.open()
            for name in self._in_order():
                readers = self.reading.get(name)
                if readers:
                    verify = command.verify and update.verifies
                    changes = part(self.engines[name], ReaderChanges)
                    changes.expect_delta(follows=isinstance(update, RecordedUpdate))
                    payload = self.engines[name].begin(readers, verify=verify, source=source)
                    updates[name] = _checked_payload(name, payload, readers)
                elif self._gathers_in(name, update, packed=False):
                    self.sent.drain(self._check_all)
        manifest = update.manifest if updates else None
        return CommandResult(
            updates=updates,
            estimate=found.estimate,
            manifest=None if manifest is None else manifest_to_wire(manifest),
            delta=update.terms,
            packed={name: part(self.engines[name], HeldMemory).packed for name in updates},
        )

    def _transfer(self) -> CommandResult:
        """Transfer every byte. If it fails on any rank, the engines release waiting readers."""
        update = self._update
        if update is None:
            raise ConfigError("no update was begun on this rank")
        self._transfers = True
        with self._step(apart=self.is_apart):
            try:
                update.accompany()
                for name in self._in_order():
                    if name in self.reading:
                        self.engines[name].transfer(self._check_all)
                    elif self._gathers_in(name, update, packed=True):
                        self.sent.drain(self._check_all)
                if self._sums and update.terms is None:
                    self._parts = self._sum_up()
            except BaseException as exc:
                self._has_failed = not isinstance(exc, Cancellation)
                self._cancel_engines()
                raise
        update.transferred()
        if self._changes is not None:
            self._changes.note_sent()
        return CommandResult()

    def _sum_up(self) -> dict[str, list[TensorPart]]:
        """Return the parts of the mix64 of the tensors that this rank's boxes make, as sent.

        An empty list for a tensor whose cast has NaN: with the strides its bits change.
        """
        stream, tensors = self._own_boxes, self.sent.tensors_to_sample()
        if stream is None or tensors is None:
            return {}
        unlike: dict[str, list[TensorPart]] = {}
        # Not a failed receiver: all bytes are sent, and those in place that have them may finish.
        check = self._collective.check_others if self._collective is not None else self._check_own

        def boxes() -> Iterator[tuple[str, torch.Tensor, Slice, int]]:
            for index, whole, tensor in zip(stream.indices, stream.boxes, tensors, strict=True):
                check()
                spec = stream.model.specs[index]
                dtype = TORCH_DTYPES[spec.dtype]
                casts = tensor.dtype is not dtype
                copies = casts or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg()
                most = _CAST_NBYTES // dtype.itemsize if copies else tensor.numel()
                for piece, box in whole.pieces(tensor, most):
                    if casts and bool(torch.isnan(piece).any()):
                        unlike[spec.name] = []
                    else:
                        yield spec.name, contiguous_bytes(piece.to(dtype)), box, dtype.itemsize

        with torch.no_grad():
            return parts_of(boxes()) | unlike

    def _keep_alive(self, command: KeepAlive) -> CommandResult:
        """Return the liveness counters of this rank's readers."""
        if command.may_raise:
            self._check_own()
        watches = {name: part(self.engines[name], ReaderWatch) for name in self.reading}
        beats = {
            name: {reader: watch.liveness_counter(reader) for reader in self.reading[name]}
            for name, watch in watches.items()
        }
        late = {name: watch.late_readers for name, watch in watches.items() if watch.late_readers}
        return CommandResult(beats=beats, late=late, has_failed=self._has_failed)

    def _end_of_all(self) -> CommandResult:
        """End the update, and report whether this rank's transfer has failed."""
        return structs.replace(self._end(), is_late=self.late is not None)

    def note_late(self, error: BaseException | None) -> None:
        """Keep the error of a Begin that the ranks do apart, for `agree_on_late`."""
        self.late = error

    def is_own_error(self, error: BaseException) -> bool:
        """Whether an error is not that of the last check of this rank's caller."""
        return self._collective is None or self._collective.is_own_error(error)

    def agree_on_late(self) -> None:
        """Raise on all ranks the error of a transfer that had no reply of its own. Collective."""
        late, self.late = self.late, None
        self._ranks.agree(late)

    def _end(self) -> CommandResult:
        """End the update on all engines, also after a failure; base engines end last."""
        update, self._update = self._update, None
        parts, self._parts = self._parts, {}
        engines = [self.engines[name] for name in self.reading]
        with ExitStack() as stack:
            changed: list[str] = []
            bases = [e for n, e in self.engines.items() if not self.backend(n).requires]
            dependents = [e for e in self.engines.values() if e not in bases]
            for engine in bases:
                stack.callback(_named, engine, "end")
            stack.callback(lambda: changed.extend(self.sent.end_watch(self._is_adopted)))
            for engine in dependents:
                stack.callback(_named, engine, "end")
        not_finite, merged = self.sent.not_finite, self.sent.take_merged()
        self.sent.refresh()
        digests = {name: _digest_of(self.engines[name]) for name in self.reading}
        lines, nbytes = (0, 0) if update is None else update.sent_lines
        return CommandResult(
            changed=changed,
            not_finite=not_finite,
            digests=digests if update is None else digests | update.digests,
            delta_lines=lines,
            delta_nbytes=nbytes,
            merged=merged,
            extra_nbytes=self._extra_nbytes(),
            written_nbytes=sum(_of_memory(engine, "written_nbytes") for engine in engines),
            parts=parts,
        )

    def _is_adopted(self, index: int, address: int) -> bool:
        """Whether an engine of this rank moved a tensor of the source to that address."""
        return any(
            part(engine, HeldMemory).is_adopted(index, address) for engine in self.engines.values()
        )

    def _step(self, *, apart: bool = False) -> AbstractContextManager[None]:
        """One step of an update: with several ranks, an error of any rank is raised on all.

        Of a step that is done `apart` the others learn by its reply.
        """
        if self._collective is None:
            return nullcontext()
        step = self._collective.apart if apart else self._collective.step
        return step(self._check_own)

    def _check_all(self) -> None:
        """Raise when this rank has to stop, or another rank has. For waits."""
        if self._collective is None:
            self._check_own()
        else:
            self._collective.check()
            self._ranks.check_expected()

    def _check_own(self) -> None:
        self._check()
        self.calls.check()
        if self.fault is not None:
            raise self.fault
        self.stop.check()
        if self._update is not None:
            for name in self.reading:
                self.engines[name].check()

    def _in_order(self) -> list[str]:
        """Return the backends of this update in order, including those of other ranks only."""
        return [*self._passes, *(name for name in self.engines if name not in self._passes)]

    def _gathers_in(self, name: str, update: UpdateSource, *, packed: bool) -> bool:
        """Whether the ranks gather the model's tensors in this step: in a transfer, packed ones."""
        in_place = update.in_place and self.backend(name).reads_in_place and self._packed is False
        return update.is_gathered and name in self._passes and in_place != packed


class _OfModel:
    """The progress of the readers of a model, as far as they are in the stream of this rank."""

    def __init__(self, own: TransferProgress, model: StreamLayout) -> None:
        self.layout = model
        self._own = own

    def taken_nbytes(self, reader: int) -> int:
        """Return about how many bytes of the model a reader has read."""
        whole = max(self._own.layout.nbytes, 1)
        return self._own.taken_nbytes(reader) * self.layout.nbytes // whole


def _named(engine: TrainerWeightTransferEngine, method: str) -> None:
    """Call a method of an engine. Raises TransferError naming it for a foreign error."""
    with naming(f"{type(engine).__name__}.{method}()"):
        getattr(engine, method)()


def _of_memory(
    engine: TrainerWeightTransferEngine, name: Literal["extra_nbytes", "written_nbytes"]
) -> int:
    """Return a number of bytes of an engine. Raises ConfigError naming it for another type."""
    memory = part(engine, HeldMemory)
    nbytes: int = expect(getattr(memory, name), int, f"{type(engine).__name__}.{name} is")
    return nbytes


def _digest_of(engine: TrainerWeightTransferEngine) -> str | None:
    """Return the digest of an update. Raises ConfigError for another type."""
    digest: str | None = expect(
        engine.table_digest, str | None, f"{type(engine).__name__}.table_digest is"
    )
    return digest


def _checked_payload(name: str, payload: Any, readers: Sequence[int]) -> Any:
    """Return a payload of `begin`. Raises ConfigError for one by reader that lacks a reader."""
    check_plain(payload, f"backend {name!r}: begin()")
    if isinstance(payload, dict) and any(isinstance(key, int) for key in payload):
        missing = [reader for reader in readers if reader not in payload]
        if missing:
            raise ConfigError(f"backend {name!r}: begin() returned no payload for {missing}")
    return payload


def _checked_round(name: str, step: object) -> Round:
    """Return a round of a handshake. Raises ConfigError where it yielded anything else."""
    made: Round = expect(step, Round, f"backend {name!r}: handshake() yielded")
    check_plain(made.messages, f"backend {name!r}: handshake() or init_payload()")
    return made
