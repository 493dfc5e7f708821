"""The seam between the core and what moves bytes: `Backend` and its two engines.

An engine is one half of a backend, live in a process. It moves bytes and verifies them. It knows
no transports, no versions, and no rule of when a receiver may generate. The core calls the methods
of this module and no others.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec
import torch

from weightsync.cuda.wait import wait_for
from weightsync.errors import (
    ConfigError,
    ProtocolError,
    TransferError,
    WeightSyncError,
    text_of,
)
from weightsync.specs import Manifest
from weightsync.tensors import from_bytes
from weightsync.weights.copying.copy_plan import DeviceCopyUnit, HostCopyUnit, Memory, UnitCompiler
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.lines.stream_lines import PlacedStreams
from weightsync.weights.sinks.base import HOOK_ADVICE, LoadTarget, Verification, users_code
from weightsync.weights.sources.base import WeightSource
from weightsync.wire.codec import decode_payload
from weightsync.wire.messages import RegisteredUpdate, SharedMemoryUsage, TensorPart
from weightsync.wire.offers import InitInfo

__all__ = [
    "Backend",
    "Check",
    "Endpoint",
    "Handshake",
    "LoadContext",
    "Reach",
    "Reader",
    "Received",
    "Replies",
    "Round",
    "TrainerWeightTransferEngine",
    "TransferOptions",
    "TransferProgress",
    "Trial",
    "TrialPart",
    "WeightTransferEngine",
    "decode_payload",
]

Check = Callable[[], None]
"""Called between chunks and during waits. Raises when the transfer must stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """The transfer options that `connect` was given, and this rank's device.

    The backend chooses `packed` and the sizes that are None. `timeout_s` bounds every wait for
    progress. `device` holds the source's tensors. Where each of several ranks sends a stream of its
    own, `streams` is their number, and `turn` that of this rank's host among theirs, from 0.
    """

    packed: bool | None = None
    bucket_nbytes: int | None = None
    num_buckets: int | None = None
    adopt: bool = True
    timeout_s: float = 60.0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    streams: int = 1
    turn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One process, as an argument of `reach`.

    `keys` are the device keys of the process: the UUID of its GPU, if it has one, then the key of
    its host. `rank` is a trainer's rank, 0 for a receiver. `facts` is the plain data that the
    backend's `endpoint` returned in that process.
    """

    keys: Sequence[str]
    rank: int = 0
    facts: Any = None

    @property
    def host(self) -> str:
        """The key of the host, equal for all processes that share the memory of one host."""
        return self.keys[-1] if self.keys else ""

    @property
    def gpu(self) -> str | None:
        """The UUID of the GPU, None for a process on a CPU."""
        return self.keys[0] if len(self.keys) > 1 else None


@dataclass(frozen=True, slots=True)
class Reach:
    """One path from a trainer rank to a receiver; `why_not` is the reason if it is unusable.

    `cost` compares paths: the time of a transfer as a multiple of one plain copy of host memory.
    `why` is the reason for the cost, where it depends on the hosts; `weightsync doctor` shows it.
    `gpus` are the device keys of the trainer's GPU and of the receiver's, where no byte leaves the
    memory of GPUs. If such a path fails in an update, the receiver gets the next one.
    """

    path: str
    cost: float = 100.0
    why_not: str = ""
    why: str = ""
    gpus: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        cost: Any = self.cost
        if not (isinstance(cost, int | float) and cost >= 0):  # no NaN either
            raise ConfigError(f"the cost of {self} is no number that is at least 0")
        expect(self.why_not, str, "Reach.why_not is")
        expect(self.why, str, "Reach.why is")
        expect(self.gpus, tuple | None, "Reach.gpus is")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A read from one process of this machine by another, which shows whether a path works.

    `environment` has variables for both processes; a trial without them decides whether the path
    works. `title` tells the trials of one path apart. `why_not` is the reason not to run the
    trial. `remedy` says what to do if it fails, and `is_essential` that weightsync does not work
    then.
    """

    path: str
    title: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    why_not: str = ""
    remedy: str = ""
    is_essential: bool = False


class TrialPart(msgspec.Struct, frozen=True, kw_only=True):
    """One of several results of a trial: what was `seen`, or the reason `why_not` and the remedy.

    `title` tells it apart from others.
    """

    title: str = ""
    seen: str = ""
    why_not: str = ""
    remedy: str = ""


