"""One rank's part in sending: its source, and the ring or memory that its receivers read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from weightsync.backends.gloo.sender import Chain, RingFeed
from weightsync.backends.ipc.sender import READER_PLACES, IpcOptions, IpcTrainerEngine
from weightsync.cuda import handles
from weightsync.errors import ConfigError, ProtocolError, TransferError
from weightsync.sending.agreement import compare_manifests
from weightsync.sending.commands import (
    AnyCommand,
    Begin,
    CheckMoved,
    CommandResult,
    End,
    Export,
    KeepAlive,
    Open,
    Probe,
    RankInfo,
    Transfer,
    Withdraw,
)
from weightsync.sending.lockstep import CollectiveSource
from weightsync.sending.ranks import RankComm
from weightsync.shm.host_keys import host_key
from weightsync.shm.wait import Heartbeat
from weightsync.specs import Manifest
from weightsync.tensors import spec_of
from weightsync.weights.shards import gather
from weightsync.weights.source import IterableSource, NamedTensors, SourceWatch, WeightSource
from weightsync.wire.messages import LedgerEntry, RegisteredUpdate
from weightsync.wire.offers import IpcInit

if TYPE_CHECKING:
    from weightsync.sending.fleet import Member

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

    def ledger(self, members: Iterable[Member]) -> list[LedgerEntry]:
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
