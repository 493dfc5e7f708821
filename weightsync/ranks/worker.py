"""One rank's part in sending: its source, and the ring or memory that its receivers read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import islice
from typing import Literal, Protocol

import msgspec
import torch

from weightsync.backends.gloo.sender import Chain, RingFeed
from weightsync.backends.ipc.sender import READER_PLACES, IpcOptions, IpcTrainerEngine
from weightsync.cuda import handles
from weightsync.errors import ConfigError, ProtocolError, TransferError
from weightsync.ranks.comm import (
    CancelFlag,
    Cancellation,
    CancelledError,
    RankComm,
    compare_manifests,
)
from weightsync.report import SyncReport
from weightsync.shm.host_keys import host_key
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
from weightsync.wire.messages import LedgerEntry, RegisteredUpdate
from weightsync.wire.offers import IpcInit, ProbeInfo
from weightsync.wire.problem import Problem

Places = dict[int, list[int]]
"""Reader places by the rank whose ring they belong to."""


class RingReaderInfo(Protocol):
    """A receiver that reads the ring of rank `rank` at place `reader`, by this path."""

    rank: int
    reader: int
    path: str

    @property
    def target(self) -> str: ...


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what rank 0 broadcasts; every rank does it and answers."""


class Open(Command, frozen=True, kw_only=True):
    """Make an engine of this path on each of these ranks; the others have none.

    `relayed` says that rank 0's ring also feeds receivers on other hosts.
    """

    paths: dict[int, Literal["cuda_ipc", "shared_memory"]]
    packed: bool
    relayed: bool


class Probe(Command, frozen=True, kw_only=True):
    """Export a probe for each of these places."""

    places: Places


class Export(Command, frozen=True, kw_only=True):
    """Export everything for each of these places; `fleet_version` goes along."""

    places: Places
    fleet_version: int | None = None


class CheckMoved(Command, frozen=True, kw_only=True):
    """Say whether registered memory has moved. Nothing else is on its way."""


class Begin(Command, frozen=True, kw_only=True):
    """Start an update of these places, of other tensors than the model's where `pairs`."""

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


AnyCommand = (
    Open | Probe | Export | CheckMoved | Begin | Transfer | KeepAlive | End | Withdraw | Finished
)


class CommandResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one rank answers: the fields that belong to the command, or `problem`.

    `changed` names tensors of its source that changed while they were sent.
    """

    problem: Problem | None = None
    probes: list[ProbeInfo] = []
    inits: list[IpcInit] = []
    moved: bool = False
    beats: dict[int, int] = {}
    update: RegisteredUpdate | None = None
    table_digest: str | None = None
    extra_nbytes: int = 0
    written_nbytes: int = 0
    changed: list[str] = []


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who a rank is: its device keys, and whether its tensors stay where they are."""

    keys: list[str]
    stable: bool
    on_gpu: bool
    no_cuda_ipc: str | None = None


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
    """Return a rank's card."""
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


LOCAL_PATHS = ("cuda_ipc", "shared_memory")
RELAY_READER = READER_PLACES - 1
"""The place on rank 0's ring from which other hosts are fed."""
RELAYED_BUCKET_NBYTES = 16 << 20
RELAYED_BUCKETS = 4


