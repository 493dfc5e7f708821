"""The seam between the core and what moves bytes: `Backend` and its two engines.

An engine is one half of a backend, live in a process. It moves bytes and proves them. It knows
nothing of how messages travel, of versions, or of who may generate. The core calls the methods of
this module and no others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import msgspec
import torch

from weightsync.cuda.events import wait_for
from weightsync.errors import ConfigError, ProtocolError
from weightsync.specs import Manifest
from weightsync.tensors import from_bytes
from weightsync.weights.copy_plan import CompiledUnit, Memory, compiler_for
from weightsync.weights.layout import StreamLayout
from weightsync.weights.sink import HOOK_ADVICE, LoadTarget, Verification
from weightsync.weights.source import WeightSource
from weightsync.wire.codec import decode_payload
from weightsync.wire.messages import RegisteredUpdate, SharedMemoryUsage
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
    "WeightTransferEngine",
    "decode_payload",
]

Check = Callable[[], None]
"""Called between chunks and during waits; raises when the transfer must stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """How a sender moves weights: what `connect` was given, and this rank's device.

    `packed` None leaves it to the backend, and so do sizes that are None. `timeout_s` bounds every
    wait for progress. `device` is where the source's tensors are.
    """

    packed: bool | None = None
    bucket_nbytes: int | None = None
    num_buckets: int | None = None
    adopt: bool = True
    timeout_s: float = 60.0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One process, as `reach` compares it with another.

    `keys` are its device keys: the UUID of its GPU, if it has one, and last the key of its host.
    `rank` is a trainer's rank, 0 for a receiver. `facts` is what the backend's `endpoint` returned
    there, as plain data.
    """

    keys: Sequence[str]
    rank: int = 0
    facts: Any = None

    @property
    def host(self) -> str:
        """The key of the host, alike for all processes that share its memory."""
        return self.keys[-1] if self.keys else ""

    @property
    def gpu(self) -> str | None:
        """The UUID of the GPU, None for a process on a CPU."""
        return self.keys[0] if len(self.keys) > 1 else None


@dataclass(frozen=True, slots=True)
class Reach:
    """One path from a trainer rank to a receiver, or why it cannot be taken (`why_not`).

    `cost` compares paths: the time of a transfer in plain copies of host memory.
    """

    path: str
    cost: float = 100.0
    why_not: str = ""


class Reader(msgspec.Struct, frozen=True, kw_only=True):
    """One receiver as a trainer engine knows it.

    `index` is its place, never given twice by one engine. `target` names it in messages, `route`
    is the target of its transport, `local_address` the address at which that reaches this host,
    where it knows. `keys` are its device keys, `facts` what its backend's `endpoint` said.
    """

    index: int
    target: str
    keys: list[str]
    route: str = ""
    local_address: str | None = None
    facts: Any = None

    @property
    def host(self) -> str:
        """The key of its host."""
        return self.keys[-1] if self.keys else ""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Messages of one step of a handshake, by reader index: init payloads, or probes' (`probe`).

    `patience` times the sender's timeout is how long a reader may take to answer.
    """

    messages: dict[int, Any]
    probe: bool = False
    patience: float = 1.0


class Replies(msgspec.Struct, frozen=True, kw_only=True):
    """The readers' answers to one round: `payloads` as plain data, and who `failed`."""

    payloads: dict[int, Any] = {}
    failed: list[int] = []


Handshake = Generator[Round, Replies, Iterable[int]]
"""Yields rounds. One that is sent failed readers ends, and returns those who failed only because
of others: these are not blamed."""


