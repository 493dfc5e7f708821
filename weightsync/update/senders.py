"""The senders of a receiver: their engines, the owner, and the versions of their fleets."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from weightsync.backends.base import (
    Backend,
    WeightTransferEngine,
    check_contract,
    check_plain,
    expect,
    naming,
)
from weightsync.backends.registry import get_backend
from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    ProtocolError,
    SenderConflictError,
    UnknownSenderError,
)
from weightsync.shm.wait import Heartbeat
from weightsync.specs import Manifest
from weightsync.update.lifecycle import UpdateLifecycle
from weightsync.wire.codec import manifest_from_wire
from weightsync.wire.messages import SharedMemoryUsage
from weightsync.wire.offers import InitInfo, Owner, OwnerStatus, describe, utc

logger = logging.getLogger(__name__)

MAX_PEERS = 64
REMEMBERED_SENDERS = 1024
"""Number of senders, disconnected ones included, whose newest generation is kept."""
_KEPT_CLAIMS = 256


@dataclass(frozen=True, slots=True)
class _Connection:
    """The engine of a connected sender, with the data of its init message."""

    engine: WeightTransferEngine
    heartbeat: Heartbeat
    path: str
    manifest: Manifest
    lease_s: float


class Senders:
    """Receiver engines by sender id; `keys` are the device keys with which they open handles.

    The senders belong to the current owner, to dead previous owners, or to no owner. The engines
    send heartbeats while `at_work` is true. One thread at a time may call the methods that open,
    start, finish or close; any thread may call the others, which never wait for them.
    """

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys
        self.at_work = False
        self._connections: dict[str, _Connection] = {}
        self._opening = ""
        self._receiving: WeightTransferEngine | None = None
        self._generations: OrderedDict[str, int] = OrderedDict()
        self._owner: OwnerStatus | None = None
        self._owned: set[str] = set()

    @property
    def owner(self) -> OwnerStatus | None:
        """The last owner of this receiver, None before the first."""
        alive = any(self.alive(sender) for sender in list(self._owned))
        return replace(self._owner, alive=alive) if self._owner else None

    @property
    def owner_name(self) -> str | None:
        """The name of the last owner; asks no engine whether it lives."""
        return self._owner.name if self._owner else None

    def open(self, info: InitInfo) -> Manifest:
        """Open an engine for a sender, close its previous one, and return the sender's manifest.

        Raises ProtocolError for an offer that is older than one received before, or with MAX_PEERS
        other senders; SenderConflictError where this receiver belongs to another living sender.
        """
        newest = self._generations.get(info.sender, 0)
        if info.generation < newest:
            raise ProtocolError(
                f"generation {info.generation} of sender {info.sender} comes after {newest}, which "
                "replaced it; nothing was changed"
            )
        replaced = self.replaces(info)
        if not self.knows(info.sender) and len(self._connections) >= MAX_PEERS:
            raise ProtocolError(f"{MAX_PEERS} senders are connected already; shut one down")
        self._opening = info.sender
        try:
            manifest = self._open_engine(info)
        finally:
            self._opening = ""
        # Kept when the sender leaves: a late offer would then be mistaken for a new one.
        self._generations[info.sender] = info.generation
        self._generations.move_to_end(info.sender)
        while len(self._generations) > REMEMBERED_SENDERS:
            self._generations.popitem(last=False)
        if info.owner is not None:
            self._set_owner(info.owner, info.sender, replaced)
        return manifest

    def replaces(self, info: InitInfo) -> OwnerStatus | None:
        """Return the living owner that this offer replaces, None where there is none.

        Raises SenderConflictError where the offer may not replace it.
        """
        owner, offered = self.owner, info.owner
        if owner is None or offered is None or not owner.alive or owner.id == offered.id:
            return None
        # A sender of the living owner is not another sender that takes over.
        if offered.term <= owner.term or info.sender in self._owned:
            raise SenderConflictError(
                f"this receiver belongs to the sender of {describe(owner)}; close() that one, or "
                "connect(takeover=True)",
                owner=owner.name,
                since=utc(owner.since),
            )
        return owner

    def _set_owner(self, owner: Owner, sender: str, replaced: OwnerStatus | None) -> None:
        if replaced is not None:
            logger.warning("%s takes this receiver over from %s", owner.name, describe(replaced))
            for other in [s for s in self._owned if s != sender and self.alive(s)]:
                self.close(other)
        known = self._owner
        if known is None or known.id != owner.id:
            self._owner = OwnerStatus(
                id=owner.id,
                name=owner.name,
                term=owner.term,
                yields=owner.yields,
                since=time.time(),
            )
            self._owned.clear()
        self._owned.add(sender)

    def _open_engine(self, info: InitInfo) -> Manifest:
        manifest = manifest_from_wire(info.manifest)
        engine = _engine_of(info.backend, self.keys)
        kind = type(engine).__name__
        try:
            check_contract(type(engine), WeightTransferEngine, BackendUnavailableError)
            engine.check_init_info(info)
            if engine.exclusive:
                self.close(info.sender)
            with naming(f"{kind}.init_transfer_engine()", BackendUnavailableError):
                engine.init_transfer_engine(info)
            with naming(f"{kind}.sender_alive()", BackendUnavailableError):
                engine.sender_alive()
            with naming(f"{kind}.init_reply()", BackendUnavailableError):
                check_plain(engine.init_reply(), f"{kind}.init_reply()")
        except BaseException:
            _logged(engine, "shutdown")
            raise
        self.close(info.sender)
        heartbeat = Heartbeat(engine.beat, at_work=self._is_at_work)
        self._connections[info.sender] = _Connection(
            engine, heartbeat, info.path, manifest, info.lease_s
        )
        return manifest

    def _is_at_work(self) -> bool:
        return self.at_work

    def start_update(self, sender: str) -> WeightTransferEngine:
        """Return a sender's engine for the open update; start its update the first time.

        Raises UnknownSenderError for a sender that is not connected.
        """
        engine = self.get(sender)
        if engine is not self._receiving:
            self.finish_update()
            self._receiving = engine
            engine.start_weight_update()
        return engine

    def finish_update(self) -> None:
        """Finish the engine's update, after a commit or an abort."""
        engine, self._receiving = self._receiving, None
        if engine is not None:
            _logged(engine, "finish_weight_update")

    @property
    def feeds_others(self) -> bool:
        """Whether other receivers get the bytes of the open update from this one."""
        engine = self._receiving
        return engine is not None and engine.feeds_others

    def get(self, sender: str) -> WeightTransferEngine:
        """Return a sender's engine. Raises UnknownSenderError for one that is not connected."""
        connection = self._connections.get(sender)
        if connection is None:
            raise UnknownSenderError(
                f"sender {sender} is not known here (was this server restarted?); "
                "call init_weight_transfer_engine first"
            )
        return connection.engine

    def knows(self, sender: str) -> bool:
        """Whether a sender is connected."""
        return sender in self._connections

    def manifest(self, sender: str | None) -> Manifest | None:
        """Return the manifest that a sender announced, None where it is not connected."""
        connection = self._connections.get(sender or "")
        return connection.manifest if connection is not None else None

    def lease_s(self, sender: str | None) -> float:
        """Return how long a sender waits for progress; infinity where it is not connected."""
        connection = self._connections.get(sender or "")
        return connection.lease_s if connection is not None else math.inf

    def alive(self, sender: str) -> bool:
        """Whether a sender is connected or reconnecting, and lives."""
        connection = self._connections.get(sender)
        if connection is not None and _logged(connection.engine, "sender_alive"):
            return True
        # The engine may have been closed meanwhile: the engine that replaced it counts.
        return self._opening == sender or (
            self._connections.get(sender) is not connection and self.alive(sender)
        )

    def beat(self, sender: str | None) -> int | None:
        """Return a counter that grows while the sender's process runs; None if not observable."""
        connection = self._connections.get(sender or "")
        if connection is None:
            return None
        beat: int | None = _logged(connection.engine, "sender_beat")
        return beat

    def dead(self, *, keep: str | None) -> list[str]:
        """Return the connected senders that are dead, except `keep`, whose update is still open."""
        return [s for s in list(self._connections) if s != keep and not self.alive(s)]

    def close_dead(self, *, keep: str | None) -> list[str]:
        """Close the engines of dead senders, except of `keep`.

        Returns the senders that are certainly dead. Of others only the connection is lost.
        """
        certain = []
        for sender in self.dead(keep=keep):
            logger.info("sender %s is gone; its engine is closed", sender)
            engine = self.get(sender)
            if _logged(engine, "sender_alive") is not None:
                certain.append(sender)
            self.close(sender)
        return certain

    def close(self, sender: str | None) -> None:
        """Close a sender's engine, if it has one; None: every engine."""
        for closed in list(self._connections) if sender is None else [sender]:
            connection = self._connections.pop(closed, None)
            if connection is None:
                continue
            connection.heartbeat.close()
            if connection.engine is self._receiving:
                self.finish_update()
            _logged(connection.engine, "shutdown")

    def paths(self) -> dict[str, str]:
        """Return the path of every sender that is connected."""
        return {sender: known.path for sender, known in self._connections.copy().items()}

    def usage(self) -> list[SharedMemoryUsage]:
        """Return the shared memory that the engines hold open."""
        connections = list(self._connections.values())
        return [entry for known in connections for entry in _logged(known.engine, "usage") or []]


