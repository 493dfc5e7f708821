"""One rank's part in sending: its source, and the ring or memory that its receivers read."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol

import msgspec
import torch

from weightsync.backends.base import (
    Backend,
    Handshake,
    Reader,
    Replies,
    Round,
    TrainerWeightTransferEngine,
    TransferOptions,
    check_plain,
)
from weightsync.backends.registry import endpoints, get_backend
from weightsync.cuda.handles import device_keys
from weightsync.errors import ConfigError, ProtocolError, TransferError
from weightsync.ranks.comm import (
    CancelFlag,
    Cancellation,
    CancelledError,
    RankComm,
    compare_manifests,
)
from weightsync.report import SyncReport
from weightsync.shm.wait import Heartbeat
from weightsync.specs import Manifest
from weightsync.tensors import spec_of
from weightsync.weights.shards import gather, is_sharded
from weightsync.weights.source import (
    IterableSource,
    NamedTensors,
    SourceWatch,
    WeightSource,
    checked,
    groups_of,
)
from weightsync.wire.codec import manifest_to_wire
from weightsync.wire.messages import LedgerEntry
from weightsync.wire.offers import ManifestMessage
from weightsync.wire.problem import Problem

logger = logging.getLogger(__name__)

Places = dict[str, dict[int, list[int]]]
"""Readers by backend, and by the rank that feeds them."""


class ReaderOfRank(Protocol):
    """A receiver that reads as `reader` what the engine of `backend` on rank `rank` offers."""

    rank: int
    backend: str
    reader: int

    @property
    def target(self) -> str: ...


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what rank 0 broadcasts; every rank does it and answers."""


class Open(Command, frozen=True, kw_only=True):
    """Make engines on each of these ranks: the path by rank, by backend."""

    paths: dict[str, dict[int, str]]
    packed: bool | None
    bucket_nbytes: int | None
    num_buckets: int | None


class Connect(Command, frozen=True, kw_only=True):
    """Begin the handshake of one backend with these readers, by rank; or go on, after `replies`."""

    backend: str
    number: int = 0
    readers: dict[int, list[Reader]] = {}
    replies: dict[int, Replies] | None = None


class CheckMoved(Command, frozen=True, kw_only=True):
    """Say whether registered memory has moved. Nothing else is on its way."""


class Begin(Command, frozen=True, kw_only=True):
    """Start an update of these readers, of other tensors than the model's where `pairs`."""

    places: Places
    verify: bool
    pairs: bool = False


class Transfer(Command, frozen=True, kw_only=True):
    """Hand every byte over."""


class KeepAlive(Command, frozen=True, kw_only=True):
    """Rank 0 waits for receivers: say how those of this rank stand, and raise if it leaves.

    Without `asks` the update is past giving up: it does not raise.
    """

    asks: bool = True


class End(Command, frozen=True, kw_only=True):
    """The update is over, well or not."""


class Withdraw(Command, frozen=True, kw_only=True):
    """Free everything that was made for receivers."""


class Finished(Command, frozen=True, kw_only=True):
    """The call that rank 0 made is over: return, or raise `problem`."""

    version: int
    report: SyncReport | None = None
    problem: Problem | None = None


AnyCommand = Open | Connect | CheckMoved | Begin | Transfer | KeepAlive | End | Withdraw | Finished


class CommandResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one rank answers: the fields that belong to the command, or `problem`.

    `round` are the next messages of a handshake, `excused` the failed readers that are not to
    blame. `updates` are payloads by backend, and by reader where each gets its own. `changed` names
    tensors of its source that changed while they were sent.
    """

    problem: Problem | None = None
    round: Round | None = None
    excused: list[int] = []
    moved: bool = False
    beats: dict[str, dict[int, int | None]] = {}
    updates: dict[str, Any] = {}
    manifest: ManifestMessage | None = None
    packed: bool = False
    digests: dict[str, str | None] = {}
    extra_nbytes: int = 0
    written_nbytes: int = 0
    changed: list[str] = []


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who a rank is: its device keys, and whether its tensors stay where they are.

    Receivers know it as `sender_id`. `backends` are the facts of those that can be used there,
    `unusable` why others cannot.
    """

    keys: list[str]
    stable: bool
    sender_id: str
    backends: dict[str, Any]
    unusable: dict[str, str] = {}


_commands: msgspec.msgpack.Decoder[AnyCommand] = msgspec.msgpack.Decoder(AnyCommand)
_answers = msgspec.msgpack.Decoder(CommandResult)