@dataclass(frozen=True, slots=True)
class Received:
    """The result of one transfer: tensors, their fingerprints, and the level of verification.

    `tied` are the fingerprints of tensors that the sink ties to another one, by name.
    """

    manifest: Manifest
    fingerprints: list[int] = field(default_factory=list)
    verified: Verification = "none"
    tied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadContext:
    """Callbacks and settings that the receiver passes to an engine for one transfer.

    `open_target` returns the load target of a layout; `write` writes whole tensors to it. `touch`
    is called before the first byte of the weights in use changes. `check` raises when the update
    was aborted. `ties` are the sink's.
    """

    open_target: Callable[[StreamLayout], LoadTarget]
    touch: Callable[[], None]
    check: Check
    verification: Verification
    lends_views: bool = True
    kept_advice: str = HOOK_ADVICE
    ties: Mapping[str, str] = field(default_factory=dict)

    def write(
        self, layout: StreamLayout, target: LoadTarget, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Write all tensors of `layout`, `uint8[nbytes]` each, to a load target of any kind.

        Complete on return. Calls `touch` first: compare before, where `target` cannot go back. A
        hook may keep views of the tensors: do not overwrite them afterwards where `target.memory`
        is None.
        """
        self.touch()
        if target.memory is None:
            pairs = zip(layout.manifest.specs, tensors, strict=True)
            target.load([(spec.name, from_bytes(flat, spec)) for spec, flat in pairs])
        else:
            copy_tensors(layout, target.memory, Memory(tensors), self.check)


def copy_tensors(
    layout: StreamLayout, target: Memory, source: Memory, check: Check
) -> list[CompiledUnit]:
    """Copy all tensors of `layout` to whole tensors or shards; return the units, by `layout.runs`.

    Complete on return.
    """
    compiler = compiler_for(layout, target, source)
    units: list[CompiledUnit] = []
    for run in layout.runs:
        check()
        units.append(compiler.compile(run))
        units[-1].copy()
    # Requests run in threads whose current device need not be that of the weights.
    wait_for(tensor.device for tensor in (*target.tensors, *source.tensors))
    return units


Mark = tuple[str, int, float]
"""A chunk was `wanted`, `acquired` or `published`: its number, and `time.perf_counter()` then."""


class TransferProgress(Protocol):
    """The progress of the readers of a running update. No transfer waits for it.

    `marks`, where somebody puts a list there, takes what becomes of each chunk. `plan` is the
    stream of the update, cut into chunks where it is `packed`; `slots` are the buckets.
    """

    marks: list[Mark] | None
    plan: StreamLayout
    packed: bool

    @property
    def slots(self) -> int: ...

    def taken_nbytes(self, reader: int) -> int:
        """How far in the stream a reader is; any thread asks, during the update."""


class WeightTransferEngine(ABC):
    """The receiving half of a backend. One per sender that has called `init`.

    Called by the receiver from one thread at a time, in this order: `init_transfer_engine` once,
    then for each update `start_weight_update`, `receive_weights` once or more, and
    `finish_weight_update`; `shutdown` at any time between updates.

    `exclusive`: the engine of an earlier init of the same sender is shut down before this one is
    initialised, not afterwards.
    """

    exclusive: ClassVar[bool] = False

    def check_init_info(self, init_info: InitInfo) -> None:
        """Raise ProtocolError for an invalid payload, before an `exclusive` one is shut down."""

    @abstractmethod
    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Decode `init_info.payload` (`decode_payload`), open everything, and prove the path.

        Raises HandleError or SegmentError where memory cannot be opened, BackendUnavailableError
        where the path cannot work for another reason, ProtocolError for an invalid payload.
        """

    def init_reply(self) -> Any:
        """Return what the trainer's engine is to know of this one, as its `Replies.payloads`."""
        return None

    def start_weight_update(self) -> None:
        """An update begins."""

    @abstractmethod
    def receive_weights(self, update_info: RegisteredUpdate, context: LoadContext) -> Received:
        """Bring every tensor of one message to its load target.

        Returns when the last byte is in place and checked; the sender may overwrite its buffers
        then. Raises VerificationError naming tensors, TransferError, TransferTimeout.
        """

    def finish_weight_update(self) -> None:
        """The update is in use, or given up."""

    @abstractmethod
    def sender_alive(self) -> bool | None:
        """Whether the process that called `init` lives.

        None: what this engine opened is over, and the sender may live. Any thread asks.
        """

    def sender_beat(self) -> int | None:
        """Return what grows while the sender's process is not stopped; None where it is unseen."""
        return None

    def beat(self) -> None:
        """Show the sender that this process lives and works; called from a thread of its own.

        That is now and then while the receiver is at work, between `init_transfer_engine` and
        `shutdown`.
        """

    def usage(self) -> list[SharedMemoryUsage]:
        """List the shared memory that this engine holds open; any thread asks."""
        return []

    @abstractmethod
    def shutdown(self) -> None:
        """Close everything. Idempotent; called after a failed init, too."""


class TrainerWeightTransferEngine(ABC):
    """The sending half of a backend. One per sender and rank that feeds receivers by it.

    Called by that rank's worker: `handshake` for new readers, then for each update `begin`,
    `transfer` (which returns when everything was handed over) and `end`. Readers are named by their
    `Reader.index`.
    """

    def init_payload(self, reader: Reader, number: int) -> Any:
        """Return what a reader's engine needs once: a Struct or plain data.

        `number` grows with each offer of this sender, and is in the init message as well. Not asked
        of an engine with a `handshake` of its own.
        """
        raise ConfigError(f"{type(self).__name__} has neither init_payload() nor handshake()")

    def handshake(self, readers: Sequence[Reader], number: int) -> Handshake:
        """Connect readers: by default one round, of every reader's `init_payload`."""
        yield Round(messages={r.index: self.init_payload(r, number) for r in readers})
        return ()

    @abstractmethod
    def begin(self, readers: Sequence[int], *, verify: bool, source: WeightSource) -> Any:
        """Start an update of these readers, and return the payload of their message.

        A dict by reader index gives each its own. `source` is what is sent: the source that the
        engine was made with, or another one, of a subset, whose manifest is in the message.
        Messages go out when this returns.
        """

    @abstractmethod
    def transfer(self, check: Check) -> None:
        """Hand every byte over, and the fingerprints. Raises TransferTimeout."""

    def cancel(self) -> None:
        """Stop a transfer that failed, here or in another engine, so that no reader waits for it.

        `end` follows.
        """

    @abstractmethod
    def end(self) -> None:
        """End the update, whether it succeeded or not. Also called where `begin` was not."""

    @property
    @abstractmethod
    def table_digest(self) -> str | None:
        """Names the fingerprints of what was handed over; None when verification is off."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; adopted memory is moved back. Idempotent."""

    @property
    def needs_init(self) -> bool:
        """Whether memory has moved, so that every reader needs another handshake."""
        return False

    @property
    def extra_nbytes(self) -> int:
        """Bytes held beside the model."""
        return 0

    @property
    def written_nbytes(self) -> int:
        """Bytes that this update has written into buffers so far."""
        return 0

    @property
    def packed(self) -> bool:
        """Whether tensors pass through buffers, instead of being read where they are."""
        return True

    def check(self) -> None:
        """Raise what went wrong with the update, between `begin` and `end`.

        Called in the waits of all engines of this rank.
        """

    def places_on_base(self, readers: Sequence[int]) -> list[int]:
        """Return the places at which this engine itself reads its base engine for these readers."""
        return []

    def is_ready(self, readers: Sequence[int]) -> bool:
        """Whether an update of exactly these can begin; False asks for another handshake.

        Only asked of a `Backend.collective`.
        """
        return True

    def forget(self, reader: int) -> None:
        """Remove a reader that left the fleet. Rank 0's engine alone is told."""

    def blame(self, error: BaseException) -> list[int]:
        """Return the readers that caused an error of a transfer. Asked of rank 0's engine alone."""
        return []

    @property
    def late(self) -> list[int]:
        """The readers that did not read in time in the last transfer, of rank 0's engine alone."""
        return []

    def progress(self) -> TransferProgress | None:
        """Return what progress bars and traces look at during an update, where there is such."""
        return None

    def signs(self, reader: int) -> int | None:
        """Return what grows while a reader lives and works; None where it is unseen."""
        return None

    def unread(self, reader: int) -> bool:
        """Whether a reader that reports a complete update has not read all of it."""
        return False

    def is_place(self, index: int, address: int) -> bool:
        """Whether tensor `index` of the source was moved to `address` by this engine."""
        return False

    def beat(self) -> None:
        """Show readers that this process lives; called from a thread of its own."""

    def usage(self, names: Mapping[int, str]) -> list[SharedMemoryUsage]:
        """List the memory shared here; `names` are the readers' targets."""
        return []

    def dropped(self) -> None:
        """The garbage collector closes it next, perhaps in the middle of a training step."""


class Backend(ABC):
    """One way to move weights, or several: the code behind one or more paths.

    Make it known with `register_backend` or by an entry point of the group `weightsync.backends`;
    an instance serves any number of senders and receivers. `requires` names the backends on whose
    engines of the same rank this one is built, and the path that each of them has to take there;
    they require none themselves. `max_readers` of one engine are connected before all are connected
    anew, None for any number. `collective`: a handshake and an update are always of all its readers
    together, on rank 0 alone. `reads_in_place`: with `packed=False` its engines read a source that
    makes its tensors in `begin`, not in `transfer`.
    """

    name: ClassVar[str]
    requires: ClassVar[Mapping[str, str]] = {}
    collective: ClassVar[bool] = False
    reads_in_place: ClassVar[bool] = False
    max_readers: ClassVar[int | None] = None

    def endpoint(self, device: torch.device) -> Any:
        """Return what the other side has to know of this process for `reach`: plain data.

        Called on trainer ranks and receivers. Raises BackendUnavailableError, with the reason,
        where this backend cannot be used. A receiver may ask again, from any thread.
        """
        return None

    @abstractmethod
    def reach(self, trainer: Endpoint, receiver: Endpoint) -> Reach | Sequence[Reach]:
        """Return the paths from a trainer rank to a receiver. Pure: an init or a probe decides."""

    def adjust(self, options: TransferOptions) -> TransferOptions:
        """Return the options that all engines of a sender take that uses this backend.

        Raises ConfigError for options that it cannot keep to.
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
        """Return the sending half of one rank; `bases` are the engines of `requires`.

        The source's tensors are read once for each update: all ranks of a sharded model take part
        in making them. They come as they are: the engine casts them to the dtypes of the source's
        manifest, and compares them with it (`weights.source.checked`). Raises SegmentError where
        memory is short.
        """

    @abstractmethod
    def receiver_engine(self, device_keys: Sequence[str]) -> WeightTransferEngine:
        """Return the receiving half; `device_keys` say what memory of others it can open."""

    def check_probe(self, payload: Any, device_keys: Sequence[str]) -> None:
        """Try the path by a probe of the trainer's engine. Raises HandleError or SegmentError."""
        raise ProtocolError(f"the backend {self.name} has no probes")


def check_plain(data: Any, method: str) -> None:
    """Raise ConfigError, naming the method that returned it, unless `data` can be in a message."""
    try:
        msgspec.to_builtins(data)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise ConfigError(f"{method} returned what is no Struct and no plain data: {exc}") from exc