class RankWorker:
    """Does on one rank what rank 0 commands. `relay` is the way to other hosts, on rank 0 alone.

    `stop` ends a transfer of this rank, and with it that of all. `pairs` are the tensors of the
    next Begin that sends other tensors than the model's. `fault` makes every further step fail:
    this rank's caller has given the update up.
    """

    def __init__(self, source: WeightSource, options: IpcOptions, ranks: RankComm) -> None:
        self._ranks = ranks
        self._alone = ranks.size == 1
        self._steps = CollectiveSource(source, ranks)
        self._given = source
        self._watch = SourceWatch()
        self.source: WeightSource = source if self._alone else self._steps
        self._options = replace(options, device=source_device(source))
        self._gathers = source.stable_tensors() is None
        self.engine: IpcTrainerEngine | None = None
        self.relay: Chain | None = None
        self.pairs: NamedTensors | None = None
        self.stop = threading.Event()
        self.fault: BaseException | None = None
        self._check: Callable[[], None] = lambda: None
        self._heartbeat: Heartbeat | None = None
        self._reading: list[int] = []
        self._packed = False
        self._relaying = False
        self._active = False
        self._moves_model = True

    def rank_info(self) -> RankInfo:
        """Who this rank is."""
        on_gpu = self._options.device.type == "cuda"
        gpu = [handles.gpu_key(self._options.device)] if on_gpu else []
        return RankInfo(
            keys=[*gpu, host_key()],
            stable=not self._gathers,
            on_gpu=on_gpu,
            no_cuda_ipc=handles.why_not() if on_gpu else None,
        )

    def do(
        self, command: AnyCommand, check: Callable[[], None]
    ) -> CommandResult:  # one line a command
        """Do one command; `check` raises when a transfer must stop. Raises what went wrong."""
        self._check = check
        match command:
            case Open():
                return self._open(command)
            case Probe():
                engine, places = self._own(command.places)
                return CommandResult(probes=[engine.probe_info() for _ in places] if engine else [])
            case Export():
                engine, places = self._own(command.places)
                return CommandResult(inits=_inits(engine, places, command) if engine else [])
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

    def ledger(self, members: Iterable[RingReaderInfo]) -> list[LedgerEntry]:
        """What this rank shares now; the readers of it are named after `members`, where known."""
        engine, rank = self.engine, self._ranks.rank
        names = {m.reader: m.target for m in members if m.rank == rank and m.path in LOCAL_PATHS}
        if self.relay is not None:
            names[RELAY_READER] = "other hosts"
        return engine.exports.entries(names) if engine is not None else []

    def close(self) -> None:
        """Free everything, also where a part of it raises. Idempotent."""
        parts = self.engine, self.relay, self._heartbeat
        self.engine = self.relay = self._heartbeat = None
        with ExitStack() as last:
            for part in parts:
                if part is not None:
                    last.callback(part.close)
            self._watch.end()

    def _own(self, places: dict[int, list[int]]) -> tuple[IpcTrainerEngine | None, list[int]]:
        return self.engine, places.get(self._ranks.rank, [])

    def _open(self, command: Open) -> CommandResult:
        self.close()
        self._packed = command.packed
        path = command.paths.get(self._ranks.rank)
        if path is None:
            return CommandResult()
        options = replace(self._options, path=path, packed=command.packed)
        if command.relayed:
            # Every ring of one sender has the same buckets, so that one table fits them all.
            options = replace(
                options,
                bucket_nbytes=options.bucket_nbytes or RELAYED_BUCKET_NBYTES,
                num_buckets=options.num_buckets or RELAYED_BUCKETS,
            )
        self.engine = IpcTrainerEngine(self.source, options)
        self._heartbeat = Heartbeat(self.engine.beat)
        return CommandResult(extra_nbytes=self.engine.extra_nbytes)

    def _begin(self, command: Begin) -> CommandResult:
        engine, places = self._own(command.places)
        self._reading = places
        self._active = engine is not None and bool(places)
        self._moves_model = not command.pairs
        pairs = self._take_pairs() if command.pairs else None
        update: RegisteredUpdate | None = None

        def begin() -> None:
            nonlocal update
            self._watch_source(pairs)
            whole = None if pairs is None else [(name, gather(tensor)) for name, tensor in pairs]
            if engine is not None and self._active:
                update = engine.begin(places, verify=command.verify, pairs=whole)
                self._feed_relay(engine, places)
            elif self._gathers_in(packed=False):
                self._steps.drain()

        self._in_step(begin)
        return CommandResult(update=update)

    def _watch_source(self, pairs: list[tuple[str, torch.Tensor]] | None) -> None:
        """From here on nothing that this rank's part is read from may change."""
        source = self._given
        if isinstance(source, IterableSource):
            source.changed = []
        if pairs is not None:
            self._watch.begin([name for name, _ in pairs], [tensor for _, tensor in pairs])
        elif self._active or self._gathers:
            stable = self.engine.look() if self.engine is not None and not self._gathers else None
            if stable is not None:
                self._watch.begin([spec.name for spec in source.manifest.specs], stable)
            elif hasattr(source, "made_of"):
                self._watch.begin(*source.made_of())

    def _what_changed(self) -> list[str]:
        """Name what others changed of this rank's source since the update began."""
        engine, source = self.engine, self._given
        changed = self._watch.end(engine.is_place) if engine is not None else self._watch.end()
        return changed + (source.changed if isinstance(source, IterableSource) else [])

    def _take_pairs(self) -> list[tuple[str, torch.Tensor]]:
        """Return this rank's tensors, shards ungathered, once all ranks have the same."""
        given, self.pairs = self.pairs, None
        taken: list[tuple[str, torch.Tensor]] = []
        self._in_step(lambda: taken.extend(given or ()))
        if not self._alone:
            manifest = Manifest(tuple(spec_of(name, tensor) for name, tensor in taken))
            compare_manifests(manifest, self._ranks, advice="every rank has to send() the same")
        return taken

    def _look(self, command: CheckMoved | KeepAlive) -> CommandResult:
        if not isinstance(command, KeepAlive) or command.asks:
            self._check_own()
        if isinstance(command, KeepAlive):
            engine, reading = self.engine, self._reading
            return CommandResult(beats={r: engine.signs(r) for r in reading} if engine else {})
        if self.pairs is not None:
            self.pairs = None
            raise ProtocolError(
                "this rank sends tensors that rank 0 does not; every rank has to call send() as "
                "often as rank 0"
            )
        return CommandResult(moved=self.engine is not None and self.engine.needs_init)

    def _feed_relay(self, engine: IpcTrainerEngine, places: list[int]) -> None:
        self._relaying = self.relay is not None and RELAY_READER in places
        if self._relaying and self.relay is not None:
            self.relay.start(RingFeed(engine, RELAY_READER))

    def _transfer(self) -> CommandResult:
        self._in_step(self._hand_over)
        return CommandResult()

    def _hand_over(self) -> None:
        relay = self.relay if self._relaying else None
        try:
            if self.engine is not None and self._active:
                self.engine.transfer(self._check_all)
                if relay is not None:
                    relay.finish(self._check_all)
            elif self._gathers_in(packed=True):
                self._steps.drain()
        except BaseException:
            if relay is not None:
                relay.stop()
            raise

    def _end(self) -> CommandResult:
        engine, relaying = self.engine, self._relaying
        self._relaying = False
        if relaying and self.relay is not None:
            self.relay.stop()
        changed = self._what_changed()
        if engine is None:
            return CommandResult(changed=changed)
        engine.end()
        return CommandResult(
            changed=changed,
            table_digest=engine.table_digest if self._active else None,
            extra_nbytes=engine.extra_nbytes,
            written_nbytes=engine.written_nbytes if self._active else 0,
        )

    def _gathers_in(self, *, packed: bool) -> bool:
        """Whether the ranks make the model's tensors in this step: packed ones while they go."""
        return self._gathers and self._moves_model and self._packed == packed

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
        if self._relaying and self.relay is not None:
            self.relay.check()


def _inits(engine: IpcTrainerEngine, places: list[int], command: Export) -> list[IpcInit]:
    return [engine.init_info(place, fleet_version=command.fleet_version) for place in places]


def source_device(source: WeightSource) -> torch.device:
    """Where the source's tensors are, as far as that is known without making them."""
    stable = source.stable_tensors()
    if stable:
        return stable[0].device
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
