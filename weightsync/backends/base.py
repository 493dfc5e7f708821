"""The contract of a backend: its sending and its receiving engine.

An engine is one half of a backend, live in a process. It moves bytes and proves them; it knows
nothing of how messages travel, of versions or of who may generate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from weightsync.specs import Manifest
from weightsync.weights.layout import StreamLayout
from weightsync.weights.sink import HOOK_ADVICE, LoadTarget, Verification
from weightsync.weights.source import NamedTensors
from weightsync.wire.messages import LedgerEntry, UpdateInfo
from weightsync.wire.offers import HostRing, Offer

Check = Callable[[], None]
"""Called between chunks and during waits; raises when the transfer must stop."""


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

    `open_target` returns the load target of a layout. `touch` is called before the first byte of
    the weights in use changes. `check` raises when the update was aborted. `ties` are the sink's.
    """

    open_target: Callable[[StreamLayout], LoadTarget]
    touch: Callable[[], None]
    check: Check
    verification: Verification
    lends_views: bool = True
    kept_advice: str = HOOK_ADVICE
    ties: Mapping[str, str] = field(default_factory=dict)


class WeightTransferEngine(ABC):
    """The receiving half. One per sender that has called `init`.

    Called by the receiver alone, from one thread at a time, in this order: `init_transfer_engine`
    once, then for each update `start_weight_update`, `receive_weights` once or more, and
    `finish_weight_update`; `shutdown` at any time between updates. `device_keys` say what memory
    of others this process can open.
    """

    def __init__(self, device_keys: Sequence[str]) -> None:
        self._keys = list(device_keys)

    @abstractmethod
    def init_transfer_engine(self, init_info: Offer) -> None:
        """Open everything and prove the path by its probe.

        Raises HandleError or SegmentError, ProtocolError for the init of another backend.
        """

    @property
    @abstractmethod
    def manifest(self) -> Manifest:
        """The manifest of the sender. Raises ProtocolError before init."""

    @property
    @abstractmethod
    def whole_plan(self) -> StreamLayout:
        """The stream of the whole model."""

    def host_ring(self) -> HostRing | None:
        """The ring that this engine made for the other workers of its host, if it makes one."""
        return None

    def start_weight_update(self) -> None:
        """An update begins."""

    @abstractmethod
    def receive_weights(self, update_info: UpdateInfo, reception: LoadContext) -> Received:
        """Bring every tensor of one message to its landing.

        Returns when the last byte is in place and checked; the sender may overwrite its buffers
        then. Raises VerificationError naming tensors, TransferError, TransferTimeout.
        """

    def finish_weight_update(self) -> None:
        """The update is in use, or given up."""

    @abstractmethod
    def sender_alive(self) -> bool:
        """Whether the process that called `init` still lives."""

    def sender_beat(self) -> int | None:
        """Return what grows while the sender's process is not stopped; None where it is unseen."""
        return None

    @abstractmethod
    def beat(self) -> None:
        """Show the sender that this process lives and works; called from a thread of its own.

        That is now and then while the receiver is at work, between `init_transfer_engine` and
        `shutdown`.
        """

    def ledger(self) -> list[LedgerEntry]:
        """List the shared memory that this engine holds open."""
        return []

    @abstractmethod
    def shutdown(self) -> None:
        """Close everything. Idempotent; safe after a failed init."""


class TrainerWeightTransferEngine(ABC):
    """The sending half. One per sender.

    Called by the sender alone: `init_info` for each receiver once, then for each update `begin`,
    `transfer` (which returns when everything was handed over) and `end`.
    """

    path: str
    manifest: Manifest

    @abstractmethod
    def init_info(self, reader: int, *, fleet_version: int | None = None) -> Offer:
        """Return the init message of the receiver at index `reader`."""

    @abstractmethod
    def begin(
        self, readers: Iterable[int], *, verify: bool, pairs: NamedTensors | None = None
    ) -> UpdateInfo:
        """Start an update of these readers; `pairs` is a subset of the model made on the fly."""

    @abstractmethod
    def transfer(self, check: Check) -> None:
        """Hand every byte over, and the fingerprints. Raises TransferTimeout naming who is late."""

    @abstractmethod
    def end(self) -> None:
        """The update is over, well or not: forget the tensors of it."""

    @property
    @abstractmethod
    def table_digest(self) -> str | None:
        """Names the fingerprints of what was handed over; None when verification is off."""

    @property
    @abstractmethod
    def needs_init(self) -> bool:
        """Whether memory has moved so that receivers must be given handles again."""

    @property
    @abstractmethod
    def extra_nbytes(self) -> int:
        """Bytes held beside the model."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; adopted memory is moved back. Idempotent."""