def encode(message: Command | CommandResult | RankInfo) -> bytes:
    """Return the MessagePack of anything here."""
    return msgspec.msgpack.encode(message)


def decode_command(data: bytes) -> AnyCommand:
    """Return the command that rank 0 sent."""
    return _commands.decode(data)


def decode_result(data: bytes) -> CommandResult:
    """Return what a rank answered."""
    return _answers.decode(data)


def decode_rank_info(data: bytes) -> RankInfo:
    """Return who a rank is."""
    return msgspec.msgpack.decode(data, type=RankInfo)


Pair = tuple[str, torch.Tensor]


class CollectiveSource:
    """A WeightSource whose ranks exchange a status word before each group is gathered.

    A rank that fails in the middle of a group still takes part in the rest of that group's
    gathers, so that all ranks meet at the next word and raise there together. Shards that a
    callable yields are looked at on all ranks before any of them is gathered.
    """

    def __init__(self, source: WeightSource, ranks: RankComm) -> None:
        self._source = source
        self._ranks = ranks
        self._groups = groups_of(source.manifest)
        self._call_off = CancelFlag(ranks)
        self._making: Iterator[Pair] = iter(())
        self._rest: Iterator[Pair] = iter(())
        self._begin(lambda: None)

    @property
    def manifest(self) -> Manifest:
        """The source's own."""
        return self._source.manifest

    def stable_tensors(self) -> list[torch.Tensor] | None:
        """The source's own."""
        return self._source.stable_tensors()

    def tensors(self) -> Iterator[Pair]:
        """Yield the source's tensors. Only inside `run`, and by every rank."""
        self._making = self._make()
        return self._making

    def run(self, work: Callable[[], None], *, check: Callable[[], None]) -> None:
        """Do one rank's part of a step; if it fails on any rank, raise on all of them.

        What `check` raises is raised here as it is: it says that this rank should leave. Any other
        error is raised as the ranks agree on it, and names its rank. `self.check` asks `check`,
        and whether another rank has left already, for waits in the middle of a group.
        """
        self._begin(check)
        self._call_off.next_turn()
        try:
            self._check_own()
            called_off = self._work(work)
            self._meet()
            self._over = True
            self._raise_late()
        except BaseException as exc:
            if not self._over:
                self._leave(exc)
            raise
        finally:
            self._making = self._rest = iter(())
        if called_off:
            raise CancelledError("another rank called the step off, and then found nothing wrong")

    def check(self) -> None:
        """Raise when this rank should leave the step, CalledOff when another one has."""
        self._check_own()
        self._call_off.look()

    def drain(self) -> None:
        """Take part in making every tensor without using any."""
        self._source.stable_tensors()  # raises, before anyone gathers, where a module has changed
        for _ in self.tensors():
            self.check()

    def _begin(self, check: Callable[[], None]) -> None:
        self._asked = check
        self._refused: BaseException | None = None
        self._late: BaseException | None = None
        self._over = False

    def _work(self, work: Callable[[], None]) -> bool:
        """Return whether the work was given up, because another rank gave up."""
        try:
            work()
        except Cancellation:
            for _ in self._making:
                pass
            return True
        return False

    def _make(self) -> Iterator[Pair]:
        shards = isinstance(self._source, IterableSource)
        made = self._source.shards if isinstance(self._source, IterableSource) else None
        pairs = checked((made or self._source.tensors)(), self._source.manifest)
        for group in self._groups:
            self._meet()
            left = len(group)
            while left:
                left -= self._take_shards(pairs, left) if shards else self._take(pairs, left)
                self._raise_late()
                yield from self._rest
        yield from pairs  # none is left; asking lets the source see its end

    def _take(self, pairs: Iterator[Pair], count: int) -> int:
        self._rest = islice(pairs, count)
        return count

    def _take_shards(self, pairs: Iterator[Pair], most: int) -> int:
        """Take neighbours that are shards, and gather none before all ranks have taken theirs.

        A tensor that is no shard may be overwritten when the next one is asked for.
        """
        taken: list[Pair] = []
        for pair in islice(pairs, most):
            taken.append(pair)
            if not is_sharded(pair[1]):
                break
        if is_sharded(taken[0][1]):
            self._meet()
        self._rest = map(self._gathered, taken)
        return len(taken)

    def _gathered(self, pair: Pair) -> Pair:
        assert isinstance(self._source, IterableSource)
        return pair[0], self._source.gather(pair[1])

    def _check_own(self) -> None:
        try:
            self._asked()
        except BaseException as exc:
            self._refused = exc
            raise

    def _meet(self) -> None:
        """Wait for the next word; what `check` raises meanwhile is kept until after it."""
        try:
            self._ranks.agree(look=self._look)
        except BaseException:
            self._over = True
            raise

    def _look(self) -> None:
        if self._late is not None:
            return
        try:
            self._check_own()
        except BaseException as exc:  # noqa: BLE001  # raised after the word, which is under way
            self._late = exc
            self._call_off.call()

    def _raise_late(self) -> None:
        if self._late is not None:
            raise self._late

    def _leave(self, error: BaseException) -> None:
        """Tell the others, who are on their way to the next word or wait for a receiver."""
        self._call_off.call()
        with suppress(Exception):
            for _ in self._rest:
                pass
        if isinstance(error, Exception) and error is not self._refused:
            self._ranks.agree(error)
        with suppress(Exception):
            self._ranks.agree(error)