class Reader(msgspec.Struct, frozen=True, kw_only=True):
    """One receiver, as a trainer engine sees it.

    `index` identifies it, and is used once per engine. `target` is its name in messages. `route` is
    the target of its transport, and `local_address` the address of this host on that route, if the
    transport knows it. `keys` are its device keys. `facts` is the result of `endpoint` there.
    `wants` are the tensors of the engine's source, by index, of which it loads a part; None where
    it loads all, or where that is not known yet.
    """

    index: int
    target: str
    keys: list[str]
    route: str = ""
    local_address: str | None = None
    facts: Any = None
    wants: list[int] | None = None

    @property
    def host(self) -> str:
        """The key of its host."""
        return self.keys[-1] if self.keys else ""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Messages of one step of a handshake: a payload for each reader index.

    The payloads are those of init messages, or those of probes if `probe` is true.
    """

    messages: dict[int, Any]
    probe: bool = False


class Replies(msgspec.Struct, frozen=True, kw_only=True):
    """The replies to one round: `payloads` as plain data, and the indices of `failed` readers."""

    payloads: dict[int, Any] = {}
    failed: list[int] = []


Handshake = Generator[Round, Replies, None]
"""Yields rounds and receives their replies. It ends after a round with failed readers."""


@dataclass(frozen=True, slots=True)
class Received:
    """The result of one transfer: tensors, their fingerprints, and the level of verification.

    `tied` maps the names of tensors that the sink ties to another one to their fingerprints.
    `lines_total` is the sum of all lines of what arrived, where the memory cannot be added up later
    because it holds shards, and a delta may follow; see weightsync.weights.lines.memory. Without it
    such a receiver takes no delta of these weights. `stream_totals` has one for each stream of
    several ranks, with the digest of the streams. `waited_s` is for how long it waited for the
    sender's bytes. `read_nbytes` are the bytes of the stream that were read for it, `sources` these
    by rank, where several send. `extra_nbytes` is memory that the transfer took beside that which
    its load target counts. `parts` are those of the mix64 of the tensors that were written, where
    the update wants them.
    """

    manifest: Manifest
    fingerprints: list[int] = field(default_factory=list)
    verified: Verification = "none"
    tied: Mapping[str, str] = field(default_factory=dict)
    lines_total: int | None = None
    stream_totals: tuple[str, Sequence[int | None]] | None = None
    waited_s: float = 0.0
    read_nbytes: int = 0
    sources: Mapping[int, int] = field(default_factory=dict)
    extra_nbytes: int = 0
    parts: Mapping[str, list[TensorPart]] = field(default_factory=dict)


Steps = Generator[None, None, Received]
"""Yields in the middle of a transfer, and returns its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadContext:
    """Callbacks and settings that the receiver passes to an engine for one transfer.

    `open_target` returns the load target of a layout; `write` writes whole tensors to it. The
    engine calls `mark_dirty` before it changes the first byte of the weights in use. `check` raises
    when the update was aborted. `ties` are the sink's tied tensors.
    """

    open_target: Callable[[StreamLayout], LoadTarget]
    mark_dirty: Callable[[], None]
    check: Check
    verification: Verification
    lends_views: bool = True
    kept_advice: str = HOOK_ADVICE
    ties: Mapping[str, str] = field(default_factory=dict)

    def write(
        self, layout: StreamLayout, target: LoadTarget, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Write all tensors of `layout`, `uint8[nbytes]` each, to a load target of any kind.

        Complete on return. Calls `mark_dirty` first, so verify the tensors before this call if
        `target` cannot roll back. If `target.memory` is None, a hook receives the tensors and may
        keep views of them: do not overwrite them afterwards.
        """
        self.mark_dirty()
        if target.memory is None:
            pairs = zip(layout.manifest.specs, tensors, strict=True)
            with users_code("load_weights"):
                target.load([(spec.name, from_bytes(flat, spec)) for spec, flat in pairs])
        else:
            copy_tensors(layout, target.memory, Memory(tensors), self.check)


def in_one(steps: Steps) -> Received:
    """Return the result of a transfer in steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            received: Received = end.value
            return received


def copy_tensors(
    layout: StreamLayout, target: Memory, source: Memory, check: Check
) -> list[HostCopyUnit | DeviceCopyUnit]:
    """Copy all tensors of `layout` to whole tensors or shards; return the compiled units.

    Complete on return.
    """
    compiler = UnitCompiler(layout, target, source)
    compiled: list[HostCopyUnit | DeviceCopyUnit] = []
    for unit in layout.units:
        check()
        compiled.append(compiler.compile(unit))
        compiled[-1].copy()
    # Requests run in threads whose current device need not be that of the weights.
    wait_for(tensor.device for tensor in (*target.tensors, *source.tensors))
    return compiled


class TransferProgress(Protocol):
    """The progress of the readers of a running update, for observers.

    `layout` is the stream of the update.
    """

    layout: StreamLayout

    def taken_nbytes(self, reader: int) -> int:
        """Return a reader's position in the stream, in bytes. Any thread may call it."""


class WeightTransferEngine(ABC):
    """The receiving half of a backend. A receiver has one per sender that has called `init`.

    The receiver calls it from one thread at a time, in this order: `init_transfer_engine` once;
    `start_weight_update`, `receive_weights` once or more, and `finish_weight_update` for each
    update; `shutdown` at any time between updates.

    If `exclusive`, the receiver shuts down the engine of an earlier init of the same sender before
    it initialises this one, instead of afterwards.
    """

    exclusive: ClassVar[bool] = False

    def check_init_info(self, init_info: InitInfo) -> None:
        """Raise ProtocolError for an invalid payload. Called before an `exclusive` shutdown."""

    @abstractmethod
    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Decode `init_info.payload` (`decode_payload`), open all resources, and test the path.

        Raises HandleError or SegmentError for memory that cannot be opened, ProtocolError for an
        invalid payload, and BackendUnavailableError if the path fails for another reason.
        """

    def init_reply(self) -> Any:
        """Return the payload of the init reply, for the trainer engine's `Replies.payloads`."""
        return None

    def start_weight_update(self) -> None:
        """Prepare for an update. Called before its first `receive_weights`."""

    @abstractmethod
    def receive_weights(self, update_info: RegisteredUpdate, context: LoadContext) -> Received:
        """Copy every tensor of one message to its load target.

        Returns when the last byte is in place and verified. The sender may overwrite its buffers
        afterwards. Raises VerificationError naming tensors, TransferError, TransferTimeout.
        """

    def streams_in(self, memory: Memory) -> PlacedStreams | None:
        """Return where the streams of several ranks belong in a memory of the model, for deltas.

        None where one rank sends. Kept while the memory exists.
        """
        return None

    def receive_in_steps(self, update_info: RegisteredUpdate, context: LoadContext) -> Steps:
        """Do what `receive_weights` does, and yield after every few bytes.

        The streams of several ranks are received in turns, so that all ranks send at once. The
        caller closes the generator where it stops early.
        """
        yield from ()
        return self.receive_weights(update_info, context)

    def finish_weight_update(self) -> None:
        """Release the resources of an update. Called after its commit or abort."""

    @abstractmethod
    def sender_alive(self) -> bool | None:
        """Return whether the process that called `init` is alive. Any thread may call it.

        None if this engine's resources were closed, so that it cannot tell.
        """

    def sender_beat(self) -> int | None:
        """Return a counter that grows while the sender's process runs; None if it has none."""
        return None

    def beat(self) -> None:
        """Send a heartbeat to the sender. A heartbeat thread calls it while the receiver works.

        It is called only between `init_transfer_engine` and `shutdown`.
        """

    @property
    def feeds_others(self) -> bool:
        """Whether other receivers get the bytes of an update from this one now. For any thread."""
        return False

    def usage(self) -> list[SharedMemoryUsage]:
        """List the shared memory that this engine holds open. Any thread may call it."""
        return []

    @abstractmethod
    def shutdown(self) -> None:
        """Close all resources. Idempotent. Also called after a failed init."""


class TrainerWeightTransferEngine(ABC):
    """The sending half of a backend. A sender has one per rank that sends through this backend.

    That rank's worker calls `handshake` for new readers. For each update it calls `begin`, then
    `transfer`, then `end`. Readers are identified by their `Reader.index`. What an engine may do
    beside this is in the mix-ins HeldMemory, ReaderWatch and ReaderChanges, with defaults.
    """

    def init_payload(self, reader: Reader, generation: int) -> Any:
        """Return the payload of a reader's init message: a Struct or plain data.

        `generation` is that of the init message, which has it as well; it grows with each
        handshake. Not called if the engine has a `handshake` of its own.
        """
        raise ConfigError(f"{type(self).__name__} has neither init_payload() nor handshake()")

    def handshake(self, readers: Sequence[Reader], generation: int) -> Handshake:
        """Connect readers. The default is one round with every reader's `init_payload`."""
        yield Round(messages={r.index: self.init_payload(r, generation) for r in readers})

    @abstractmethod
    def begin(self, readers: Sequence[int], *, verify: bool, source: WeightSource) -> Any:
        """Start an update of these readers and return the payload of their update message.

        A dict from reader index to payload gives each reader its own. `source` has the tensors to
        send: it is the engine's source, or another one for a subset, whose manifest is in the
        message. The core sends the messages after this call.
        """

    @abstractmethod
    def transfer(self, check: Check) -> None:
        """Send all bytes and their fingerprints. Raises TransferTimeout."""

    def cancel(self) -> None:
        """Stop a transfer that failed in this engine or another, and release waiting readers.

        `end` follows.
        """

    @abstractmethod
    def end(self) -> None:
        """End the update after success or failure. Also called if `begin` was not."""

    @property
    @abstractmethod
    def table_digest(self) -> str | None:
        """Digest of the fingerprints that were sent; None when verification is off."""

    @abstractmethod
    def close(self) -> None:
        """Free all resources, and move adopted tensors back to private memory. Idempotent."""

    def check(self) -> None:
        """Raise the error of the running update, if it has failed.

        Called between `begin` and `end`, during the waits of all engines of this rank.
        """


class HeldMemory:
    """Mix-in of a trainer engine that holds memory, or whose readers open the model's."""

    @property
    def needs_init(self) -> bool:
        """Whether memory was reallocated, so that every reader needs another handshake."""
        return False

    @property
    def extra_nbytes(self) -> int:
        """Bytes held in addition to the model."""
        return 0

    @property
    def written_nbytes(self) -> int:
        """Bytes that this update has written into buffers so far."""
        return 0

    @property
    def packed(self) -> bool:
        """Whether tensors are copied through buckets; else readers read them where they are."""
        return True

    def is_adopted(self, index: int, address: int) -> bool:
        """Return whether this engine moved tensor `index` of the source to `address`."""
        return False

    def read_ahead(
        self,
        tensors: Mapping[int, torch.Tensor],
        counting: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        """Fingerprint tensors that have the values of the next update, if this engine can.

        Called between updates, in the trainer's thread, which does not wait for a GPU. `tensors`
        are the source's stable ones by their index, and `counting` has further tensors on which
        torch counts writes to them. What was written since is fingerprinted again.
        """

    def usage(self, names: Mapping[int, str]) -> list[SharedMemoryUsage]:
        """List the shared memory of this engine; `names` has the readers' targets by index."""
        return []

    def expect_finalizer(self) -> None:
        """Prepare for a `close` by the garbage collector, which may run during a training step."""


class ReaderWatch:
    """Mix-in of a trainer engine that sees what its readers do, and shows them that it lives."""

    def liveness_counter(self, reader: int) -> int | None:
        """Return a counter that grows while a reader's process works; None if it has none."""
        return None

    def has_unread(self, reader: int) -> bool:
        """Return whether bytes of the last update are still unread by this reader.

        Called when the reader has reported the update as complete.
        """
        return False

    @property
    def late_readers(self) -> list[int]:
        """The readers that made the last transfer time out."""
        return []

    def progress(self) -> TransferProgress | None:
        """Return the progress of the running update, for observers; None if there is none."""
        return None

    def beat(self) -> None:
        """Send a heartbeat to the readers. Called from a heartbeat thread."""


class ReaderChanges:
    """Mix-in of a trainer engine whose readers change during use, or read by a base engine."""

    def base_readers(self, readers: Sequence[int]) -> list[int]:
        """Return the reader indices that this engine uses on its base engine for these readers."""
        return []

    def expect_delta(self, *, follows: bool) -> None:
        """Note whether a delta may follow the next update. Called before `begin`, if at all.

        Then a reader with `wants` has to see all bytes, too.
        """

    def unready(self, readers: Sequence[int]) -> list[int]:
        """Return those of these readers that need another handshake before the next update.

        Called on rank 0 only, before each update.
        """
        return []

    def remove_reader(self, reader: int) -> None:
        """Remove a reader that left the fleet. Called on rank 0 only."""

    def goes_on_without(self, reader: int) -> bool:
        """Whether the others can receive the rest of an update after this reader has failed.

        Else it is sent a second time without that reader. Called on rank 0 only.
        """
        return False

    def drop_reader(self, reader: int) -> None:
        """Let the others receive the rest of the running update without a reader that has failed.

        Called on rank 0 only, perhaps more than once.
        """


MIXINS = (HeldMemory, ReaderWatch, ReaderChanges)
_Mixin = TypeVar("_Mixin", HeldMemory, ReaderWatch, ReaderChanges)


def part(engine: TrainerWeightTransferEngine, mixin: type[_Mixin]) -> _Mixin:
    """Return an engine as one that has a mix-in, or the defaults for an engine without it."""
    return engine if isinstance(engine, mixin) else mixin()


class Backend(ABC):
    """The code behind one or more paths: a trainer engine and a receiver engine.

    Register it with `register_backend` or by an entry point of the group `weightsync.backends`. One
    instance serves any number of senders and receivers.

    - `requires` maps the names of other backends to paths. The trainer engine gets the engines of
      these backends on the same rank. A required backend has no requirements of its own.
    - `max_readers` is the number of reader indices of one engine, None for any number. When they
      are used up, the core makes another engine and connects all its readers again.
    - `reads_in_place`: with `packed=False`, the engine reads a source that generates its tensors in
      `begin` instead of `transfer`.
    """

    name: ClassVar[str]
    requires: ClassVar[Mapping[str, str]] = {}
    reads_in_place: ClassVar[bool] = False
    max_readers: ClassVar[int | None] = None

    def endpoint(self, device: torch.device) -> Any:
        """Return facts about this process that `reach` needs, as plain data.

        Called on trainer ranks and receivers; on receivers more than once, from any thread. Raises
        BackendUnavailableError with the reason if this backend is unusable in this process.
        """
        return None

    @abstractmethod
    def reach(self, trainer: Endpoint, receiver: Endpoint) -> Reach | Sequence[Reach]:
        """Return the paths from a trainer rank to a receiver.

        A pure function of its arguments; an init message or a probe tests the path later.
        """

    def takes_streams(self, receiver: Endpoint) -> bool:
        """Whether the engine of a receiver reads the streams of several ranks (RankStreamsEngine).

        A pure function of its argument, as `reach` is.
        """
        return False

    def adjust(self, options: TransferOptions) -> TransferOptions:
        """Return the options for all engines of a sender that uses this backend.

        Raises ConfigError for options that this backend does not support.
        """
        return options

    @abstractmethod
    def trainer_engine(
        self,
        source: WeightSource,
        path: str,
        options: TransferOptions,
        bases: Mapping[str, TrainerWeightTransferEngine],
    ) -> TrainerWeightTransferEngine:
        """Return the sending half for one rank; `bases` has the engines of `requires` by name.

        Read the source's tensors exactly once per update, because iterating over a sharded model is
        a collective operation of all ranks. The engine casts the tensors to the dtypes of the
        source's manifest and checks their shapes (`weights.source.checked`). Raises SegmentError
        if memory is short.
        """

    @abstractmethod
    def receiver_engine(self, device_keys: Sequence[str]) -> WeightTransferEngine:
        """Return the receiving half. It can open memory of processes that share a device key."""

    def check_probe(self, payload: Any, device_keys: Sequence[str]) -> None:
        """Test the path with a probe of the trainer engine. Raises HandleError or SegmentError."""
        raise ProtocolError(f"the backend {self.name} has no probes")

    def trials(self) -> Sequence[Trial]:
        """Return the trials that `weightsync doctor` runs on this machine, none by default.

        Must be quick: it makes no CUDA context and opens no device.
        """
        return ()

    def offer_trial(self, path: str) -> AbstractContextManager[Any]:
        """Offer memory for a trial of `path`; yields what `read_trial` needs, as plain data.

        Called in a process that runs this trial alone. Raises a WeightSyncError if the path fails.
        """
        raise NotImplementedError(f"the backend {self.name} has trials, and no offer_trial()")

    def read_trial(self, path: str, offer: Any) -> str | Sequence[TrialPart]:
        """Read the memory of an offer, compare its bytes, and return a sentence on what was done.

        Or several, of which the first one says that the path works; the others may have a reason.
        Called in another process that runs this trial alone. Every wait in it has a timeout. Raises
        a WeightSyncError if the path fails.
        """
        raise NotImplementedError(f"the backend {self.name} has trials, and no read_trial()")


def check_plain(data: Any, method: str) -> None:
    """Raise ConfigError naming `method` unless `data`, its result, can be put in a message."""
    try:
        msgspec.to_builtins(data)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise ConfigError(f"{method} returned neither a Struct nor plain data: {exc}") from exc


def expect(value: Any, kind: Any, what: str, error: type[WeightSyncError] = ConfigError) -> Any:
    """Return `value` if it is of the type `kind`. Otherwise raises `error`.

    `what` begins the message, and names the method: "begin() returned".
    """
    if not isinstance(value, kind):
        wanted = getattr(kind, "__name__", kind)
        raise error(f"{what} a {type(value).__name__}, not a {wanted}")
    return value


def check_contract(kind: type, contract: type, error: type[WeightSyncError] = ConfigError) -> None:
    """Raise `error` that names every method of `contract` which the class `kind` does not have.

    A method of other parameters is none either: a backend that was written against an earlier
    contract is refused before an update begins, not in the middle of one.
    """
    lacking, unfit = _misfits(kind, contract)
    found = [f"lacks {', '.join(lacking)}"] if lacking else []
    if unfit:
        found.append(f"cannot be called as {', '.join(unfit)}")
    if contract is TrainerWeightTransferEngine:
        found += _unread(kind)
    if found:
        raise error(
            f"{kind.__name__} {' and '.join(found)}: see the contract {contract.__name__} of this "
            "version of weightsync"
        )


def _unread(kind: type) -> list[str]:
    """Return what an engine has of a mix-in from which it does not derive: nothing reads it."""
    found: list[str] = []
    for mixin in MIXINS:
        names = [n for n in vars(mixin) if not n.startswith("_") and hasattr(kind, n)]
        if names and not issubclass(kind, mixin):
            found.append(f"has {', '.join(names)} without the mix-in {mixin.__name__}")
    return found


def _misfits(kind: type, contract: type) -> tuple[list[str], list[str]]:
    """Return the names of abstract methods, and the methods that take other parameters."""
    lacking = sorted(getattr(kind, "__abstractmethods__", ()))
    unfit: list[str] = []
    contracts = [contract]
    if contract is TrainerWeightTransferEngine:
        contracts += [mixin for mixin in MIXINS if issubclass(kind, mixin)]
    for name, method in ChainMap(*map(dict, map(vars, contracts))).items():
        own = inspect.getattr_static(kind, name)
        if name.startswith("_") or own is method or name in lacking:
            continue
        if isinstance(method, property) and inspect.isfunction(own):
            unfit.append(f"{name}, a property")
        elif inspect.isfunction(method):
            called = inspect.signature(method)
            if not _takes(kind, name, called):
                shown = [p.replace(annotation=p.empty) for p in called.parameters.values()]
                call = called.replace(parameters=shown[1:], return_annotation=called.empty)
                unfit.append(f"{name}{call}")
    return lacking, unfit


def _takes(kind: type, name: str, called: inspect.Signature) -> bool:
    """Whether an attribute of a class is a method that takes what the core passes to it."""
    static, own = inspect.getattr_static(kind, name), getattr(kind, name)
    if not callable(own):
        return False
    parameters = list(called.parameters.values())
    if isinstance(static, staticmethod | classmethod):
        parameters = parameters[1:]
    elif not inspect.isfunction(static):
        return True  # another descriptor: nothing is known of it
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    try:
        takes = inspect.signature(own)
    except ValueError:
        return True  # a builtin that does not say what it takes
    try:
        takes.bind(*parameters[: len(parameters) - len(named)], **dict.fromkeys(named))
    except TypeError:
        return False
    return True


@contextmanager
def naming(method: str, error: type[WeightSyncError] = TransferError) -> Iterator[None]:
    """Raise `error`, which names `method`, for what a call of it raises beyond the contract."""
    try:
        yield
    except WeightSyncError:
        raise
    except Exception as exc:
        raise error(f"{method} failed: {type(exc).__name__}: {text_of(exc)}") from exc
