"""The worker of one rank: its source, and the trainer engines that its receivers read."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

from weightsync.backends.base import (
    Backend,
    Handshake,
    HeldMemory,
    ReaderChanges,
    ReaderWatch,
    Replies,
    Round,
    TrainerWeightTransferEngine,
    TransferOptions,
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
from weightsync.observe import ObservedTransfer
from weightsync.profiling import scope
from weightsync.ranks.comm import RankComm, compare_manifests
from weightsync.ranks.commands import (
    LINES_DIGEST,
    AnyCommand,
    Begin,
    ChangeEstimate,
    CheckMoved,
    CommandResult,
    Connect,
    DeltaTask,
    End,
    EstimateChanges,
    KeepAlive,
    Open,
    RankInfo,
    ReadersByRank,
    TakeSnapshot,
    Transfer,
    Withdraw,
)
from weightsync.ranks.replicas import CheckReplicas, ReplicaCheck
from weightsync.ranks.sources import (
    CollectiveSource,
    Pair,
    SourceOfUpdate,
    Subset,
    join_parts,
    manifest_of,
    source_device,
)
from weightsync.ranks.stop import StopSignal
from weightsync.runtime.interpreter_exit import TorchCalls
from weightsync.shm.wait import Heartbeat
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.copying.shards import gather
from weightsync.weights.deltas.change_log import ChangeLog, DeltaSource, pairs_of
from weightsync.weights.sources.base import (
    NamedTensors,
    Snapshot,
    SplitSource,
    WeightSource,
    checked_pairs,
)
from weightsync.weights.sources.finite import CheckFinite
from weightsync.weights.sources.wrapping import innermost
from weightsync.weights.tensor_kinds import check_readable
from weightsync.wire.codec import manifest_to_wire
from weightsync.wire.messages import SharedMemoryUsage

logger = logging.getLogger(__name__)


class RankWorker:
    """Executes rank 0's commands on one rank. `engines` has the engines by backend, bases first.

    `stop`, when set, cancels the call that is executed: a transfer ends on all ranks, and no
    further command uses this rank's source. `pairs` are the tensors of the next Begin
    that sends other tensors than the model's. `fault`, when set, makes every further step fail,
    because this rank's caller left the update. `reading` has the readers of the last update, by
    backend; their signs of life are reported until it is finished. `calls` are its commands.
    """

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
        self._collective = CollectiveSource(source, ranks) if ranks.size > 1 else None
        self._original = SourceOfUpdate(source, self._collective)
        self.replicas = ReplicaCheck(ranks, check_replicas)
        self._names = [spec.name for spec in described.manifest.specs]
        self._compares = False
        self.rounded: Mapping[str, str] = getattr(source, "rounded", {})
        self.source = SourceOfUpdate(source, self._collective, check_finite)
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
        self._in_update = False
        self._moves_model = True
        self._sends_delta = False
        self._changes: ChangeLog | None = None
        self._delta: DeltaSource | None = None
        self._records: DeltaTask | None = None
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

    def backend(self, name: str) -> Backend:
        """Return a backend of this sender, or one that these require."""
        return self._backends.get(name) or get_backend(name)

    def do(  # noqa: C901, PLR0911  # one for each command
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
                    return self._take_snapshot()
                case EstimateChanges():
                    return self._estimate_changes(command)
                case Begin():
                    return self._begin(command)
                case Transfer():
                    return self._transfer()
                case KeepAlive():
                    return self._keep_alive(command)
                case End():
                    return self._end()
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

    def transfers(self, by_rank: ReadersByRank) -> list[ObservedTransfer]:
        """Return the engines' parts of the update that has begun, for observers."""
        found: list[ObservedTransfer] = []
        for name, reading in self.reading.items():
            progress = part(self.engines[name], ReaderWatch).progress()
            if progress is not None:
                readers = by_rank.get(name, {}).get(self._ranks.rank, [])
                relays = [reader for reader in reading if reader not in readers]
                dependent = bool(self.backend(name).requires)
                found.append(ObservedTransfer(name, progress, readers, relays, dependent))
        return found

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
        self.reading = {}
        self.source.refresh()
        with ExitStack() as last:
            for engine in engines.values():
                last.callback(_named, engine, "close")
            if heartbeat is not None:
                last.callback(heartbeat.close)
            for handshake in handshakes.values():
                last.callback(handshake.close)
            self.source.end_watch()

    def expect_finalizer(self) -> None:
        """Notify the engines that the garbage collector closes this worker next."""
        for engine in self.engines.values():
            part(engine, HeldMemory).expect_finalizer()

    def _open(self, command: Open) -> CommandResult:
        self.close()
        self._packed = command.packed
        options = replace(
            self._options,
            packed=command.packed,
            bucket_nbytes=command.bucket_nbytes,
            num_buckets=command.num_buckets,
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
                engine = backend.trainer_engine(self.source, path, options, bases)
            self.engines[name] = expect(engine, TrainerWeightTransferEngine, f"{method} returned")
            check_contract(type(engine), TrainerWeightTransferEngine)
        if self.engines:
            self._heartbeat = Heartbeat(self._beat)
        return CommandResult(extra_nbytes=self._extra_nbytes())

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
        try:
            if command.replies is None and rank in command.readers:
                self.end_handshake(name)
                handshake = self.engines[name].handshake(command.readers[rank], command.generation)
                method = f"backend {name!r}: handshake()"
                self._handshakes[name] = expect(handshake, Generator, f"{method} returned")
                return CommandResult(round=_checked_round(name, next(handshake)))
            replies = command.replies or {}
            if name in self._handshakes and (rank in replies or going_on):
                step = self._handshakes[name].send(replies.get(rank, Replies()))
                if going_on:
                    return CommandResult(round=_checked_round(name, step))
            self.end_handshake(name)
            return CommandResult()
        except StopIteration:
            self._handshakes.pop(name, None)
            return CommandResult()

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

    def _check_moved(self) -> CommandResult:
        """Return whether registered memory has moved. Raises in a block that sent too much."""
        self._check_own()
        if self.pairs is not None:
            self.pairs = None
            raise ProtocolError(
                "this rank sends tensors that rank 0 does not; every rank has to call send() as "
                "often as rank 0"
            )
        self.source.refresh()
        return CommandResult(
            moved=any(part(engine, HeldMemory).needs_init for engine in self.engines.values())
        )

    def _take_snapshot(self) -> CommandResult:
        """Copy the source's tensors; the first time, the copy takes the place of the source."""
        snapshot = self._snapshot
        if snapshot is None:
            self.close()
            snapshot = Snapshot(self._original.manifest)
        self._original.refresh()
        self._moves_model = True
        self._begin_comparison()
        with self._step():
            self._original.watch(None, reads=True)
            try:
                self._note_replicas()
                snapshot.take(self._original, self._check_all)
            finally:
                changed = self._original.end_watch()
            if changed:
                snapshot.drop()
                raise VerificationError(
                    f"the source changed while it was copied: {len(changed)} tensors: "
                    f"{shorten(changed)}; send again when nothing else changes it",
                    names=changed,
                )
        self._compare_replicas()
        if self._snapshot is None:
            self._snapshot = snapshot
            self.source = SourceOfUpdate(snapshot, None, self._check_finite)
        return CommandResult(extra_nbytes=snapshot.nbytes)

    def drop_snapshot(self) -> None:
        """Free the copy of the source's tensors; the next update makes another one."""
        if self._snapshot is not None:
            self._snapshot.drop()
            self.source.refresh()

    def _estimate_changes(self, command: EstimateChanges) -> CommandResult:
        """Return about how much has changed; nothing on a rank that no receiver reads."""
        if not self.engines:
            return CommandResult()
        changes = self._log_of_changes(keeps=command.keeps)
        return CommandResult(
            estimate=ChangeEstimate(
                share=changes.changed_share(self.source.tensors_to_sample()),
                marked=changes.lines_since(command.bases),
                are_newest=changes.marks_since(command.bases) is None,
            )
        )

    def _log_of_changes(self, *, keeps: bool = False) -> ChangeLog:
        """Return the log of the source's changes, with a copy of the stream if it `keeps` one."""
        if self._changes is None or self._changes.keeps < keeps:
            self._changes = ChangeLog(StreamLayout(self.source.manifest), keeps=keeps)
        return self._changes

    def _begin_delta(self, task: DeltaTask | None) -> None:
        """Prepare what an update does about deltas, on a rank that has readers."""
        self._delta, self._records = None, None
        if task is None or not self.reading:
            return
        changes = self._log_of_changes(keeps=task.keeps)
        if not task.bases:
            self._records = task
            return
        self._delta = DeltaSource(
            changes,
            self.source,
            task.weights_id,
            task.bases,
            task.expected,
            scrub=task.scrub,
            by_value=task.by_value and len(self._passes) == 1,
            to_shards=task.to_shards,
        )

    def _begin(self, command: Begin) -> CommandResult:
        """Start an update: watch its tensors, and begin it on the engines that have readers."""
        self.reading = self._readers_of(command.readers)
        self._passes = [name for name in command.readers if not self.backend(name).requires]
        task = command.delta
        self._sends_delta = task is not None and bool(task.bases)
        self._moves_model = not command.pairs
        self._in_update = True
        if self.source.is_made:
            self.source.refresh(passes=len(self._passes))
        pairs = self._take_pairs() if command.pairs else None
        self._begin_comparison()
        updates: dict[str, Any] = {}
        with self._step():
            self.source.watch(pairs, reads=bool(self.reading))
            self._begin_delta(command.delta)
            if self.reading and pairs is not None:
                self.source.look(pairs)
            elif self.reading and self._check_finite == "raise":
                self.source.look_at_stable()  # before a receiver in place reads it
            source = self._source_of_update(pairs)
            for name in self._in_order():
                readers = self.reading.get(name)
                if readers:
                    # A delta is verified as a whole, by the fingerprint of the model.
                    verify = command.verify and self._delta is None
                    payload = self.engines[name].begin(readers, verify=verify, source=source)
                    updates[name] = _checked_payload(name, payload, readers)
                elif self._gathers_in(name, packed=False):
                    self.source.drain(self._check_all)
        manifest = None
        if pairs is not None and updates:
            manifest = manifest_to_wire(manifest_of(pairs))
        elif self._delta is not None and updates:
            manifest = manifest_to_wire(self._delta.manifest)
        return CommandResult(
            updates=updates,
            manifest=manifest,
            delta=self._delta.terms if self._delta is not None else None,
            packed={name: part(self.engines[name], HeldMemory).packed for name in updates},
        )

    def _source_of_update(self, pairs: list[Pair] | None) -> WeightSource:
        """Return the source of other tensors, of a delta, or of the model."""
        if pairs is not None:
            return Subset([(name, gather(tensor)) for name, tensor in pairs])
        if self._records is not None and self._changes is not None and self.source.is_made:
            self.source.record(self._changes, self._records.weights_id)
        return self.source if self._delta is None else self._delta

    def _transfer(self) -> CommandResult:
        """Transfer every byte. If it fails on any rank, the engines release waiting readers."""
        with self._step():
            try:
                if self.reading and self._moves_model and self._check_finite == "warn":
                    self.source.look_at_stable()  # while the receivers read
                self._note_replicas()
                self._record_stable()
                for name in self._in_order():
                    if name in self.reading:
                        self.engines[name].transfer(self._check_all)
                    elif self._gathers_in(name, packed=True):
                        self.source.drain(self._check_all)
            except BaseException:
                for name in self.reading:
                    try:
                        self.engines[name].cancel()
                    except Exception:  # the error of the transfer counts
                        logger.exception("backend %s: cancel() failed", name)
                raise
        self._compare_replicas()
        return CommandResult()

    def _begin_comparison(self) -> None:
        """Prepare to compare replicas in the next pass over the model, if that is to be done.

        A snapshot was compared when it was taken.
        """
        sends_copy = self._snapshot is not None and self._in_update
        self._compares = self._moves_model and not sends_copy and self.replicas.wants(self._names)
        self.replicas.begin()
        if self._collective is not None:
            as_yielded = self._compares and not self._original.has_own_tensors
            self._collective.replicas = self.replicas if as_yielded else None

    def _note_replicas(self) -> None:
        """Note this rank's tensors, where their memory is known, while receivers read."""
        if self._compares and self._original.has_own_tensors:
            self.replicas.note_all(self._original.own_tensors())

    def _compare_replicas(self) -> None:
        """Compare the ranks' replicas after a step that ended well on all of them."""
        if self._collective is not None:
            self._collective.replicas = None
        if self._compares:
            self._compares = False
            self.replicas.compare(self._names)

    def _record_stable(self) -> None:
        """Record the lines of stable tensors while the receivers read them."""
        task, changes = self._records, self._changes
        if task is None or changes is None or self.source.is_made:
            return
        changes.record(task.weights_id, pairs_of(self.source))

    def _keep_alive(self, command: KeepAlive) -> CommandResult:
        """Return the liveness counters of this rank's readers."""
        if command.may_raise:
            self._check_own()
        beats = {
            name: {
                reader: part(self.engines[name], ReaderWatch).liveness_counter(reader)
                for reader in readers
            }
            for name, readers in self.reading.items()
        }
        return CommandResult(beats=beats)

    def _end(self) -> CommandResult:
        """End the update on all engines, also after a failure; base engines end last."""
        self._in_update = False
        engines = [self.engines[name] for name in self.reading]
        with ExitStack() as stack:
            changed: list[str] = []
            bases = [e for n, e in self.engines.items() if not self.backend(n).requires]
            dependents = [e for e in self.engines.values() if e not in bases]
            for engine in bases:
                stack.callback(_named, engine, "end")
            stack.callback(lambda: changed.extend(self.source.end_watch(self._is_adopted)))
            for engine in dependents:
                stack.callback(_named, engine, "end")
        not_finite = self.source.not_finite
        self.source.refresh()
        digests = {name: _digest_of(self.engines[name]) for name in self.reading}
        delta, self._delta = self._delta, None
        if (delta is not None or self._records is not None) and self._changes is not None:
            digests[LINES_DIGEST] = self._changes.fingerprint
        self._records = None
        return CommandResult(
            changed=changed,
            not_finite=not_finite,
            digests=digests,
            delta_lines=0 if delta is None else delta.written_lines,
            delta_nbytes=0 if delta is None else delta.nbytes,
            extra_nbytes=self._extra_nbytes(),
            written_nbytes=sum(_of_memory(engine, "written_nbytes") for engine in engines),
        )

    def _is_adopted(self, index: int, address: int) -> bool:
        """Whether an engine of this rank moved a tensor of the source to that address."""
        return any(
            part(engine, HeldMemory).is_adopted(index, address) for engine in self.engines.values()
        )

    def _step(self) -> AbstractContextManager[None]:
        """One step of an update: with several ranks, an error of any rank is raised on all."""
        return nullcontext() if self._collective is None else self._collective.step(self._check_own)

    def _check_all(self) -> None:
        """Raise when this rank has to stop, or another rank has. For waits."""
        if self._collective is None:
            self._check_own()
        else:
            self._collective.check()

    def _check_own(self) -> None:
        self._check()
        self.calls.check()
        if self.fault is not None:
            raise self.fault
        self.stop.check()
        if self._in_update:
            for name in self.reading:
                self.engines[name].check()

    def _take_pairs(self) -> list[Pair]:
        """Return this rank's tensors of `pairs`, not gathered. Raises where the ranks differ."""
        given, self.pairs = self.pairs, None
        with self._step():
            taken = list(checked_pairs(given or ()))
            for name, tensor in taken:
                check_readable(name, tensor)
        if self._collective is not None:
            advice = "every rank has to send() the same"
            compare_manifests(manifest_of(taken), self._ranks, advice=advice)
            names = [name for name, _ in taken]
            if self.replicas.wants(names):
                self.replicas.begin()
                with self._step():
                    self.replicas.note_all(tensor for _, tensor in taken)
                self.replicas.compare(names)
        return taken

    def _in_order(self) -> list[str]:
        """Return the backends of this update in order, including those of other ranks only."""
        return [*self._passes, *(name for name in self.engines if name not in self._passes)]

    def _gathers_in(self, name: str, *, packed: bool) -> bool:
        """Whether the ranks gather the model's tensors in this step: in a transfer, packed ones."""
        in_place = self.backend(name).reads_in_place and self._packed is False
        if self._sends_delta:
            in_place = False
        takes_part = name in self._passes and self.source.is_made and self._moves_model
        return takes_part and in_place != packed


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