def _logged(engine: WeightTransferEngine, method: str) -> Any:
    """Call a method of an engine. An error is logged, and fails no status, init or update: None."""
    try:
        return getattr(engine, method)()
    except Exception:
        logger.warning("%s.%s() failed", type(engine).__name__, method, exc_info=True)
        return None


def installed_backend(name: str) -> Backend:
    """Return a backend that a sender named. Raises BackendUnavailableError for an unknown one."""
    try:
        return get_backend(name)
    except ConfigError as exc:
        raise BackendUnavailableError(f"this receiver cannot use it: {exc}") from exc


def _engine_of(name: str, keys: list[str]) -> WeightTransferEngine:
    """Return a new engine of a backend. Raises BackendUnavailableError where it cannot be used."""
    method = f"backend {name!r}: receiver_engine()"
    with naming(method, BackendUnavailableError):
        made = installed_backend(name).receiver_engine(keys)
    engine: WeightTransferEngine = expect(
        made, WeightTransferEngine, f"{method} returned", BackendUnavailableError
    )
    return engine


@dataclass(slots=True)
class _FleetClaim:
    """The fleet version that a sender claimed at the init with this generation.

    `during`: claimed since the last update began. `withdrawn`: the sender will init again.
    `lost_at`: the time, of `time.monotonic()`, at which its engine was lost without a shutdown.
    """

    version: int
    generation: int
    during: bool = True
    withdrawn: bool = False
    lost_at: float | None = None