class SourceOfUpdate:
    """A source that is asked for its stable tensors once an update: that takes time by the tensor.

    `refresh` forgets them.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._stable: list[torch.Tensor] | None = None

    @property
    def manifest(self) -> Manifest:
        """The source's own."""
        return self._source.manifest

    def stable_tensors(self) -> list[torch.Tensor] | None:
        """The source's own, as they were when they were first asked for."""
        if self._stable is None:
            self._stable = self._source.stable_tensors()
        return self._stable

    def tensors(self) -> Iterator[Pair]:
        """The source's own."""
        return self._source.tensors()

    def refresh(self) -> None:
        """Ask anew."""
        self._stable = None


class RankWorker:
    """Does on one rank what rank 0 commands. `engines` are its backends', base engines first.

    `stop` ends a transfer of this rank, and with it that of all. `pairs` are the tensors of the
    next Begin that sends other tensors than the model's. `fault` makes every further step fail:
    this rank's caller has given the update up. `reading` are the readers of the last update, by
    backend: they are looked at until it is finished.
    """

    def __init__(
        self,
        source: WeightSource,
        options: TransferOptions,
        ranks: RankComm,
        backends: Sequence[Backend],
    ) -> None:
        self._ranks = ranks
        self._alone = ranks.size == 1
        self._steps = CollectiveSource(source, ranks)
        self._given = source
        self._watch = SourceWatch()
        self.source = SourceOfUpdate(source if self._alone else self._steps)
        self._options = replace(options, device=source_device(source))
        self._gathers = source.stable_tensors() is None
        self._backends = {backend.name: backend for backend in backends}
        self.sender_id = secrets.token_hex(8)
        self.engines: dict[str, TrainerWeightTransferEngine] = {}
        self.reading: dict[str, list[int]] = {}
        self.pairs: NamedTensors | None = None
        self.stop = threading.Event()
        self.fault: BaseException | None = None
        self._check: Callable[[], None] = lambda: None
        self._heartbeat: Heartbeat | None = None
        self._handshakes: dict[str, Handshake] = {}
        self._packed: bool | None = None
        self._passes: list[str] = []
        self._moves_model = True

    def rank_info(self) -> RankInfo:
        """Who this rank is."""
        facts, unusable = endpoints(self._backends.values(), self._options.device)
        return RankInfo(
            keys=device_keys(self._options.device),
            stable=not self._gathers,
            sender_id=self.sender_id,
            backends=facts,
            unusable=unusable,
        )

    def backend(self, name: str) -> Backend:
        """Return a backend that this sender was given, or that one of these requires."""
        return self._backends.get(name) or get_backend(name)

    def do(
        self, command: AnyCommand, check: Callable[[], None]
    ) -> CommandResult:  # one line a command
        """Do one command; `check` raises when a transfer must stop. Raises what went wrong."""
        self._check = check
        match command:
            case Open():
                return self._open(command)
            case Connect():
                return self._connect(command)
            case CheckMoved() | KeepAlive():
                return self._look(command)
            case Begin():
                return self._begin(command)
            case Transfer():
                return self._transfer()
            case End():
                return self._end()
            case Withdraw():
                self.close()
                return CommandResult()
            case _:
                raise ConfigError(f"{type(command).__name__} is no command for a rank")

    def ledger(self, members: Iterable[ReaderOfRank]) -> list[LedgerEntry]:
        """What this rank shares now; the readers of it are named after `members`, where known."""
        names: dict[str, dict[int, str]] = {name: {} for name in self.engines}
        for member in members:
            if member.rank == self._ranks.rank and member.backend in names:
                names[member.backend][member.reader] = member.target
        for name, engine in self.engines.items():
            for base in self.backend(name).requires:
                places = engine.places_on_base(list(names[name]))
                names[base].update(dict.fromkeys(places, "other hosts"))
        return [
            entry for name, engine in self.engines.items() for entry in engine.ledger(names[name])
        ]

    def close(self) -> None:
        """Free everything, also where a part of it raises. Idempotent."""
        engines, self.engines = self.engines, {}
        heartbeat, self._heartbeat = self._heartbeat, None
        handshakes, self._handshakes = self._handshakes, {}
        self.reading = {}
        self.source.refresh()
        with ExitStack() as last:
            for engine in engines.values():
                last.callback(engine.close)
            if heartbeat is not None:
                last.callback(heartbeat.close)
            for handshake in handshakes.values():
                last.callback(handshake.close)
            self._watch.end()

    def dropped(self) -> None:
        """The garbage collector closes this next."""
        for engine in self.engines.values():
            engine.dropped()

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
            bases = {base: self.engines[base] for base in backend.requires}
            engine = backend.trainer_engine(self.source, path, options, bases)
            if not isinstance(engine, TrainerWeightTransferEngine):
                raise ConfigError(
                    f"backend {name!r}: trainer_engine() returned a {type(engine).__name__}, not a "
                    "TrainerWeightTransferEngine"
                )
            self.engines[name] = engine
        if self.engines:
            self._heartbeat = Heartbeat(self._beat)
        return CommandResult(extra_nbytes=self._extra_nbytes())

    def _beat(self) -> None:
        for engine in list(self.engines.values()):
            try:
                engine.beat()
            except Exception:  # the heartbeats of the other engines go on
                logger.warning("%s.beat() failed", type(engine).__name__, exc_info=True)

    def _extra_nbytes(self) -> int:
        return sum(engine.extra_nbytes for engine in self.engines.values())

    def _connect(self, command: Connect) -> CommandResult:
        """Take one step of a handshake, on a rank that has readers in it."""
        rank, name = self._ranks.rank, command.backend
        try:
            if command.replies is None:
                before = self._handshakes.pop(name, None)
                if before is not None:
                    before.close()
                readers = command.readers.get(rank)
                if not readers:
                    return CommandResult()
                handshake = self.engines[name].handshake(readers, command.number)
                if not isinstance(handshake, Generator):
                    raise ConfigError(
                        f"backend {name!r}: handshake() returned a {type(handshake).__name__}, not "
                        "a generator of Rounds"
                    )
                self._handshakes[name] = handshake
                return CommandResult(round=_checked_round(name, next(handshake)))
            if name not in self._handshakes:
                return CommandResult()
            going_on = self._handshakes[name].send(command.replies.get(rank, Replies()))
            return CommandResult(round=_checked_round(name, going_on))
        except StopIteration as over:
            self._handshakes.pop(name, None)
            return CommandResult(excused=list(over.value or ()))

    def _begin(self, command: Begin) -> CommandResult:
        self.reading = {}
        for name, engine in reversed(self.engines.items()):
            readers = command.places.get(name, {}).get(self._ranks.rank, [])
            own = [*readers, *self.reading.get(name, [])]
            if own:
                self.reading[name] = own
            for base in self.backend(name).requires:
                self.reading.setdefault(base, []).extend(engine.places_on_base(readers))
        self.reading = {name: self.reading[name] for name in self.engines if self.reading.get(name)}
        self._passes = [name for name in command.places if not self.backend(name).requires]
        self._moves_model = not command.pairs
        pairs = self._take_pairs() if command.pairs else None
        updates: dict[str, Any] = {}

        def begin() -> None:
            self._watch_source(pairs)
            whole = None if pairs is None else [(name, gather(tensor)) for name, tensor in pairs]
            for name in self._in_turn():
                readers = self.reading.get(name)
                if readers:
                    engine = self.engines[name]
                    payload = engine.begin(readers, verify=command.verify, pairs=whole)
                    check_plain(payload, f"backend {name!r}: begin()")
                    updates[name] = payload
                elif self._gathers_in(name, packed=False):
                    self._steps.drain()

        self._in_step(begin)
        manifest = None
        if pairs is not None and updates:
            manifest = manifest_to_wire(_manifest_of(pairs))
        return CommandResult(
            updates=updates,
            manifest=manifest,
            packed=any(self.engines[name].packed for name in updates),
        )

    def _in_turn(self) -> list[str]:
        """All backends of this update, also those that other ranks alone use."""
        own = [name for name in self.engines if name not in self._passes]
        return [*self._passes, *own]

    def _watch_source(self, pairs: list[tuple[str, torch.Tensor]] | None) -> None:
        """From here on nothing that this rank's part is read from may change."""
        source = self._given
        if isinstance(source, IterableSource):
            source.changed = []
        if pairs is not None:
            self._watch.begin([name for name, _ in pairs], [tensor for _, tensor in pairs])
        elif self.reading or self._gathers:
            stable = self.source.stable_tensors() if not self._gathers else None
            if stable is not None:
                self._watch.begin([spec.name for spec in source.manifest.specs], stable)
            elif hasattr(source, "made_of"):
                self._watch.begin(*source.made_of())

    def _what_changed(self) -> list[str]:
        """Name what others changed of this rank's source since the update began."""
        source, engines = self._given, list(self.engines.values())

        def is_place(index: int, address: int) -> bool:
            return any(engine.is_place(index, address) for engine in engines)

        changed = self._watch.end(is_place)
        return changed + (source.changed if isinstance(source, IterableSource) else [])

    def _take_pairs(self) -> list[tuple[str, torch.Tensor]]:
        """Return this rank's tensors, shards ungathered, once all ranks have the same."""
        given, self.pairs = self.pairs, None
        taken: list[tuple[str, torch.Tensor]] = []
        self._in_step(lambda: taken.extend(given or ()))
        if not self._alone:
            manifest = _manifest_of(taken)
            compare_manifests(manifest, self._ranks, advice="every rank has to send() the same")
        return taken

    def _look(self, command: CheckMoved | KeepAlive) -> CommandResult:
        if not isinstance(command, KeepAlive) or command.asks:
            self._check_own()
        if isinstance(command, KeepAlive):
            engines = self.engines
            beats = {
                name: {reader: engines[name].signs(reader) for reader in readers}
                for name, readers in self.reading.items()
            }
            return CommandResult(beats=beats)
        if self.pairs is not None:
            self.pairs = None
            raise ProtocolError(
                "this rank sends tensors that rank 0 does not; every rank has to call send() as "
                "often as rank 0"
            )
        self.source.refresh()
        return CommandResult(moved=any(engine.needs_init for engine in self.engines.values()))

    def _transfer(self) -> CommandResult:
        self._in_step(self._hand_over)
        return CommandResult()

    def _hand_over(self) -> None:
        try:
            for name in self._in_turn():
                if name in self.reading:
                    self.engines[name].transfer(self._check_all)
                elif self._gathers_in(name, packed=True):
                    self._steps.drain()
        except BaseException:
            for name in self.reading:
                self.engines[name].cancel()
            raise

    def _end(self) -> CommandResult:
        engines = [self.engines[name] for name in self.reading]
        for engine in reversed(engines):  # before the engine that it is built on
            engine.cancel()
        changed = self._what_changed()
        for engine in reversed(list(self.engines.values())):
            engine.end()
        self.source.refresh()
        return CommandResult(
            changed=changed,
            digests={name: self.engines[name].table_digest for name in self.reading},
            extra_nbytes=self._extra_nbytes(),
            written_nbytes=sum(engine.written_nbytes for engine in engines),
        )

    def _gathers_in(self, name: str, *, packed: bool) -> bool:
        """Whether the ranks make the model's tensors in this step: packed ones while they go."""
        in_place = self.backend(name).reads_in_place and self._packed is False
        takes_part = name in self._passes and self._gathers and self._moves_model
        return takes_part and in_place != packed

    def _in_step(self, work: Callable[[], None]) -> None:
        if self._alone:
            work()
        else:
            self._steps.run(work, check=self._check_own)

    def _check_all(self) -> None:
        """For waits: this rank should stop, or another one has."""
        if self._alone:
            self._check_own()
        else:
            self._steps.check()

    def _check_own(self) -> None:
        self._check()
        if self.fault is not None:
            raise self.fault
        if self.stop.is_set():
            raise TransferError("the update was cancelled by its caller")
        for name in self.reading:
            self.engines[name].check()


def _manifest_of(pairs: Iterable[Pair]) -> Manifest:
    return Manifest(tuple(spec_of(name, tensor) for name, tensor in pairs))


def _checked_round(name: str, step: object) -> Round:
    """Raise ConfigError where a handshake does not yield what the contract says."""
    if not isinstance(step, Round):
        raise ConfigError(
            f"backend {name!r}: handshake() yielded a {type(step).__name__}, not a Round"
        )
    check_plain(step.messages, f"backend {name!r}: handshake() or init_payload()")
    return step


def source_device(source: WeightSource) -> torch.device:
    """Where the source's tensors are, as far as that is known without making them."""
    stable = source.stable_tensors()
    if stable:
        return stable[0].device
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