class FleetClaims:
    """The versions that senders claim for their fleets. Callers hold the lock of `lifecycle`.

    A sender claims at init a version that its fleet holds. A receiver with an older version is
    CATCHING_UP until a full update commits, or until all senders with such a claim left or died.
    The claim of a sender that was lost without a shutdown stays valid for `grace_s` seconds,
    because the sender may init again.
    """

    def __init__(self, lifecycle: UpdateLifecycle, senders: Senders, grace_s: float) -> None:
        self._lifecycle = lifecycle
        self._senders = senders
        self._grace_s = grace_s
        self._claims: dict[str, _FleetClaim] = {}

    def joined(self, sender: str, fleet_version: int, *, generation: int = 0) -> None:
        """Record a sender's claim of its fleet's version.

        A repeated message, of the same `generation` (0: not known), claims nothing anew: a rewind
        may have been committed since then.
        """
        known = self._claims.pop(sender, None)
        if known is None or not generation or known.generation != generation:
            known = _FleetClaim(fleet_version, generation)
        self._claims[sender] = known
        while len(self._claims) > _KEPT_CLAIMS:
            del self._claims[next(iter(self._claims))]
        self._evaluate()

    def left(self, sender: str | None, *, for_good: bool) -> None:
        """Remove the claim of a sender (None: of every sender) that shut down.

        Without `for_good` the sender will init again, and its claim is marked as withdrawn.
        """
        for known in list(self._claims) if sender is None else [sender]:
            if for_good:
                self._claims.pop(known, None)
            elif known in self._claims:
                self._claims[known].withdrawn = True
        if self._lifecycle.required_version:
            self._evaluate()

    def remove_dead(self, dead: Iterable[str]) -> None:
        """Remove the claims of `dead` senders, and of senders that were lost for too long."""
        for sender in dead:
            self._claims.pop(sender, None)
        if self._lifecycle.required_version:
            self._evaluate()

    def started(self) -> None:
        """Record the start of an update. Later claims may be of a newer version than its own."""
        for claim in self._claims.values():
            claim.during = False

    def committed(self, sender: str | None, *, partial: bool) -> None:
        """Record the commit of an update; a full one satisfies claims made before it began."""
        if partial:
            return
        for known, claim in self._claims.items():
            if known == sender or not claim.during:
                claim.version = min(claim.version, self._lifecycle.version)
        self._evaluate()

    def _evaluate(self) -> None:
        now = time.monotonic()
        self._claims = {s: c for s, c in self._claims.items() if self._is_valid(s, c, now)}
        self._lifecycle.join(max((claim.version for claim in self._claims.values()), default=0))

    def _is_valid(self, sender: str, claim: _FleetClaim, now: float) -> bool:
        """Whether a claim is still valid: its sender is connected, or may connect again."""
        if self._senders.knows(sender):
            claim.withdrawn, claim.lost_at = False, None
            return True
        if claim.withdrawn:
            return claim.during or claim.version > self._lifecycle.version
        claim.lost_at = now if claim.lost_at is None else claim.lost_at
        return now - claim.lost_at < self._grace_s
